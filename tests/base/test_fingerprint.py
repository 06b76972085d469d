"""Fingerprints: equal for equal things, different for different ones, and an error where that cannot be known."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import importlib
import io
import operator
import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from batchwright.base.fingerprint import fingerprint, fingerprint_bytes, fingerprint_file, function_fingerprint
from refusals import refused


def name_of(function) -> str:
    return function_fingerprint(function, name="f")


def test_values_are_equal_whatever_the_order_of_keys():
    assert fingerprint({"a": 1, "b": [2.5, None]}) == fingerprint({"b": [2.5, None], "a": 1})
    assert fingerprint([1, 2]) != fingerprint([2, 1])


def test_fingerprints_are_pinned():
    # They name units, versions and plans on disk: if they change, every store is baked again.
    assert fingerprint({"a": [1, "é", 2.5, None, True]}) == "178dc37ca1657ae78421e7947b20e43e"
    assert fingerprint_bytes(b"batchwright") == "f68a323e174297d6f2abbc585c3c5d27"


def test_a_part_of_a_file_is_named_by_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    assert fingerprint_file(tmp_path / "a", 2, 5) == fingerprint_bytes(b"234")
    assert fingerprint_file(tmp_path / "a", 7) == fingerprint_bytes(b"789")
    assert fingerprint_file(tmp_path / "a", 7, 100) == fingerprint_bytes(b"789")
    assert fingerprint_file(tmp_path / "a", 3, 3) == fingerprint_bytes(b"")


# Functions that are written alike are equal, wherever they are written.


at_module_level = lambda row: row["score"] > 3


def test_lambdas_written_alike_on_other_lines_are_equal():
    one = lambda row: row["score"] > 3
    two = lambda row: row["score"] > 3

    def inner():
        return lambda row: row["score"] > 3

    assert name_of(one) == name_of(two) == name_of(inner()) == name_of(at_module_level)


def test_names_are_the_same_in_every_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import re\nfrom batchwright.base.fingerprint import function_fingerprint\n"
        "WORDS = {'a', 'b', 'c', 'd'}\nPATTERN = re.compile('x')\n"
        "class Words(set): pass\n"
        "class Box:\n"
        "    def __init__(self): self.x = {1: 'a', 'b': WORDS, 'c': Words(WORDS), 'd': {('a', 1), ('b', 2)}}\n"
        "    def __getstate__(self): return {}\n"
        "    def __call__(self, row): return self.x\n"
        "def helper(row): return [PATTERN.match(word) for word in row if word in WORDS]\n"
        "print(function_fingerprint(lambda row: helper(row) or Box()(row), name='f'))\n"
        "print(function_fingerprint(Box(), name='f'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(bw.__file__).parents[1])}
    runs = {
        subprocess.run(
            [sys.executable, script],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            timeout=240,
            check=True,
        ).stdout
        for seed in ("1", "2", "random")
    }
    assert len(runs) == 1


# Everything that decides what a function does is in its name.


def with_default(value):
    def function(row, limit=value):
        return row["score"] > limit

    return function


def with_keyword(value):
    def function(row, *, limit=value):
        return row["score"] > limit

    return function


def with_closure(value):
    return lambda row: row["score"] in value


@pytest.mark.parametrize("make", [with_default, with_keyword, with_closure])
@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, 2),
        (1, True),
        (1, 1.0),
        (1, "1"),
        (0.0, -0.0),
        ("a", b"a"),
        ((1, 2), [1, 2]),
        ([1, 2], [2, 1]),
        ({1, 2}, {1, 3}),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([{"a": 1, "b": 2}], [{"b": 2, "a": 1}]),
        (types.MappingProxyType({"a": 1, "b": 2}), types.MappingProxyType({"b": 2, "a": 1})),
        (collections.Counter("ab"), collections.Counter("ba")),
        (types.SimpleNamespace(x={"a": 1, "b": 2}), types.SimpleNamespace(x={"b": 2, "a": 1})),
        ({1, 2}, frozenset((1, 2))),
        (float("nan"), float("inf")),
        (1j, 2j),
        (2**70, 2**70 + 1),
        (None, ...),
        (range(3), range(4)),
        (re.compile("a"), re.compile("b")),
        (re.compile("a"), re.compile("a", re.IGNORECASE)),
        (Path("a"), Path("b")),
        (datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)),
        (np.arange(3), np.arange(4)),
        (np.arange(3), np.arange(3, dtype=np.int32)),
        (np.float32(1), np.float32(2)),
        (collections.Counter("ab"), collections.Counter("aab")),
        (operator.itemgetter("a"), operator.itemgetter("b")),
        ({1, 2}.__contains__, {1, 3}.__contains__),
        ("a{}".format, "b{}".format),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (str.upper, str.lower),
        ("\ud800", "\ud801"),
    ],
)
def test_defaults_keywords_and_closures_count(make, one, two):
    assert name_of(make(one)) == name_of(make(one))
    assert name_of(make(one)) != name_of(make(two))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (lambda row: row["a"] > 3, lambda row: row["a"] > 4),  # a constant
        (lambda row: row["a"] > 3, lambda row: row["a"] < 3),  # code
        (lambda row: row.upper(), lambda row: row.lower()),  # names
        (lambda row: [x + 1 for x in row], lambda row: [x + 2 for x in row]),  # a constant of code inside it
        (lambda row: (1, 2j), lambda row: (1, 3j)),  # inside a constant
        (lambda a, b: a, lambda a, *, b: a),  # how it is called
        (lambda *a: a, lambda a: a),
        (lambda row: row in {"x", "y"}, lambda row: row in {"x", "z"}),
    ],
)
def test_code_and_constants_count(one, two):
    assert name_of(one) != name_of(two)


def try_first(row):
    try:
        first = row["a"]
    except KeyError:
        return None
    return first, row["b"]


def try_both(row):
    try:
        first = row["a"]
        return first, row["b"]
    except KeyError:
        return None


def test_what_a_try_covers_counts():
    assert name_of(try_first) != name_of(try_both)
    covers_nothing = types.FunctionType(try_first.__code__.replace(co_exceptiontable=b""), globals())
    assert name_of(try_first) != name_of(covers_nothing)


LIMIT, PATTERN, TABLE = 3, re.compile("a"), {"x": [1]}


def helper(row):
    return row


class Thing:
    factor = 2

    def act(self, row):
        return row * self.factor


@pytest.mark.parametrize(
    ("function", "name", "other"),
    [
        (lambda row: row > LIMIT, "LIMIT", 4),
        (lambda row: PATTERN.match(row), "PATTERN", re.compile("b")),
        (lambda row: TABLE[row], "TABLE", {"x": [2]}),
        (lambda row: helper(row), "helper", lambda row: row + 1),
        (lambda row: [helper(x) for x in row], "helper", lambda row: row + 1),
        (lambda row: (lambda x: LIMIT)(row), "LIMIT", 4),
        (lambda row: Thing().act(row), "Thing", type("Thing", (), {"act": lambda self, row: row})),
    ],
)
def test_globals_that_it_uses_count_also_inside_comprehensions(function, name, other, monkeypatch):
    before = name_of(function)
    assert name_of(function) == before
    monkeypatch.setitem(globals(), name, other)
    assert name_of(function) != before


def test_a_global_that_it_does_not_use_does_not_count(monkeypatch):
    function = lambda row: row.LIMIT  # an attribute of that name is something else
    before = name_of(function)
    monkeypatch.setitem(globals(), "LIMIT", threading.Lock())
    assert name_of(function) == before


def test_a_changed_method_or_attribute_of_a_users_class_counts(monkeypatch):
    before, instance = name_of(Thing().act), name_of(functools.partial(Thing.act, Thing()))
    monkeypatch.setattr(Thing, "factor", 3)
    assert name_of(Thing().act) != before
    assert name_of(functools.partial(Thing.act, Thing())) != instance


def test_the_state_of_a_callable_object_counts():
    class Longer:
        def __init__(self, length):
            self.length = length

        def __call__(self, row):
            return len(row) > self.length

    assert name_of(Longer(3)) == name_of(Longer(3))
    assert name_of(Longer(3)) != name_of(Longer(4))


class Hiding:
    """An object that travels without what decides what it does."""

    def __init__(self, limit=3):
        self.limit = limit

    def __call__(self, row):
        return row > self.limit


class HidingState(Hiding):
    def __getstate__(self):
        return {}


class HidingReduce(Hiding):
    def __reduce__(self):
        return HidingReduce, ()


class HidingByName(Hiding):
    def __reduce__(self):
        return "THE_ONE"


class HidingSlots:
    __slots__ = ("limit",)

    def __init__(self, limit=3):
        self.limit = limit

    def __getstate__(self):
        return None


class HidingDict(dict):
    def __init__(self, limit):
        self.limit = limit

    def __reduce__(self):
        return dict, ()


class AnySet(set):
    limit = None


@pytest.mark.parametrize("kind", [HidingState, HidingReduce, HidingByName, HidingSlots, HidingDict])
def test_what_an_object_hides_from_pickle_counts(kind):
    assert name_of(kind(3)) == name_of(kind(3))
    assert name_of(kind(3)) != name_of(kind(4))


def test_what_an_object_hides_and_what_has_no_value_asks_for_a_version():
    with refused(bw.SpecError, function="f", remedy="version="):
        name_of(HidingState(threading.Lock()))


def test_a_set_of_a_users_own_class_counts_by_its_items_and_what_it_holds():
    one, two = AnySet("abcdef"), AnySet("fedcba")
    assert name_of(with_closure(one)) == name_of(with_closure(two)) != name_of(with_closure(AnySet("abc")))
    two.limit = 3
    assert name_of(with_closure(one)) != name_of(with_closure(two))


@pytest.mark.parametrize("cached", [False, True])
def test_what_is_set_on_a_function_counts(cached):
    def make(limit):
        def function(row):
            return row > function.limit

        found = functools.lru_cache(function) if cached else function
        function.limit = found.limit = limit
        return found

    assert name_of(make(3)) == name_of(make(3))
    assert name_of(make(3)) != name_of(make(4))


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("__version__", "1", "2"),
        ("__slots__", ("a",), ("a", "b")),
        ("__call__", functools.partial(max, 1), functools.partial(max, 2)),
        ("__match_args__", ("a", "b"), ("b", "a")),
        ("__hash__", None, lambda self: 1),
        ("__private", 1, 2),
    ],
)
def test_members_of_a_class_with_two_underscores_count(name, one, two):
    make = lambda member: with_closure(type("Made", (), {name: member}))
    assert name_of(make(one)) == name_of(make(one))
    assert name_of(make(one)) != name_of(make(two))


def test_where_a_class_was_written_and_its_docstring_do_not_count():
    def make(text, line):
        space = {"__name__": "__main__"}
        exec("\n" * line + f"class Made:\n    '{text}'\n    x: int = 1\n    def act(self): return self.x", space)
        return with_closure(space["Made"])

    assert name_of(make("Some words.", 0)) == name_of(make("Other words.", 9))


def test_a_metaclass_counts():
    make = lambda limit: type("Meta", (type,), {"limit": limit})("Made", (), {})
    assert name_of(with_closure(make(3))) == name_of(with_closure(make(3)))
    assert name_of(with_closure(make(3))) != name_of(with_closure(make(4)))


def test_dataclasses_enums_and_named_tuples_have_values():
    @dataclasses.dataclass(frozen=True)
    class Point:
        x: int
        y: list = dataclasses.field(default_factory=list)

    class Color(enum.Enum):
        RED = 1
        BLUE = 2

    pair = collections.namedtuple("pair", "a b")
    for one, two in ((Point(1), Point(2)), (Color.RED, Color.BLUE), (pair(1, 2), pair(1, 3))):
        assert name_of(with_closure(one)) == name_of(with_closure(one))
        assert name_of(with_closure(one)) != name_of(with_closure(two))


def test_a_users_own_module_counts_and_an_installed_one_is_only_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_module_of_a_user.py").write_text("def clean(text): return text\n")
    module = importlib.import_module("own_module_of_a_user")
    by_name, by_module = module.clean, lambda row: module.clean(row)
    first = name_of(lambda row: by_name(row)), name_of(by_module)
    (tmp_path / "own_module_of_a_user.py").write_text("def clean(text): return text + '!'  # other\n")
    module = importlib.reload(module)
    by_name = module.clean
    assert name_of(lambda row: by_name(row)) != first[0]
    assert name_of(by_module) != first[1]
    assert name_of(lambda row: np.sum(row)) == name_of(lambda row: np.sum(row))
    del sys.modules["own_module_of_a_user"]


def test_functions_that_call_each_other_are_described():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert name_of(even) == name_of(even)
    assert name_of(even) != name_of(odd)


def test_a_list_that_holds_itself_is_described():
    loop: list[object] = [1]
    loop.append(loop)
    assert name_of(with_closure(loop)) == name_of(with_closure(loop))


def test_many_functions_that_share_others_are_described_quickly():
    functions = [lambda row: row]
    for _ in range(60):  # each uses the one before twice: 2^60 paths lead to the first
        functions.append((lambda f, g: lambda row: f(row) + g(row))(functions[-1], functions[-1]))
    assert name_of(functions[-1]) != name_of(functions[-2])


def test_a_cached_function_is_what_it_wraps():
    make = lambda constant: functools.lru_cache(lambda row: constant)
    assert name_of(make(1)) == name_of(make(1))
    assert name_of(make(1)) != name_of(make(2))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (threading.Lock(), "_thread.lock"),
        ((x for x in "ab"), "builtins.generator"),
        (io.TextIOWrapper(io.BytesIO()), "_io.TextIOWrapper"),
        (sys._getframe(), "builtins.frame"),
    ],
)
def test_where_it_cannot_be_known_the_error_asks_for_a_version(value, kind):
    function = lambda row: value
    with refused(bw.SpecError, kind, function="f", remedy="version='1'"):
        name_of(function)
    named = function_fingerprint(function, name="f", version="1")
    assert named == function_fingerprint(lambda row: row, name="f", version="1")
    assert named != function_fingerprint(function, name="f", version="2")


# Modules of the user's own: what the code takes out of them counts, not the text of one file.


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package/__init__.py").write_text("")
    (tmp_path / "own_package/text.py").write_text("LIMIT = 1\ndef clean(text): return text\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_package.text") and sys.modules["own_package"]
    for name in ("own_package", "own_package.text"):
        del sys.modules[name]


def by_closure(package):
    return lambda row: package.text.clean(row)


def by_global(package):
    globals()["some_package"] = package
    return lambda row: [some_package.text.clean(part) for part in row]  # noqa: F821


@pytest.mark.parametrize("make", [by_closure, by_global])
def test_a_changed_function_of_a_module_inside_a_package_is_noticed(own_package, make, monkeypatch):
    before = name_of(make(own_package))
    assert name_of(make(own_package)) == before
    monkeypatch.setattr(own_package.text, "clean", lambda text: text + text)
    assert name_of(make(own_package)) != before


def test_a_value_that_a_program_sets_in_a_module_is_noticed_and_others_are_not(own_package):
    function = lambda row: len(row) > own_package.text.LIMIT
    before = name_of(function)
    own_package.text.other = 1
    assert name_of(function) == before
    own_package.text.LIMIT = 2
    assert name_of(function) != before


def test_a_function_that_an_installed_package_made_is_named_with_what_it_was_made_of(monkeypatch):
    installed = types.ModuleType("installed")
    installed.__file__ = str(Path(os.__file__).with_name("installed.py"))
    monkeypatch.setitem(sys.modules, "installed", installed)
    exec("def make(limit):\n    return lambda row: row > limit", vars(installed))
    assert name_of(installed.make(3)) == name_of(installed.make(3)) != name_of(installed.make(4))
