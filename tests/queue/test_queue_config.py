"""The shared config: which file sets what, what may replace it, and that everything wrong is said at once."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import batchwright as bw
from batchwright.queue.config import SharedConfig
from batchwright.queue.provider import RESERVED

CONFIG = "config/train.py"
PROVIDER = "data/toy/prepare_streaming.py"
GOOD = "dataset = 'toy'\nbatch_size = 8\nblock_size = 16\n"
GOOD_PROVIDER = """
from batchwright import DataProviderBase

class Toy(DataProviderBase):
    def build_meta(self):
        return {"batch_schema": [{"name": "x", "dtype": "int64", "shape": [self.block_size]}]}
"""


def write(**files: str) -> None:
    write_all({name.replace("__", "/") + ".py": text for name, text in files.items()})


def write_all(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """We stand in a folder with a config and one dataset."""
    monkeypatch.chdir(tmp_path)
    write_all({CONFIG: GOOD, PROVIDER: GOOD_PROVIDER})
    return tmp_path


def load(text: str = GOOD, overrides: Sequence[str] = ()) -> SharedConfig:
    Path(CONFIG).write_text(text)
    return bw.load_config(CONFIG, overrides)


def problems_of(text: str = GOOD, overrides: Sequence[str] = ()) -> list[str]:
    with pytest.raises(bw.SpecError) as caught:
        load(text, overrides)
    return str(caught.value.where["problems"]).splitlines()


# --- Files and their order --------------------------------------------------------------------------------------------


def test_settings_are_items_and_attributes():
    config = load(GOOD + "learning_rate = 0.001\n")
    assert dict(config) == {"dataset": "toy", "batch_size": 8, "block_size": 16, "learning_rate": 0.001}
    assert config.learning_rate == config["learning_rate"] == 0.001
    assert config.path == Path(CONFIG)
    assert config.data_dir == Path("data/toy")


def test_files_of_the_dataset_run_first_by_name_and_the_shared_config_replaces_what_they_set():
    write(
        data__toy__config__b="both = 'b'\nof_b = both_so_far\n", data__toy__config__a="both = 'a'\nboth_so_far = both\n"
    )
    config = load(GOOD + "both = 'shared'\n")
    assert (config.both, config.of_b) == ("shared", "a")


def test_the_shared_config_may_use_names_that_files_of_the_dataset_set():
    write(data__toy__config__a="vocab_size = 65\n")
    assert load(GOOD + "num_classes = vocab_size + 1\n").num_classes == 66


def test_an_override_comes_last_and_what_was_computed_before_stays():
    config = load(GOOD + "row_tokens = batch_size * block_size\n", ["--batch_size=64"])
    assert (config.batch_size, config.row_tokens) == (64, 8 * 16)


def test_origins_say_which_line_or_option_set_a_name():
    write(data__toy__config__a="\nvocab_size = 65\nblock_size = 1\n")
    config = load(GOOD + "if block_size > 4:\n    size = 'big'\nelse:\n    size = 'small'\n", ["--batch_size=64"])
    assert config.origins == {
        "vocab_size": "data/toy/config/a.py:2",
        "dataset": "config/train.py:1",
        "batch_size": "--batch_size",
        "block_size": "config/train.py:3",
        "size": "config/train.py:5",
    }


def test_tools_of_a_config_are_no_settings():
    text = "import math; root = math.sqrt\nfrom pathlib import Path\n_half = 0.5\n"
    text += "from math import (\n    pi,\n    sqrt,\n)\n"
    config = load(text + GOOD + "lr = _half\n")
    assert set(config) == {"dataset", "batch_size", "block_size", "lr", "pi", "root"}


def test_a_star_import_brings_values_and_no_tools():
    config = load("from math import *\n" + GOOD)
    assert set(config) == {"dataset", "batch_size", "block_size", "pi", "e", "tau", "inf", "nan"}


def test_functions_and_classes_that_a_config_writes_or_assigns_are_settings():
    config = load(
        "import math\n" + GOOD + "root = math.sqrt\nkind = int\ndef decay(step):\n    return batch_size / step\n"
    )
    assert (config.root(9), config.kind, config.decay(2)) == (3, int, 4)


def test_a_function_of_the_config_may_replace_a_method_of_the_provider():
    Path(PROVIDER).write_text(GOOD_PROVIDER + "    def ratio(self):\n        return 1\n")
    assert load(GOOD + "def ratio():\n    return 2\n").ratio() == 2


def test_a_config_may_write_dataclasses():
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "@dataclass\nclass Stage:\n    ratio: float\n"
    assert load(text + GOOD + "stages = [Stage(0.5)]\n").stages[0].ratio == 0.5
    assert "batchwright_config" not in sys.modules


def test_annotations_of_a_config_are_evaluated_as_in_any_file():
    assert load(GOOD + "lr: float = 0.1\nkind = __annotations__['lr']\n").kind is float


@pytest.mark.parametrize(
    ("text", "num_runs"),
    [
        ("dataset = 'toy'\n", 1),
        ("dataset: str = 'toy'\n", 2),
        ("dataset = 'no'\ndataset = 'toy'\n", 2),
        ("dataset = 'to' + 'y'\n", 2),
        ("if True:\n    dataset = 'toy'\nelse:\n    dataset = 'no'\n", 2),
        ("dataset = 'no'\nif True:\n    dataset = 'toy'\n", 2),
        ("for dataset in ('no', 'toy'):\n    pass\n", 2),
        ("globals().update(dataset='toy')\n", 2),
    ],
)
def test_the_dataset_is_found_before_its_files_run(text, num_runs):
    counting = "from pathlib import Path\nwith Path('runs').open('a') as _file:\n    _file.write('run\\n')\n"
    write(data__toy__config__a="seen = True\n")
    config = load(counting + text + "batch_size = 8\nblock_size = 16\n")
    assert (config.dataset, config.seen) == ("toy", True)
    assert len(Path("runs").read_text().split()) == num_runs


def test_an_override_of_the_dataset_loads_the_files_of_that_one():
    write_all({"data/other/prepare_streaming.py": GOOD_PROVIDER, "data/other/config/a.py": "vocab_size = 3\n"})
    config = load(overrides=["--dataset=other"])
    assert (config.dataset, config.vocab_size, config.data_dir) == ("other", 3, Path("data/other"))


def test_a_shared_config_that_lies_in_the_dataset_folder_runs_once():
    write(data__toy__config__train=GOOD + "runs = globals().get('runs', 0) + 1\n")
    assert bw.load_config("data/toy/config/train.py").runs == 1


def test_a_validator_in_the_dataset_folder_is_no_config_of_the_dataset():
    write(data__toy__config__validator="left = 1\n", data__toy__config__a="kept = 2\n")
    assert set(load()) == {"dataset", "batch_size", "block_size", "kept"}


def test_data_may_lie_elsewhere(tmp_path):
    write_all({"elsewhere/toy/prepare_streaming.py": GOOD_PROVIDER})
    Path(PROVIDER).unlink()
    assert bw.load_config(CONFIG, data=tmp_path / "elsewhere").data_dir == tmp_path / "elsewhere" / "toy"


# --- Overrides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "option", "new"),
    [
        ("1e-3", "--it=1", 1.0),
        ("1e-3", "--it=3e-4", 3e-4),
        ("10", "--it=1_000", 1000),
        ("'a'", "--it=b", "b"),
        ("'a'", "--it='b c'", "b c"),
        ("'a'", "--it=2024", "2024"),
        ("'a'", "--it=", ""),
        ("'a'", "--it=b=c", "b=c"),
        ("True", "--it=False", False),
        ("None", "--it=3", 3),
        ("[1, 2]", "--it=(3, 4)", [3, 4]),
        ("(1, 2)", "--it=3,4", (3, 4)),
        ("{'a': 1}", "--it={'b': 2}", {"b": 2}),
        ("__import__('pathlib').Path('a')", "--it=b", Path("b")),
    ],
)
def test_an_override_has_the_type_of_what_it_replaces(old, option, new):
    found = load(GOOD + f"it = {old}\n", [option]).it
    assert (found, type(found)) == (new, type(new))


def test_a_parameter_of_providers_can_be_given_though_no_file_sets_it():
    config = load(overrides=["--seed=7", "--sleep_seconds=1", "--val_batches=None", "--durable=True"])
    assert (config.seed, config.sleep_seconds, config.val_batches, config.durable) == (7, 1, None, True)


def test_the_last_override_of_a_name_counts():
    assert load(overrides=["--batch_size=2", "--batch_size=4"]).batch_size == 4


# --- The object -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_a_copy_has_the_same_settings_and_facts(again: Callable[[Any], Any]):
    config = load(GOOD + "stages = [1]\n")
    other = again(config)
    assert other == config
    assert other is not config
    assert (other.path, other.data_dir, other.origins) == (config.path, config.data_dir, config.origins)


def test_a_name_that_is_not_set_is_an_attribute_error_with_the_nearest():
    with pytest.raises(AttributeError, match=r"config/train\.py sets no batchsize; did you mean batch_size\?"):
        _ = load().batchsize
    assert not hasattr(load(), "temperature")


def test_a_config_cannot_be_changed():
    config = load()
    with pytest.raises(AttributeError, match=r"read only: set batch_size in config/train\.py"):
        config.batch_size = 3  # type: ignore[misc]
    with pytest.raises(AttributeError, match="read only"):
        del config.batch_size
    assert config.batch_size == config["batch_size"] == 8


def test_a_config_prints_in_one_short_line():
    config = load(GOOD + "text = 'long' * 1000\n")
    assert repr(config) == "SharedConfig('config/train.py', dataset='toy', batch_size=8, block_size=16, 4 settings)"


# --- Bad input --------------------------------------------------------------------------------------------------------


@dataclass
class Bad:
    """A config that cannot work: the one problem that is said (its place, its words), and the remedy."""

    at: str
    what: str
    remedy: str
    text: str = GOOD
    overrides: list[str] = field(default_factory=list)
    files: dict[str, str | None] = field(default_factory=dict)


def setting(line: str, what: str, remedy: str, at: str = "config/train.py:4") -> Bad:
    return Bad(at, what, remedy, GOOD + line + "\n")


def dataset(value: str, what: str, remedy: str = "dataset = 'toy'") -> Bad:
    return Bad("config/train.py:1", what, remedy, GOOD.replace("'toy'", value))


def option(word: str, what: str, remedy: str, text: str = GOOD, at: str | None = None) -> Bad:
    return Bad(at or word, what, remedy, text, [word])


def validator(text: str, what: str, remedy: str = "change config/train.py as config/validator.py asks") -> Bad:
    return Bad("config/validator.py", what, remedy, files={"config/validator.py": text})


BAD = {
    "no dataset": Bad(
        CONFIG, "dataset is not set", "dataset = '<folder under data/>'", "batch_size = block_size = 8\n"
    ),
    "no batch_size": Bad(CONFIG, "batch_size is not set", "batch_size = 64", "dataset = 'toy'\nblock_size = 8\n"),
    "no block_size": Bad(CONFIG, "block_size is not set", "block_size = 256", "dataset = 'toy'\nbatch_size = 8\n"),
    # sizes
    **{
        f"{name} = {value}": setting(f"{name} = {value}", f"{name} must be {must}, got {value}", f"{name}={remedy}")
        for name in ("batch_size", "block_size", "target_size", "batches_per_file", "max_backlog_files", "val_batches")
        for value, must, remedy in [
            ("0", "at least 1", 1),
            ("-3", "at least 1", 1),
            ("True", "a whole number", 1),
            ("8.0", "a whole number", 8),
            ("'64'", "a whole number", 1),
        ]
    },
    "batch_size = None": setting("batch_size = None", "batch_size must be a whole number", "batch_size=1"),
    "a size of many lines": setting(
        "import numpy\nseed = numpy.eye(9)",
        "seed must be a whole number, got array([[1., 0., 0., ",
        "seed=1",
        at="config/train.py:5",
    ),
    "batch_size = nan": setting("batch_size = float('nan')", "batch_size must be a whole number", "batch_size=1"),
    "negative seed": setting("seed = -1", "seed must be at least 0, got -1", "seed=1"),
    "seed of True": setting("seed = True", "seed must be a whole number, got True", "seed=1"),
    "seed of text": setting("seed = 'x'", "seed must be a whole number, got 'x'", "seed=1"),
    **{
        f"sleep_seconds = {value}": setting(
            f"sleep_seconds = {value}", "sleep_seconds must be a number of seconds above 0", "sleep_seconds=2.0"
        )
        for value in ("0", "-1.5", "True", "'2'", "None", "float('inf')", "float('nan')")
    },
    "verbose = 1": setting("verbose = 1", "verbose must be True or False, got 1", "verbose=True"),
    "durable = 'no'": setting("durable = 'no'", "durable must be True or False, got 'no'", "durable=True"),
    "durable = 0": setting("durable = 0", "durable must be True or False, got 0", "durable=False"),
    # the dataset
    **{
        f"dataset = {value}": dataset(value, "must be the plain name of a folder under data", "dataset = 'name'")
        for value in (
            "''",
            "' '",
            "'data/toy'",
            "'/etc'",
            r"'data\\toy'",
            "'..'",
            "'.toy'",
            r"'toy\0'",
            "7",
            "None",
            "'x' * 5000",
        )
    },
    "dataset without a folder": dataset(
        "'toi'", "there is no folder data/toi; data holds toy", "dataset = 'toy', or make the folder data/toi"
    ),
    "no provider": Bad(
        "data/toy",
        "there is no prepare_streaming.py; it holds prepare_stream.py",
        "write data/toy/prepare_streaming.py with a DataProviderBase subclass",
        files={PROVIDER: None, "data/toy/prepare_stream.py": ""},
    ),
    # names
    "a setting named like a method": setting(
        "run = 1", "run is a method or attribute that every provider", "rename run"
    ),
    "a setting named like a property": setting("meta = 1", "meta is a method or attribute", "rename meta"),
    "a setting named self": setting("self = 1", "self is a method or attribute", "rename self"),
    "another rng": setting("rng_framework = 'jax'", "rng_framework must be 'numpy' or 'torch', got 'jax'", "'numpy'"),
    "a flag in words": setting(
        "reproducible = 'no'", "reproducible must be True or False, got 'no'", "reproducible=True"
    ),
    "a setting named config": setting("config = {}", "config is a method or attribute", "rename config"),
    "a setting named data_dir": setting("data_dir = 'x'", "data_dir is a method or attribute", "rename data_dir"),
    # files that do not run
    "a syntax error": Bad(
        f"{CONFIG}:2", "SyntaxError: '(' was never closed", f"correct {CONFIG}:2", "\nbatch_size = (\n"
    ),
    "wrong indentation": Bad(
        f"{CONFIG}:2", "IndentationError: unexpected indent", f"correct {CONFIG}:2", "\n  a = 1\n"
    ),
    "an import that fails": setting(
        "import no_such_module_here",
        "ModuleNotFoundError: No module named 'no_such_module_here'",
        "install no_such_mod",
    ),
    "a name that is not in a module": setting(
        "from math import tau2", "ImportError: cannot import name 'tau2'", f"correct {CONFIG}:4"
    ),
    "an exception": setting("1 / 0", "ZeroDivisionError: division by zero", f"correct {CONFIG}:4"),
    "an exception below a function": setting(
        "def f():\n    raise ValueError('a\\nb')\nf()", "ValueError: a b", f"correct {CONFIG}:5", at=f"{CONFIG}:5"
    ),
    "an exit": setting("raise SystemExit(3)", "SystemExit: 3", f"take the exit out of {CONFIG}:4"),
    "an endless recursion": setting("def f(): f()\nf()", "RecursionError", f"correct {CONFIG}:4"),
    "a zero byte": Bad(CONFIG, "null bytes", CONFIG, GOOD + "\0"),
    "a dataset's config that fails": Bad(
        "data/toy/config/a.py:1",
        "NameError: name 'nothing' is not defined",
        "correct data/toy/config/a.py:1",
        files={"data/toy/config/a.py": "a = nothing\n"},
    ),
    "a dataset's config with a syntax error": Bad(
        "data/toy/config/a.py:1",
        "SyntaxError: invalid syntax: a = ?",
        "correct data/toy/config/a.py:1",
        files={"data/toy/config/a.py": "a = ?\n"},
    ),
    "a folder among the dataset's configs": Bad(
        "data/toy/config/a.py",
        "IsADirectoryError",
        "correct data/toy/config/a.py",
        files={"data/toy/config/a.py/x": ""},
    ),
    "a name before its dataset is known": Bad(
        f"{CONFIG}:1",
        "NameError: name 'which' is not defined",
        f"correct {CONFIG}:1",
        "dataset = which\nbatch_size = block_size = 8\n",
        files={"data/toy/config/a.py": "which = 'toy'\n"},
    ),
    "a dataset that its own files change": Bad(
        f"{CONFIG}:1",
        "dataset is 'toy' before and 'other' after data/toy/config was loaded",
        "dataset = 'toy', as a plain string",
        "dataset = globals().get('which', 'toy')\nbatch_size = block_size = 8\n",
        files={"data/toy/config/a.py": "which = 'other'\n", "data/other/prepare_streaming.py": ""},
    ),
    # the command line
    "an unknown option": option(
        "--learning_rat=1",
        "no config file sets learning_rat",
        "--learning_rate=1",
        GOOD + "learning_rate = 0.1\n",
        at="--learning_rat",
    ),
    "an option with a hyphen": option(
        "--batch-size=4", "no config file sets batch-size", "--batch_size=4", at="--batch-size"
    ),
    "an option like nothing": option("--zzz=4", "no config file sets zzz", "zzz = 4 in config/train.py", at="--zzz"),
    "an option without a value": option("--verbose", "is not of the form --name=value", "--batch_size=64, in one word"),
    "an option without a name": option("--=3", "is not of the form --name=value", "--batch_size=64, in one word"),
    "a bare word": option("batch_size=3", "is not of the form --name=value", "--batch_size=64, in one word"),
    "a private option": option("--_x=1", "no config file sets _x", "_x = 1", GOOD + "_x = 2\n", at="--_x"),
    "a size that is no number": option(
        "--batch_size=many",
        "'many' is of type str; it would replace 8, which is of type int",
        "set batch_size in config/train.py",
    ),
    "a size of zero": option("--batch_size=0", "batch_size must be", "--batch_size=1", at="--batch_size"),
    "a dataset with a path as option": option(
        "--dataset=data/toy", "must be the plain name of a folder", "dataset = 'name'", at="--dataset"
    ),
    **{
        f"--it={new} for {old}": option(
            f"--it={new}",
            f"it would replace {old}, which is of type",
            "set it in config/train.py",
            GOOD + f"it = {old}\n",
        )
        for old, new in [
            ("3", "True"),
            ("3", "3.5"),
            ("3", "x"),
            ("0.5", "True"),
            ("True", "1"),
            ("True", "true"),
            ("[1]", "1"),
            ("3", "None"),
            ("range(0, 3)", "3"),
        ]
    },
    # the user's own validator
    "a validator's strings": validator("def validate(config):\n    return ['lr is missing']\n", "lr is missing"),
    "a validator's one string": validator("def validate(config):\n    return 'lr is missing'\n", "lr is missing"),
    "a validator's string of two lines": validator(
        "def validate(config):\n    return 'lr is\\nmissing'\n", "lr is missing"
    ),
    "a validator's generator": validator("def validate(config):\n    yield config.dataset + ' is old'\n", "toy is old"),
    "a validator's ValueError": validator("def validate(config):\n    raise ValueError('lr?')\n", "lr?"),
    "a validator that returns something else": validator(
        "def validate(config):\n    return True\n",
        "validate(config) failed: TypeError: 'bool' object is not iterable",
        "correct config/validator.py",
    ),
    "a validator that fails": Bad(
        "config/validator.py:2",
        "validate(config) failed: AttributeError: config/train.py sets no learning_rate",
        "correct config/validator.py:2",
        files={"config/validator.py": "def validate(config):\n    config.learning_rate\n"},
    ),
    "a validator that exits": Bad(
        "config/validator.py:2",
        "validate(config) failed: SystemExit",
        "take the exit out of config/validator.py:2",
        files={"config/validator.py": "def validate(config):\n    raise SystemExit\n"},
    ),
    "a validator with a syntax error": Bad(
        "config/validator.py:1",
        "SyntaxError: invalid syntax",
        "correct config/validator.py:1",
        files={"config/validator.py": "def ?\n"},
    ),
}


def everything_around() -> dict[str, Any]:
    return {
        "modules": set(sys.modules),
        "path": list(sys.path),
        "folder": os.getcwd(),
        "files": {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()},
    }


@pytest.mark.parametrize("bad", [pytest.param(bad, id=name) for name, bad in BAD.items()])
def test_bad_input_is_one_problem_with_its_place_and_remedy_and_changes_nothing(bad: Bad):
    bw.load_config(CONFIG)
    for name, text in bad.files.items():
        if text is None:
            Path(name).unlink()
        else:
            write_all({name: text})
    Path(CONFIG).write_text(bad.text)
    before = everything_around()
    with pytest.raises(bw.SpecError) as caught:
        bw.load_config(CONFIG, bad.overrides)
    assert everything_around() == before
    error = caught.value
    assert error.headline == "1 problem in the config config/train.py"
    (problem,) = str(error.where["problems"]).splitlines()
    assert problem.startswith(f"{bad.at}: ")
    assert bad.what in problem
    assert bad.remedy in str(error.remedy)


def test_all_problems_are_said_at_once():
    write_all({"config/validator.py": "def validate(config):\n    return ['lr is above 1']\n"})
    with pytest.raises(bw.SpecError) as caught:
        load("dataset = 'toy'\nbatch_size = -1\nseed = 0.5\nstop = 3\n", ["--batches_per_file=0", "--tempo=3", "x"])
    assert str(caught.value).splitlines() == [
        "8 problems in the config config/train.py",
        "  problems   x: is not of the form --name=value",
        "             --tempo: no config file sets tempo, so there is nothing to replace",
        "             config/train.py: block_size is not set",
        "             config/train.py:4: stop is a method or attribute that every provider has",
        "             config/train.py:2: batch_size must be at least 1, got -1",
        "             --batches_per_file: batches_per_file must be at least 1, got 0",
        "             config/train.py:3: seed must be a whole number, got 0.5",
        "             config/validator.py: lr is above 1",
        "  try        --batch_size=64, in one word without spaces",
        "             tempo = 3 in config/train.py",
        "             block_size = 256 in config/train.py",
        "             rename stop, e.g. to stop_setting",
        "             batch_size=1",
        "             --batches_per_file=1",
        "             seed=1, or another int",
        "             change config/train.py as config/validator.py asks",
    ]


def test_a_config_that_fails_half_way_is_not_blamed_for_what_it_would_have_set():
    text = "batch_size = 0\ndataset = 'toy'\nimport no_such_module_here\nblock_size = 16\nlr = 0.1\n"
    assert problems_of(text, ["--lr=0.2"]) == [
        "config/train.py:3: ModuleNotFoundError: No module named 'no_such_module_here'",
        "config/train.py:1: batch_size must be at least 1, got 0",
    ]


def test_every_file_that_fails_is_named():
    write(data__toy__config__a="a = ?\n", data__toy__config__b="1 / 0\n")
    assert [problem.partition(": ")[0] for problem in problems_of(GOOD + "c = [][0]\n")] == [
        "data/toy/config/a.py:1",
        "data/toy/config/b.py:1",
        "config/train.py:4",
    ]


def test_a_validator_that_fails_on_what_is_said_already_adds_nothing():
    write(config__validator="def validate(config):\n    return [] if config.batch_size % 8 else None\n")
    assert problems_of("dataset = 'toy'\nblock_size = 8\n") == ["config/train.py: batch_size is not set"]


@pytest.mark.parametrize(
    "text", ["def validate(config):\n    return None\n", "def validate(c):\n    return []\n", "x = 1\n"]
)
def test_a_validator_may_have_nothing_to_say(text):
    write(config__validator=text)
    assert load().batch_size == 8


def test_a_validator_is_not_asked_about_half_a_config():
    write(config__validator="def validate(config):\n    return ['lr is missing']\n")
    assert problems_of(GOOD + "1 / 0\nlr = 0.1\n") == ["config/train.py:4: ZeroDivisionError: division by zero"]


def test_the_validator_sees_overrides():
    write(config__validator="def validate(c):\n    return [f'{c.batch_size} from {c.origins[\"batch_size\"]}']\n")
    assert problems_of(overrides=["--batch_size=3"]) == ["config/validator.py: 3 from --batch_size"]


def test_datasets_that_there_are_come_nearest_first():
    for name in ("apple", "char_diffusion", "char_lm", ".hidden"):
        Path("data", name).mkdir()
    (problem,) = problems_of(GOOD.replace("toy", "char_difusion"))
    assert problem.endswith("there is no folder data/char_difusion; data holds char_diffusion, char_lm, toy, apple")


def test_a_missing_data_folder_is_told_with_where_we_are(project):
    Path("data").rename("elsewhere")
    (problem,) = problems_of()
    assert problem == f"config/train.py:1: there is no folder data/toy; data holds nothing; this is {project}"


@pytest.mark.parametrize(
    ("path", "headline", "remedy"),
    [
        ("config/trian.py", "there is no config file config/trian.py", "config/train.py"),
        ("config/train", "there is no config file config/train", "config/train.py"),
        ("train.py", "there is no config file train.py", "config/train.py"),
        ("nowhere/train.py", "there is no config file nowhere/train.py", "config/train.py"),
        ("config", "config is a folder, not a config file", "config/other.py"),
        ("", r"\. is a folder, not a config file", "config/other.py"),
        (None, "path must be a path, got None", "path='...', or a Path"),
        (7, "path must be a path, got 7", "path='...', or a Path"),
    ],
)
def test_a_missing_config_file_is_told_with_files_nearby(path, headline, remedy):
    write(config__other="")
    with pytest.raises(bw.SpecError, match=headline) as caught:
        bw.load_config(path)
    assert remedy in str(caught.value.remedy)


def test_a_config_that_works_changes_nothing_around_it():
    bw.load_config(CONFIG)
    before = everything_around()
    bw.load_config(CONFIG, ["--batch_size=3"])
    assert everything_around() == before


def test_an_interrupt_while_a_config_runs_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        load(GOOD + "raise KeyboardInterrupt\n")


def test_what_a_setting_may_not_be_named_is_what_a_provider_would_refuse(tmp_path):
    for name in sorted(RESERVED - {"data_dir", "self"}):
        with pytest.raises(bw.SpecError, match=f"{name} is a part of every provider"):
            bw.DataProviderBase(tmp_path, 8, **{name: 1})
