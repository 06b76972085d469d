"""`python tests/verify_types.py 98`: the share of symbols whose types pyright knows. Fails below 98 %."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

COMMAND = ["basedpyright", "--verifytypes", "batchwright", "--ignoreexternal", "--outputjson"]


def main(least: float) -> int:
    environment = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(COMMAND, env={**os.environ, "PATH": environment}, capture_output=True, text=True)
    found = json.loads(ran.stdout)["typeCompleteness"]  # of the package that this environment has installed
    share = 100 * found["completenessScore"]
    print(f"pyright knows the types of {share:.1f} % of the symbols of {found['packageRootDirectory']}")
    if share >= least:
        return 0
    for symbol in found["symbols"]:
        if symbol["isExported"] and not (symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]):
            print(symbol["name"], *(each["message"] for each in symbol["diagnostics"]), sep="\n  ")
    return 1


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
