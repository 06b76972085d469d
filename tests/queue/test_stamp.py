"""When a queue is stale, and what is said of it; and what a meta may hold."""

from __future__ import annotations

import enum
import importlib.util
import json
import linecache
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchwright
from batchwright.base.errors import QueueError, SpecError
from batchwright.queue.meta import check_meta, read_meta
from batchwright.queue.stamp import Stamp, _plain, differences, normalised, stamp_of
from refusals import refused

META = {"vocab_size": 65, "batch_schema": [{"name": "x", "dtype": "int64", "shape": [8]}]}

CODE = '''
"""Masked characters."""
import helpers

class DataProviderBase: ...

class P(DataProviderBase):
    def sample_batch(self, split, rng):
        """One batch."""
        return rng.random() < self.mask_probability  # most of the time
'''


@pytest.fixture
def stamped(tmp_path, monkeypatch):
    """stamped(code, config): the stamp of the class P in a file of that code; `helpers.py` lies beside it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helpers.py").write_text("LEVEL = 1\n")

    def stamp(code: str = CODE, meta: dict[str, Any] = META, seed: int = 1337, **config: Any) -> Stamp:
        file = tmp_path / "prepare_streaming.py"
        file.write_text(code)
        spec = importlib.util.spec_from_file_location("provider_of_test", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "provider_of_test", module)
        exec(compile(code, str(file), "exec"), module.__dict__)  # not from a cache that is a second old
        monkeypatch.delitem(sys.modules, "helpers", raising=False)
        provider = module.P()
        provider.data_dir, provider.config, provider.seed = tmp_path, config, seed
        return stamp_of(provider, meta)

    return stamp


def test_the_same_provider_has_the_same_stamp(stamped):
    assert stamped(mask_probability=0.15).fingerprint == stamped(mask_probability=0.15).fingerprint


def test_a_comment_a_docstring_or_a_blank_line_is_no_change(stamped):
    other = CODE.replace("  # most of the time", "\n\n").replace("One batch.", "A batch of rows.")
    assert differences(stamped(), stamped(other)) == []
    assert stamped().fingerprint == stamped(other).fingerprint


def test_changed_code_is_shown_as_a_short_diff(stamped):
    assert differences(stamped(), stamped(CODE.replace("<", "<="))) == [
        "prepare_streaming.py changed:",
        "       def sample_batch(self, split, rng):",
        "  -        return rng.random() < self.mask_probability",
        "  +        return rng.random() <= self.mask_probability",
    ]


def test_a_long_diff_is_cut_and_says_how_much_is_left(stamped):
    more = CODE + "".join(f"\nname_{n} = {n}" for n in range(40))
    lines = differences(stamped(), stamped(more))
    assert lines[0] == "prepare_streaming.py changed:"
    assert len(lines) == 14
    assert lines[-1] == "  ... and 29 more"


def test_a_helper_file_that_the_provider_imports_counts(stamped, tmp_path):
    before = stamped()
    (tmp_path / "helpers.py").write_text("LEVEL = 2\n")
    assert differences(before, stamped()) == ["helpers.py changed:", "  -LEVEL = 1", "  +LEVEL = 2"]


@pytest.mark.parametrize(
    "statement",
    ["from parts import masks", "from parts.masks import K", "import parts.masks", "import_module('parts.masks')"],
)
def test_what_is_imported_only_when_it_runs_counts_from_the_beginning(stamped, tmp_path, statement):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").touch()
    (tmp_path / "parts" / "masks.py").write_text("from .deep import D\nK = 1")
    (tmp_path / "parts" / "deep.py").write_text("D = 1")
    found = stamped(CODE.replace("return rng", f"{statement}; return rng")).source
    assert list(found) == [
        *("helpers.py", "parts/__init__.py", "parts/deep.py", "parts/masks.py", "prepare_streaming.py"),
    ]


def test_a_file_beside_it_that_nobody_imports_does_not_count(stamped, tmp_path):
    before = stamped()
    (tmp_path / "notes.py").write_text("x = 1")
    assert differences(before, stamped()) == []


def test_a_setting_that_the_code_names_counts(stamped):
    assert differences(stamped(mask_probability=0.15), stamped(mask_probability=0.2)) == [
        "config mask_probability was 0.15, and is 0.2"
    ]


@pytest.mark.parametrize("name", ["learning_rate", "batch_size", "max_backlog_files"])
def test_a_setting_that_makes_no_other_data_does_not_count(stamped, name):
    code = CODE + "# learning_rate\nlast = [self_batch_size := 'batch_size', 'max_backlog_files']\n"
    assert stamped(code, **{name: 1}).fingerprint == stamped(code, **{name: 2}).fingerprint


@pytest.mark.parametrize(
    "use",
    [
        "globals()['train_stages']",
        "getattr(self, 'train_stages')",
        "self.train_stages",
        "train_stages",
        "make(train_stages=1)",
        "self.config[f'{split}_stages']",
        "self.config[split + '_stages']",
    ],
)
def test_a_setting_is_found_however_the_code_reads_it(stamped, use):
    assert stamped(CODE.replace("rng.random()", use), train_stages=[1], rate=2).settings == {"train_stages": [1]}


def test_a_setting_is_compared_by_type_too(stamped):
    assert differences(stamped(mask_probability=1), stamped(mask_probability=True)) == [
        "config mask_probability was 1, and is True"
    ]


def test_the_order_of_a_dict_counts_in_a_setting(stamped):
    one, other = {"a": 1, "b": {"x": 1, "y": 2}}, {"a": 1, "b": {"y": 2, "x": 1}}
    assert stamped(mask_probability=one).fingerprint != stamped(mask_probability=other).fingerprint
    before = Stamp.from_json(json.loads(json.dumps(stamped(mask_probability=one).to_json())), META)
    assert differences(before, stamped(mask_probability=one)) == []
    (line,) = differences(before, stamped(mask_probability=other))
    assert "mask_probability" in line


def test_another_seed_counts(stamped):
    assert differences(stamped(seed=1), stamped(seed=2)) == ["seed was 1, and is 2"]


@pytest.mark.parametrize(
    ("was", "is_now", "said"),
    [
        ({"a": 1}, {"a": 2}, ["meta['a'] was 1, and is 2"]),
        ({"a": 1}, {}, ["meta['a'] is gone: it was 1"]),
        ({}, {"a": "é"}, ["meta['a'] is new: 'é'"]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, ["meta['a']['b']['c'] was 1, and is 2"]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 2, "b": 1}}, ["the keys of the meta have another order"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["meta['a'][1] was 2, and is 3"]),
        (
            {"itos": [*"abcdefghijklmnopqrstuvwxyz"]},
            {"itos": [*"abcdefghijklmnopqrstuvwzyx?"]},
            [
                "meta['itos'][23] was 'x', and is 'z'",
                "meta['itos'][25] was 'z', and is 'x'",
                "meta['itos'][26] is new: '?'",
            ],
        ),
        (
            {"stoi": {str(n): n for n in range(12)}},
            {"stoi": {str(n): n + 1 for n in range(12)}},
            [*(f"meta['stoi']['{n}'] was {n}, and is {n + 1}" for n in range(8)), "and 4 more of the meta"],
        ),
        ({"a": "x" * 100}, {"a": 1}, [f"meta['a'] was '{'x' * 56}..., and is 1"]),
        (
            {"batch_schema": [{"name": "x", "dtype": "int64", "shape": [8]}, {"name": "m", "dtype": "bool"}]},
            {"batch_schema": [{"name": "x", "dtype": "int32", "shape": [9]}]},
            [
                "meta['batch_schema'][0]['dtype'] was 'int64', and is 'int32'",
                "meta['batch_schema'][0]['shape'][0] was 8, and is 9",
                "meta['batch_schema'][1]['name'] is gone: it was 'm'",
                "meta['batch_schema'][1]['dtype'] is gone: it was 'bool'",
            ],
        ),
        (
            {"batch_schema": [{"name": "x"}, {"name": "y"}]},
            {"batch_schema": [{"name": "y"}, {"name": "x"}]},
            [
                "meta['batch_schema'][0]['name'] was 'x', and is 'y'",
                "meta['batch_schema'][1]['name'] was 'y', and is 'x'",
            ],
        ),
    ],
)
def test_what_changed_in_the_meta_is_named(was, is_now, said):
    assert differences(Stamp(was, {}, {}, 0), Stamp(is_now, {}, {}, 0)) == said


def test_a_stamp_survives_being_written_down(stamped):
    stamp = stamped(mask_probability=0.15)
    assert Stamp.from_json(stamp.to_json(), META) == stamp
    assert Stamp.from_json(stamp.to_json(), META).fingerprint == stamp.fingerprint


@pytest.mark.parametrize(
    "value", [None, {}, {"source": {}, "settings": {}}, {"source": {"a": 1}, "settings": {}, "seed": 0}]
)
def test_a_meta_that_does_not_say_what_the_queue_was_made_from_is_refused(value, tmp_path):
    ours = {"format": 1, "fingerprint": "0f", "born": "1", "reproducible": True, "val_batches": None, "batch_size": 8}
    (tmp_path / "meta.json").write_text(json.dumps({"batchwright": ours | {"made_from": value}}))
    with refused(QueueError, remedy="batchwright queue purge"):
        read_meta(tmp_path / "meta.json")


def test_values_that_are_not_json_have_a_text_that_every_process_finds():
    script = textwrap.dedent("""
        import functools, math, pathlib, numpy as np
        from batchwright.queue.stamp import _plain
        class Thing: pass
        values = [{"b", "a", "c"}, Thing(), math.nan, pathlib.Path("a"), np.arange(3000), np.float32(0.5), math.sin,
                  functools.partial(Thing), {1: 2}, b"x", len]
        print([_plain(value) for value in values])
    """)
    (said,) = {printed_by("-c", script, PYTHONHASHSEED=seed) for seed in "12"}
    assert said.startswith("['builtins.set ")
    assert " 'nan', " in said


def test_the_code_of_a_function_in_the_config_counts(stamped):
    def first(x):
        return x + 1

    def other(x):
        return x + 2

    other.__qualname__ = first.__qualname__
    assert stamped(mask_probability=first).fingerprint != stamped(mask_probability=other).fingerprint


@pytest.mark.parametrize(
    "setting", ["Curve", "Curve()", "Curve().at", "[Curve(3)]", "partial(level, 2)", "partial(Curve)"]
)
def test_the_code_of_a_class_in_the_config_counts_and_what_an_object_of_it_holds(setting, tmp_path, monkeypatch):
    """A class that a config defines has no module, so Python does not find its text."""
    monkeypatch.chdir(tmp_path)
    Path("data/toy").mkdir(parents=True)
    Path("data/toy/prepare_streaming.py").write_text("")

    def plain(code: str) -> Any:
        head = "from functools import partial\ndataset, batch_size, block_size = 'toy', 1, 1\n"
        Path("config.py").write_text(f"{head}{code}\ncurve = {setting}\n")
        linecache.clearcache()
        return _plain(batchwright.load_config("config.py")["curve"])

    code = (
        "class Curve:\n    z = 3\n    def __init__(self, top=1):\n        self.top = top\n"
        "    def at(self, x):\n        return x\ndef level(x):\n    return x\n"
    )
    first = plain(code)
    assert plain(code) == plain(code + "rate = 3") == first
    assert plain(code.replace("return x", "return 2 * x")) != first
    if "level" not in setting:
        assert plain(code.replace("z = 3", "z = 4")) != first
        assert plain(code.replace("self.top = top", "self.top = 5")) != first


def test_of_a_script_only_the_class_and_its_bases_count(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            class DataProviderBase: ...
            class Half(DataProviderBase):
                k = 1  # one
            class P(Half):
                k = 2
            learning_rate = 3
            from batchwright.queue.stamp import stamp_of
            p = P()
            p.data_dir, p.config, p.seed = ".", {"learning_rate": 3}, 0
            stamp = stamp_of(p, {})
            print(stamp.source, stamp.settings)
        """)
    )
    source = {"class Half": "class Half(DataProviderBase):\n    k = 1", "class P": "class P(Half):\n    k = 2"}
    assert printed_by(script) == f"{source} {{}}\n"


