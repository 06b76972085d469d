"""What may import what, which names are public, and that `import batchwright` brings no framework along."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import batchwright

PACKAGE = Path(batchwright.__file__).parent
ROOT = Path(__file__).parents[1]
USERS = ("examples", "benchmarks")
"""Folders beside the package whose files import from it."""

# The house, as data: each place in the order in which data walks, with the places before it that it may import.
# A place is a folder of the package, or a module beside the folders.
PATH = ("base", "order", "columns", "sources", "prepare", "store")
EDGE = ("adapters", "cli", "demo")
EVERYTHING = (
    *PATH,
    "batches",
    "rl",
    "buffer",
    "rollouts",
    "pool",
    "queue",
    "baking",
    "loaders",
    "audit",
    *EDGE,
    "typing",
)

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "__init__": EVERYTHING,  # for types; at run time a name is looked up when it is first used
    "__main__": ("cli",),
    "typing": EVERYTHING,  # for type checkers
    "base": ("typing",),
    "order": ("base", "typing"),
    "columns": ("base",),
    "sources": ("base", "columns"),
    "prepare": ("base", "columns", "sources", "typing"),
    "store": (*PATH, "typing"),
    "batches": (*PATH, "typing"),
    "rl": ("base", "columns"),
    "buffer": ("base", "order", "columns", "batches", "typing"),
    "queue": ("base", "order", "columns", "batches", "typing"),
    "pool": ("base", "order", "columns", "batches"),
    "rollouts": ("base", "order", "columns", "sources", "prepare", "rl", "typing"),
    "baking": (*PATH, "buffer", "typing"),
    "loaders": (*PATH, "batches", "rl", "buffer", "rollouts", "pool", "baking", "typing"),
    "audit": (*PATH, "batches", "loaders", "typing"),
    "adapters": (*PATH, "batches", "loaders", "pool"),
    "cli": EVERYTHING,
    "demo": EVERYTHING,
}
MAY_IMPORT = {place: (place, *others) for place, others in MAY_IMPORT.items()}
EXCEPTIONS = {
    ("__init__.py", "batchwright.*"): "public names, each from its home",
    ("batches/frameworks.py", "batchwright.adapters.*"): "the adapter of a framework, when it is needed",
    ("buffer/reads.py", "batchwright.loaders.buffer_rows"): "buffer.loader()",
    ("order/plan.py", "batchwright.loaders.amending"): "plan.amend()",
}
FRAMEWORKS = ("torch", "torchdata", "jax", "jaxlib", "flax", "mlx", "tensorflow", "transformers", "datasets")
MAY_NAME_A_FRAMEWORK = ("adapters", "cli", "demo", "typing")
FRAMEWORKS_AT_THE_EDGE = ("torch", "jax", "mlx")

PUBLIC = [
    "Advantages",
    "Batching",
    "BatchwrightError",
    "BusyError",
    "ConversationDataLoader",
    "DataLoader",
    "DataProviderBase",
    "DatasetBuffer",
    "DatasetConsumer",
    "DatasetRecipe",
    "Delivery",
    "EndOfRun",
    "Fields",
    "MemoryLimitError",
    "MissingExtraError",
    "MissingQueueError",
    "MixedDataLoader",
    "Mixture",
    "NotReadyError",
    "OutOfSpaceError",
    "Plan",
    "PlanError",
    "PretrainDataLoader",
    "QueueError",
    "RolloutDataLoader",
    "RolloutLog",
    "RowIndexError",
    "SampleError",
    "SampleTypeError",
    "Shuffle",
    "SourceError",
    "SpecError",
    "Store",
    "StoreError",
    "StreamingMixedShardDataset",
    "SyncError",
    "TokenizerError",
    "TraceRecord",
    "TrainingBatch",
    "WorkerError",
    "__version__",
    "add_ingredient",
    "adopt",
    "bake",
    "chat",
    "create_datasets",
    "digest",
    "dihedral8",
    "discover_and_split_multiple_data",
    "drill",
    "explain",
    "export",
    "find",
    "hex4",
    "load_config",
    "look",
    "open_store",
    "prepare_step",
    "ramp",
    "register_augmentation",
    "register_balancing",
    "register_format",
    "register_normalizer",
    "register_sharding",
    "tokenize",
    "trace",
    "train_tokenizer",
]


def imports_of(file: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported when a function is called, or for types only) of every import in a file."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, is_lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}, line {node.lineno}: a relative import; write the whole name"
            names = [
                f"batchwright.{alias.name}" for alias in node.names
            ]  # `from batchwright import store` names a place
            found.extend((name, is_lazy) for name in (names if node.module == "batchwright" else [node.module or ""]))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "import_module",
            "__import__",
        ):
            found.append((_text_of(node.args[0]), is_lazy))
        for child in ast.iter_child_nodes(node):
            is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            visit(child, is_lazy or is_for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(file.read_text()), is_lazy=False)
    return sorted(set(found))


def _text_of(name: ast.expr) -> str:
    """What is written of a name that is put together when the program runs: `batchwright.adapters.*`."""
    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)


def place_of(file: Path, package: Path) -> str:
    return file.relative_to(package).parts[0].removesuffix(".py")


def against_the_map(package: Path) -> list[str]:
    """What breaks the house rules, one line each, with the file that does."""
    broken = []
    for file in sorted(package.rglob("*.py")):
        name, place = file.relative_to(package).as_posix(), place_of(file, package)
        if place not in MAY_IMPORT:
            broken.append(f"{name}: {place} is not in the map")
            continue
        for module, is_lazy in imports_of(file):
            top, _, rest = module.partition(".")
            if top in FRAMEWORKS_AT_THE_EDGE and place not in MAY_NAME_A_FRAMEWORK:
                broken.append(f"{name} imports {module}: only adapters name a framework")
            met = rest.partition(".")[0]
            met = batchwright._HOME.get(met, met)  # `from batchwright import bake` is an import of baking
            is_exception = (name, module) in EXCEPTIONS and is_lazy
            if top == "batchwright" and met in (*MAY_IMPORT, "*") and met not in MAY_IMPORT[place] and not is_exception:
                broken.append(f"{name} imports {module}: against the map")
    return broken


def test_every_file_imports_only_what_the_map_allows():
    assert against_the_map(PACKAGE) == []


def picture_of_the_map() -> str:
    """The map as a Mermaid graph: an arrow from each folder to those that it imports, but not to what they import."""
    drawn = {
        place: set(others) - {place, "typing"} for place, others in MAY_IMPORT.items() if (PACKAGE / place).is_dir()
    }
    arrows = []
    for place, others in drawn.items():
        if place in ("cli", "demo"):
            continue  # they import everything
        implied = set().union(*(drawn[other] for other in others))
        arrows += [f"  {place} --> {other}" for other in sorted(others - implied)]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```"])


def test_the_design_page_draws_the_map():
    page = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
    assert picture_of_the_map() in page


def test_every_exception_in_the_map_is_still_needed():
    for (name, module), why in EXCEPTIONS.items():
        assert (module, True) in imports_of(PACKAGE / name), f"{name} no longer imports {module} ({why}): remove it"


@pytest.mark.parametrize(
    ("name", "code", "broken"),
    [
        ("order/mix.py", "from batchwright.store.reader import Store", "order/mix.py imports batchwright.store.reader"),
        ("order/mix.py", "import batchwright.store", "order/mix.py imports batchwright.store"),
        ("order/mix.py", "from batchwright import store", "order/mix.py imports batchwright.store"),
        ("order/mix.py", "from batchwright import bake", "order/mix.py imports batchwright.bake"),
        (
            "base/checks.py",
            "import importlib\nimportlib.import_module(f'batchwright.{x}')",
            "base/checks.py imports batchwright.*",
        ),
        (
            "base/checks.py",
            "def f():\n    from batchwright.batches.flow import Flow",
            "base/checks.py imports batchwright.batches.flow",
        ),
        ("baking/run.py", "from batchwright.loaders import DataLoader", "baking/run.py imports batchwright.loaders"),
        ("batches/ranks.py", "import torch.distributed", "batches/ranks.py imports torch.distributed"),
        ("batches/flow.py", "def f():\n    import jax", "batches/flow.py imports jax"),
        (
            "batches/flow.py",
            "from importlib import import_module\nimport_module('mlx.core')",
            "batches/flow.py imports mlx.core",
        ),
        ("loaders/run.py", "import batchwright.adapters.torch", "loaders/run.py imports batchwright.adapters.torch"),
        ("viewer/page.py", "", "viewer/page.py: viewer is not in the map"),
    ],
)
def test_the_map_names_the_file_that_breaks_it(tmp_path, name, code, broken):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(code)
    (found,) = against_the_map(tmp_path)
    assert found.startswith(broken)


# Frameworks


def frameworks_loaded_by(code: str, *paths: Path) -> list[str]:
    """The frameworks that are loaded in a fresh process after some code."""
    script = f"{code}\nimport sys\nprint(*sorted(sys.modules.keys() & set({FRAMEWORKS!r})))"
    path = os.pathsep.join([*map(str, paths), str(PACKAGE.parent)])
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.split()


def test_importing_batchwright_loads_no_framework():
    assert frameworks_loaded_by("import batchwright") == []


def test_using_every_public_name_loads_no_framework():
    assert (
        frameworks_loaded_by("import batchwright; [getattr(batchwright, name) for name in batchwright.__all__]") == []
    )


def test_the_check_for_frameworks_can_fail(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "batchwright", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "torch.py").touch()  # a stand-in, so that this needs no torch
    assert frameworks_loaded_by("import batchwright", tmp_path) == []
    with (tmp_path / "batchwright" / "__init__.py").open("a") as file:
        file.write("\nimport torch\n")
    assert frameworks_loaded_by("import batchwright", tmp_path) == ["torch"]


# The public surface


def modules() -> list[str]:
    files = (file.relative_to(PACKAGE.parent).with_suffix("").parts for file in PACKAGE.rglob("*.py"))
    return sorted(".".join(parts).removesuffix(".__init__") for parts in files if parts[-1] != "__main__")


def test_the_public_names_are_the_chosen_ones():
    assert sorted(PUBLIC) == PUBLIC
    assert batchwright.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_and_is_listed(name):
    assert getattr(batchwright, name) is not None
    assert name in dir(batchwright)


def test_a_name_that_is_not_public_is_refused_by_name():
    with pytest.raises(AttributeError, match="module 'batchwright' has no attribute 'bakery'"):
        batchwright.bakery  # noqa: B018


@pytest.mark.parametrize("module", modules())
def test_every_module_lists_what_is_public_in_it(module):
    public = getattr(importlib.import_module(module), "__all__", [])
    assert sorted(set(public)) == sorted(public)
    for name in public:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name} does not exist"


PUBLIC_MODULES = ("__init__", "__main__", "typing", "adapters", "audit", "rl")
"""Places whose names are for users, and not only for other folders."""


def imported_from_elsewhere(package: Path, others: list[Path]) -> dict[str, set[str]]:
    """The names of each module that files outside of its folder import."""
    found: dict[str, set[str]] = {}
    for file in [*package.rglob("*.py"), *others]:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("batchwright."):
                continue
            if file in others or place_of(file, package) != str(node.module).split(".")[1]:
                names = {alias.name for alias in node.names if not alias.name.startswith("_")}
                found.setdefault(str(node.module), set()).update(names)
    return found


def test_a_module_lists_the_names_that_other_folders_import():
    elsewhere = imported_from_elsewhere(PACKAGE, [file for name in USERS for file in (ROOT / name).rglob("*.py")])
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(["batchwright", *file.relative_to(PACKAGE).with_suffix("").parts])
        if (
            place_of(file, PACKAGE) in PUBLIC_MODULES
            or file.name == "__init__.py"
            or module == "batchwright.base.errors"
        ):
            continue
        listed = set(getattr(importlib.import_module(module), "__all__", []))
        assert listed == elsewhere.get(module, set()), f"{module}: __all__ is what other folders import"


@pytest.mark.parametrize(
    "folder", sorted(file.parent.relative_to(PACKAGE) for file in PACKAGE.glob("*/**/__init__.py"))
)
def test_no_name_hides_a_folder(folder):
    module = importlib.import_module(".".join(["batchwright", *folder.parts]))
    parent = importlib.import_module(".".join(["batchwright", *folder.parts[:-1]]))
    assert getattr(parent, folder.name) is module
