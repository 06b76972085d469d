"""Which framework a loader gives: torch if the program has loaded it, else NumPy; and what a missing torch says."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def run(code, store):
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(store)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split("\n")[:-1]


OPEN = """
    import sys
    import batchwright as bw
    def open(**given):
        return bw.PretrainDataLoader(sys.argv[1], chunk_size=16, **given)
"""


def test_the_framework_is_torch_only_where_the_program_has_loaded_it(small_store):
    code = """
        print(type(open().get_batch().input_ids).__module__, "torch" in sys.modules)
        import torch
        print(type(open().get_batch().input_ids).__module__)
        print(type(open(framework="numpy").get_batch().input_ids).__module__)
    """
    assert run(textwrap.dedent(OPEN) + textwrap.dedent(code), small_store) == ["numpy False", "torch", "numpy"]


@pytest.mark.parametrize("asked", ["open(framework='torch')", "open().torch()"])
def test_where_torch_is_missing_the_error_is_the_command_that_installs_it(small_store, asked):
    code = f"""
        sys.modules["torch"] = None         # importing it now fails, as where it is not installed
        try:
            {asked}
        except bw.MissingExtraError as error:
            assert isinstance(error, ImportError)
            print(error)
        print(open().framework)
    """
    assert run(textwrap.dedent(OPEN) + textwrap.dedent(code), small_store) == [
        "batchwright.adapters.torch needs torch, which is not installed",
        "  try        pip install 'batchwright[torch]'",
        "numpy",
    ]
