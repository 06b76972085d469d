"""Editors and type checkers see every public name: its signature, what its parameters take, and what they mean."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import batchwright as bw

SOURCE = Path(bw.__file__).parent.parent
NAMES = [name for name in bw.__all__ if name != "__version__"]

ANY_IS_MEANT = {
    "DataProviderBase.sample_batch(rng)": "a generator of NumPy or of torch: the subclass says which",
    "DataProviderBase(config)": "all names of a config",
    "DatasetBuffer.from_hf_dataset(settings)": "those of DatasetBuffer",
    "DatasetBuffer.from_table(settings)": "those of DatasetBuffer",
    "StreamingMixedShardDataset.loader(options)": "those of torch's DataLoader",
    "create_datasets(settings)": "those of StreamingMixedShardDataset",
}


# Type checkers: see typed_user.py too


def test_type_checkers_are_told_the_names_that_are_looked_up():
    tree = ast.parse((SOURCE / "batchwright" / "__init__.py").read_text())
    (told,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = {alias.asname: node.module for node in told.body for alias in node.names}
    assert imported == {name: f"batchwright.{home}" for name, home in bw._HOME.items()}


def test_no_module_has_the_name_of_a_public_function():
    assert [name for name in NAMES if importlib.util.find_spec(f"batchwright.{name}")] == []


# Signatures and what help() says


def callables(name: str) -> Iterator[tuple[str, Any, str]]:
    """(name, callable, its documentation) of a public name and, of a class, of its public methods."""
    value = getattr(bw, name)
    if not inspect.isclass(value):
        yield name, value, inspect.getdoc(value) or ""
        return
    yield name, value, f"{inspect.getdoc(value)}\n{inspect.getdoc(value.__init__)}"
    for method, function in inspect.getmembers(value, callable):
        if not method.startswith("_") and str(getattr(function, "__module__", "")).startswith("batchwright"):
            yield f"{name}.{method}", function, inspect.getdoc(function) or ""


def parameters(name: str) -> Iterator[tuple[str, inspect.Parameter, str]]:
    for full, value, told in callables(name):
        for parameter in inspect.signature(value).parameters.values():
            if parameter.name not in ("self", "cls"):
                yield f"{full}({parameter.name})", parameter, told


def test_completion_lists_every_public_name():
    assert dir(bw) == bw.__all__


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_documented(name):
    assert getattr(bw, name).__doc__
    silent = {full for full, parameter, told in parameters(name) if not re.search(rf"\b{parameter.name}\b", told)}
    assert not silent


@pytest.mark.parametrize("name", NAMES)
def test_no_argument_is_anything(name):
    annotated = {full: str(parameter.annotation) for full, parameter, _ in parameters(name)}
    assert {full for full, type_ in annotated.items() if "Any" in type_.split(" | ")} <= ANY_IS_MEANT.keys()
    assert inspect.Parameter.empty not in {parameter.annotation for _, parameter, _ in parameters(name)}


def test_every_exception_is_still_needed():
    annotated = {full: str(parameter.annotation) for name in NAMES for full, parameter, _ in parameters(name)}
    assert {full for full, type_ in annotated.items() if "Any" in type_.split(" | ")} == ANY_IS_MEANT.keys()
