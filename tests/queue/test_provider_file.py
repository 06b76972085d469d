"""From a config to its provider: the file is loaded with the config's names, the class found, and made."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.queue.config import SharedConfig
from batchwright.queue.provider_file import open_provider

HEAD = "from batchwright import DataProviderBase\n"
CODE = HEAD + "class P(DataProviderBase): pass\n"


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """opened(code, name=value, ...): the provider in data/toy/prepare_streaming.py, and the config's names."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def opened(code: str, dataset: str = "toy", **names: Any) -> Any:
        folder = Path("data") / dataset
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prepare_streaming.py").write_text(code)
        names = {"dataset": dataset, "batch_size": 4, "block_size": 8} | names
        return open_provider(SharedConfig(names, Path("config/toy.py"), folder))

    yield opened
    for name in [name for name in sys.modules if name.startswith("prepare_streaming_of_")]:
        del sys.modules[name]


# Names


def test_every_name_of_the_config_is_a_setting_an_attribute_and_a_global(opened):
    provider = opened(HEAD + "seen = globals()['rate']\nclass P(DataProviderBase):\n    k = rate\n", rate=0.5)
    assert (provider.config["rate"], provider.rate, provider.k) == (0.5, 0.5, 0.5)
    assert (provider.config["dataset"], provider.block_size, provider.data_dir) == ("toy", 8, Path("data/toy"))


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("rate = 0.15", 0.5),
        ("rate: float = 0.15", 0.5),
        ("rate = [1, {'a': -2}]", 0.5),
        ("rate = 3 * 5", 0.5),
        ("other = rate = 0.15", 0.5),
        ("other, rate = 1, 2", 0.5),
        ("rate = float('0.15')", 0.15),
        ("rate = rate * 2", 1.0),
        ("rate = globals().get('rate', 0.15)", 0.5),
        ("if 'rate' not in globals():\n    rate = 0.15", 0.5),
    ],
)
def test_a_constant_in_the_file_is_a_default_and_what_is_computed_stays(opened, statement, value):
    code = f"{statement}\nclass P(DataProviderBase):\n    k = rate\n    others = globals().get('other')\n"
    provider = opened(HEAD + code, rate=0.5)
    assert provider.k == value
    assert provider.others == ({"other = rate = 0.15": 0.15, "other, rate = 1, 2": 1}.get(statement))


def test_a_default_serves_where_the_config_does_not_set_the_name(opened):
    assert opened(HEAD + "rate = 0.15\nclass P(DataProviderBase):\n    k = rate").k == 0.15


def test_lines_keep_their_numbers_and_the_file_its_name(opened, tmp_path):
    provider = opened(
        HEAD + "rate = 1\n\nclass P(DataProviderBase):\n    def f(self):\n        raise KeyError\n", rate=2
    )
    with pytest.raises(KeyError) as raised:
        provider.f()
    frame = raised.traceback[-1]
    assert (str(frame.path), frame.lineno + 1) == (str(tmp_path / "data/toy/prepare_streaming.py"), 6)
    assert "raise KeyError" in str(frame.statement)


def test_dataclasses_and_pickle_work_in_the_file(opened):
    code = HEAD + "import dataclasses\n@dataclasses.dataclass\nclass D:\n    x: 'int' = 1\n"
    provider = opened(code + "class P(DataProviderBase):\n    d = D()\n")
    assert pickle.loads(pickle.dumps(provider.d)) == provider.d


def test_a_file_beside_it_can_be_imported_and_its_edits_count(opened, tmp_path):
    code = HEAD + "import toy_helper\nclass P(DataProviderBase):\n    k = toy_helper.K\n"
    (tmp_path / "data/toy").mkdir(parents=True)
    (tmp_path / "data/toy/toy_helper.py").write_text("K = 1")
    assert opened(code).k == 1
    (tmp_path / "data/toy/toy_helper.py").write_text("K = 'two'")
    assert opened(code).k == "two"


def test_two_datasets_have_each_their_own_helper_of_one_name(opened, tmp_path):
    code = HEAD + "import toy_helper\nclass P(DataProviderBase):\n    k = toy_helper.K\n"
    for name in ("one", "two"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "toy_helper.py").write_text(f"K = {name!r}")
    assert [opened(code, name).k for name in ("one", "two", "one")] == ["one", "two", "one"]


# The class