def printed_by(*command: object, **environment: str) -> str:
    path = os.pathsep.join([str(Path(batchwright.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_code_is_normalised_to_what_python_runs():
    code = (
        'class A:\n    "doc"\n    x: int\n    """of x"""\n\nif A:\n    "only this"\nelse:\n    y = ("a"\n         "b")'
    )
    assert normalised(code) == "class A:\n    x: int\nif A:\n    pass\nelse:\n    y = 'ab'"


# Meta


class Role(enum.StrEnum):
    INPUT = "input"


def test_a_meta_comes_back_in_plain_values():
    meta = {
        "n": np.int64(3),
        "p": np.float32(0.5),
        "yes": np.bool_(True),
        "shape": (1, (2,)),
        "role": Role.INPUT,
        "zero": np.array(7),
        np.str_("name"): np.str_("text"),
    }
    plain = check_meta(meta)
    expected = {"n": 3, "p": 0.5, "yes": True, "shape": [1, [2]], "role": "input", "zero": 7, "name": "text"}
    assert plain == expected
    assert [type(plain[name]) for name in ("n", "p", "yes", "role", "name")] == [int, float, bool, str, str]


def looped() -> dict[str, Any]:
    meta: dict[str, Any] = {}
    meta["self"] = [meta]
    return meta


@pytest.mark.parametrize(
    ("meta", "headline", "remedy"),
    [
        (None, "build_meta() returned NoneType; it has to return a dict", "batch_schema"),
        ([1], "build_meta() returned list; it has to return a dict", "batch_schema"),
        ({"batchwright": 1}, "meta['batchwright'] is a name that batchwright needs for itself", "text"),
        ({"itos": {0: "a"}}, "meta['itos'] has keys that are not strings, which JSON does not have", "lists"),
        ({"a": [1, float("nan")]}, "meta['a'][1] is nan, which JSON does not have", "finite numbers"),
        ({"a": np.float64("inf")}, "meta['a'] is inf, which JSON does not have", "finite numbers"),
        ({"a": b"x"}, "meta['a'] is a bytes, which JSON does not have", "text"),
        ({"a": {"b"}}, "meta['a'] is a set, which JSON does not have", "lists"),
        ({"a": np.zeros(2)}, "meta['a'] is a numpy.ndarray, which JSON does not have", "tolist"),
        ({"a": {"b": Path("x")}}, "meta['a']['b'] is a pathlib.PosixPath, which JSON does not have", "text"),
        (looped(), "the meta holds itself", "lists"),
    ],
)
def test_a_meta_that_json_would_change_is_refused_by_path(meta, headline, remedy):
    with pytest.raises(SpecError) as refused:
        check_meta(meta)
    assert refused.value.headline == headline
    assert refused.value.where["parameter"] == "build_meta()"
    assert remedy in str(refused.value.remedy)


def test_all_that_is_wrong_with_a_meta_is_said_at_once():
    with pytest.raises(SpecError) as refused:
        check_meta({str(n): b"" for n in range(20)})
    also = str(refused.value.where["also"])
    assert also.startswith("meta['1'] is a bytes, which JSON does not have, meta['2']")
    assert also.endswith(" and 15 more")
