"""What a loader says where the framework that it is asked for is not installed, or is none."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from batchwright.base.errors import SpecError
from refusals import refused


@pytest.mark.parametrize(("framework", "module"), [("jax", "jax"), ("mlx", "mlx.core")])
def test_where_a_framework_is_missing_the_error_is_the_command_that_installs_it(small_store, framework, module):
    code = f"""
        import sys
        import batchwright as bw
        sys.modules["{module}"] = None         # importing it now fails, as where it is not installed
        try:
            bw.PretrainDataLoader(sys.argv[1], chunk_size=16, framework="{framework}")
        except bw.MissingExtraError as error:
            assert isinstance(error, ImportError)
            print(error)
        print(bw.PretrainDataLoader(sys.argv[1], chunk_size=16).framework)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(small_store)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        f"batchwright.adapters.{framework} needs {framework}, which is not installed",
        f"  try        pip install 'batchwright[{framework}]'",
        "numpy",
    ]


def test_a_framework_nobody_knows_is_an_error_that_names_those_there_are(open_loader, small_store):
    with refused(SpecError, "'numpy', 'torch', 'jax', 'mlx'", parameter="framework", remedy="framework='jax'"):
        open_loader(small_store, framework="jaxx")