def test_the_only_subclass_is_taken(opened):
    assert type(opened(CODE)).__name__ == "P"


def test_the_symbol_provider_is_taken_before_others(opened):
    assert type(opened(CODE + "class Q(P): pass\nProvider = Q\n")).__name__ == "Q"


def test_a_provider_that_is_imported_counts_by_that_symbol(opened, tmp_path):
    (tmp_path / "data/toy").mkdir(parents=True)
    (tmp_path / "data/toy/toy_base.py").write_text(CODE)
    assert type(opened("from toy_base import P as Provider")).__name__ == "P"


def test_subclasses_that_are_imported_do_not_count(opened, tmp_path):
    (tmp_path / "data/toy").mkdir(parents=True)
    (tmp_path / "data/toy/toy_base.py").write_text(CODE)
    assert type(opened("from toy_base import P\nclass Q(P): pass\n")).__name__ == "Q"


NOT_ONE = {
    "several": (
        CODE + "\nclass Q(P): pass\n",
        "toy/prepare_streaming.py needs one subclass",
        "P, Q",
        "Provider = P at its end",
    ),
    "none": (
        "x = 1",
        "toy/prepare_streaming.py needs one subclass",
        "no subclass",
        "class YourSubclass(DataProviderBase)",
    ),
    "imported": (
        "from toy_base import P",
        "toy/prepare_streaming.py needs one subclass",
        "P (imported from toy_base)",
        "Provider = P at its end",
    ),
    "another": (CODE + "Provider = 7", "or one with the name Provider", "P", "Provider = P"),
    "the base": (
        HEAD + "Provider = DataProviderBase",
        "or one with the name Provider",
        "no subclass",
        "Provider = YourSubclass",
    ),
}


@pytest.mark.parametrize("case", NOT_ONE)
def test_where_no_one_class_is_meant_what_was_found_is_listed(case, opened, tmp_path):
    code, headline, found, remedy = NOT_ONE[case]
    (tmp_path / "data/toy").mkdir(parents=True)
    (tmp_path / "data/toy/toy_base.py").write_text(CODE)
    with pytest.raises(SpecError) as refused:
        opened(code)
    assert headline in refused.value.headline
    assert found in str(refused.value.where["found"])
    assert Path(str(refused.value.where["file"])).name == "prepare_streaming.py"
    assert remedy in str(refused.value.remedy)


# A file that cannot be loaded

BAD = {
    "syntax": (
        "x = (\n",
        "data/toy/prepare_streaming.py:1: SyntaxError while it was loaded: '(' was never closed: x = (",
        "correct data/toy/prepare_streaming.py:1",
    ),
    "raises": ("x = 1\nx / 0\n", "data/toy/prepare_streaming.py:2: ZeroDivisionError while it was loaded", "correct"),
    "exits": (
        "\nraise SystemExit\n",
        "data/toy/prepare_streaming.py:2: SystemExit while it was loaded",
        "take the exit out",
    ),
    "no module": ("import not_there\n", ":1: ModuleNotFoundError while it was loaded", "pip install not_there"),
    "no name": ("print(ratio)\n", ":1: NameError while it was loaded: name 'ratio'", "set ratio in the config"),
    "helper": (
        "import toy_bad\n",
        "data/toy/toy_bad.py:3: KeyError while it was loaded: 'x'",
        "correct data/toy/toy_bad.py:3",
    ),
    "null byte": ("x = '\0'\n", "data/toy/prepare_streaming.py", "correct"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_cannot_be_loaded_is_named_with_its_line(case, opened, tmp_path):
    code, headline, remedy = BAD[case]
    (tmp_path / "data/toy").mkdir(parents=True)
    (tmp_path / "data/toy/toy_bad.py").write_text("\n\n{}['x']\n")
    before = set(sys.modules)
    with pytest.raises(SpecError) as refused:
        opened(code)
    assert headline in refused.value.headline
    assert remedy in str(refused.value.remedy)
    assert not [name for name in set(sys.modules) - before if name.startswith("prepare_streaming_of_")]


# Making it


def test_an_init_of_fixed_parameters_gets_those_and_the_provider_gets_the_rest(opened):
    provider = opened(
        HEAD
        + "class P(DataProviderBase):\n"
        + "    def __init__(self, data_dir, batch_size, rate):\n"
        + "        super().__init__(data_dir, batch_size)\n"
        + "        self.rate = rate * 10\n",
        rate=2,
        depth=3,
    )
    assert (provider.rate, provider.config["rate"]) == (20, 2)
    assert (provider.depth, provider.config["depth"], provider.config["block_size"]) == (3, 3, 8)


def test_an_init_that_keeps_names_to_itself_loses_none(opened):
    provider = opened(
        HEAD
        + "class P(DataProviderBase):\n"
        + "    def __init__(self, **names):\n"
        + "        super().__init__(names['data_dir'], names['batch_size'])\n",
        depth=3,
    )
    assert (provider.depth, provider.config["depth"]) == (3, 3)


@pytest.mark.parametrize("parameters", ["data_dir, batch_size", "data_dir, batch_size, **names"])
def test_a_seed_that_an_init_does_not_hand_on_counts_all_the_same(opened, parameters):
    code = f"class P(DataProviderBase):\n    def __init__(self, {parameters}):\n        super().__init__(data_dir, 4)\n"
    provider = opened(HEAD + code, seed=7, batches_per_file=5)
    assert (provider.seed, provider.config["seed"], provider.batches_per_file) == (7, 7, 5)


def test_a_seed_that_an_init_chooses_itself_stays(opened):
    init = "    def __init__(self, seed, **names):\n        super().__init__(seed=5, **names)\n"
    assert opened(HEAD + "class P(DataProviderBase):\n" + init, seed=7).seed == 5


@pytest.mark.parametrize(
    ("body", "said", "remedy"),
    [
        ("self.big = 1", "P.__init__ does not call the __init__ of DataProviderBase", r"super\(\).__init__"),
        ("raise SystemExit('no')", "prepare_streaming.py:4: SystemExit in P.__init__: no", "take the exit out"),
    ],
)
def test_an_init_that_makes_no_provider_is_named(opened, body, said, remedy):
    code = HEAD + f"class P(DataProviderBase):\n    def __init__(self, **names):\n        {body}\n"
    with pytest.raises(SpecError, match=said) as refused:
        opened(code)
    assert re.search(remedy, str(refused.value.remedy))


def test_an_import_with_a_dot_says_how_a_file_beside_it_is_imported(opened):
    with pytest.raises(SpecError, match="relative import") as refused:
        opened(HEAD + "from .helper import N\n")
    assert "without the dots" in str(refused.value.remedy)


def test_an_init_that_asks_for_what_nobody_sets_is_named(opened):
    code = HEAD + "class P(DataProviderBase):\n    def __init__(self, data_dir, batch_size, rate): pass\n"
    with pytest.raises(SpecError, match=r"P.__init__ takes rate, which the config does not set") as refused:
        opened(code)
    assert refused.value.where["parameter"] == "rate"
    assert "rate = ... in the config" in str(refused.value.remedy)


def test_an_init_that_raises_is_named_with_its_line(opened):
    code = HEAD + "class P(DataProviderBase):\n    def __init__(self, **names):\n        {}['x']\n"
    with pytest.raises(SpecError, match=r"data/toy/prepare_streaming.py:4: KeyError in P.__init__: 'x'"):
        opened(code)


# Running the file by itself


@pytest.mark.parametrize(("arguments", "said"), [([], "CONFIG"), (["config/toy.py"], "config/toy.py")])
def test_running_the_file_by_itself_says_what_to_run_instead(arguments, said, tmp_path):
    file = tmp_path / "prepare_streaming.py"
    file.write_text(CODE + "print('never')")
    path = os.pathsep.join([str(Path(bw.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(file), *arguments], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"batchwright: {file} is not run by itself: P needs the shared config\n"
        f"  try        batchwright prepare {said}, or python prepare.py {said}\n"
    )


def test_an_error_of_an_installed_library_names_the_line_that_called_it(tmp_path, monkeypatch):
    installed = tmp_path / ".venv/site-packages"
    installed.mkdir(parents=True)
    (installed / "library_of_a_test.py").write_text('def load(): raise ValueError("bad file")\n')
    monkeypatch.syspath_prepend(installed)
    config = tmp_path / "train.py"
    config.write_text("import library_of_a_test\nlibrary_of_a_test.load()\n")
    with pytest.raises(SpecError, match=r"train\.py:2: ValueError: bad file"):
        bw.load_config(config, data=tmp_path / "data")
