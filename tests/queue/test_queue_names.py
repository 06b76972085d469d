"""Which settings a provider's source reads and nobody gives a value: all that are certain, and no false alarm."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from batchwright import queue
from batchwright.queue.names import NameRead, base_names, base_parameters, methods_written, names_read

HEAD = "from batchwright import DataProviderBase\nimport numpy as np\n"


def reads_of(source: str) -> list[tuple[str, int, str]]:
    return [tuple(read) for read in names_read(textwrap.dedent(source), "prepare_streaming.py")]


def in_method(body: str, head: str = "") -> list[str]:
    """How the names are read that a method with this body reads."""
    source = HEAD + head + "\nclass P(DataProviderBase):\n    def sample_batch(self, split, rng):\n"
    return [read.how for read in names_read(source + textwrap.indent(textwrap.dedent(body), " " * 8), "p.py")]


def in_module(body: str) -> list[str]:
    return [read.how for read in names_read(HEAD + textwrap.dedent(body), "p.py")]


def test_each_way_of_reading_a_setting_is_found_with_its_line():
    source = """\
    from batchwright import DataProviderBase
    class P(DataProviderBase):
        def sample_batch(self, split, rng):
            a = self.one
            b = self.config["two"]
            c = globals()["three"]
            return a + b + c + four + getattr(self, "five")
    """
    assert reads_of(source) == [
        ("one", 4, "self.one"),
        ("two", 5, 'self.config["two"]'),
        ("three", 6, 'globals()["three"]'),
        ("four", 7, "four"),
        ("five", 7, "self.five"),
    ]


def test_a_name_is_told_once_for_each_way_at_its_first_line():
    assert [read.line for read in names_read("a = lr\nb = lr\nc = globals()['lr']\n", "p.py")] == [1, 3]


READ = {
    "return self.mask": ["self.mask"],
    "self.mask += 1": ["self.mask"],
    "return f'{self.mask}'": ["self.mask"],
    "return [self.mask for _ in range(3)]": ["self.mask"],
    "return (lambda: self.mask)()": ["self.mask"],
    "def inner():\n    return self.mask\nreturn inner()": ["self.mask"],
    "self.mask[3] = 1": ["self.mask"],
    "self.mask.size = 1": ["self.mask"],
    "return self.helper(3)": ["self.helper"],
    "if self.mask: pass": ["self.mask"],
    "try:\n    pass\nexcept KeyError:\n    return self.mask": ["self.mask"],
    "try:\n    self.mask\nexcept ValueError:\n    pass": ["self.mask"],
    "try:\n    self.mask\nfinally:\n    pass": ["self.mask"],
    "with open(self.mask): pass": ["self.mask"],
    "return mask": ["mask"],
    "return [mask for i in range(3)]": ["mask"],
    "return [i for i in mask]": ["mask"],
    "def inner(a=mask): return a": ["mask"],
    "def inner():\n    mask = 3\nreturn mask": ["mask"],
    "[mask for mask in range(3)]\nreturn mask": ["mask"],
    "return mask.size": ["mask"],
    "global mask\nreturn mask": ["mask"],
    "mask = 1\ndef inner():\n    global mask\n    return mask\nreturn inner": ["mask"],
    "return globals()['mask'][0]": ['globals()["mask"]'],
    "return self.config['mask'] + self.config.get('other', 1)": ['self.config["mask"]'],
}


@pytest.mark.parametrize("body", READ)
def test_a_setting_that_is_read_in_a_method_is_reported(body):
    assert in_method(body) == READ[body]


NOT_READ = [
    "return self.batch_size + self.seed + self.block_size + self.val_batches",  # the base class has them
    "return self.input_files(), self.data_dir, self.config, self.reproducible, self.__class__",
    "return self._cache",
    "return self.config.get('mask', 0.15), self.config.get('mask')",
    "return globals().get('mask', 0.15), globals().get('mask')",
    "return getattr(self, 'mask', 0.15)",
    "if hasattr(self, 'mask'):\n    return self.mask",
    "if 'mask' in globals():\n    return mask, globals()['mask']",
    "return self.config['mask'] if 'mask' in self.config else 1",
    "if self.config.get('stages'):\n    return self.config['stages']",
    "try:\n    return mask\nexcept NameError:\n    return 1",
    "try:\n    return self.mask\nexcept AttributeError:\n    return 1",
    "try:\n    return self.config['mask']\nexcept (KeyError, ValueError):\n    return 1",
    "try:\n    return self.config['mask']\nexcept Exception:\n    return 1",
    "try:\n    return mask\nexcept:\n    return 1",
    "import contextlib\nwith contextlib.suppress(NameError):\n    return mask",
    "self.mask = 1\nreturn self.mask",
    "self.mask: int = 1\nreturn self.mask",
    "self.a, (self.b, *self.c) = 1, (2, 3)\nreturn self.a + self.b + self.c",
    "for self.mask in range(3):\n    self.mask",
    "with open('x') as self.mask:\n    self.mask",
    "setattr(self, 'mask', 1)\nreturn self.mask",
    "object.__setattr__(self, 'mask', 1)\nreturn self.mask",
    "for name in ('mask',):\n    setattr(self, name, 1)\nreturn self.mask",
    "self.__dict__.update(mask=1)\nreturn self.mask",
    "vars(self).update(mask=1)\nreturn self.mask",
    "globals()['mask'] = 1\nreturn mask, globals()['mask']",
    "globals().update(mask=1)\nreturn mask",
    "found = globals()\nfound['mask'] = 1\nreturn mask",
    "exec('mask = 1', globals())\nreturn mask",
    "self.config['mask'] = 1\nreturn self.config['mask']",
    "self.config.setdefault('mask', 1)\nreturn self.config['mask']",
    "self.config.update(mask=1)\nreturn self.config['mask']",
    "self.config |= {'mask': 1}\nreturn self.config['mask']",
    "self.config = {'mask': 1}\nreturn self.config['mask']",
    "mask = 1\nreturn mask",
    "if (mask := 3) > 2:\n    return mask",
    "[mask := i for i in range(3)]\nreturn mask",
    "for mask in range(3): pass\nreturn mask",
    "with open('x') as mask: return mask",
    "import os.path, json as mask\nreturn os, mask",
    "try:\n    pass\nexcept ValueError as mask:\n    return mask",
    "match split:\n    case [mask, *others]: return mask, others\n    case {'a': 1, **rest}: return rest",
    "match split:\n    case str() as mask: return mask\n    case other: return other",
    "def inner(a, /, b, *c, d, **e): return a, b, c, d, e\nreturn inner",
    "return lambda a, *b: (a, b)",
    "mask = 1\ndef inner():\n    nonlocal mask\n    mask += 1\n    return mask\nreturn inner",
    "class Local:\n    size = 3\n    sizes = [i for i in range(size)]\nreturn Local",
    "def inner(self): return self.mask\nreturn inner",  # another self
    "self = rng\nreturn self.mask",
    "mask: int\nreturn [mask for mask in range(3)]",
    "return {a: b for a, b in zip(split, split) if a != b}",
    "return [x for row in rng for x in row]",
    "return np.zeros(3), DataProviderBase, len(split), __file__, __name__",
    "del split",
]


@pytest.mark.parametrize("body", NOT_READ)
def test_what_is_set_or_guarded_or_unknowable_in_a_method_is_no_alarm(body):
    assert in_method(body) == []


MODULES = {
    # what a class or the module says
    "class P(DataProviderBase):\n    mask = 1\n    def f(self): return self.mask": [],
    "class P(DataProviderBase):\n    mask: float = 1\n    def f(self): return self.mask": [],
    "class P(DataProviderBase):\n    mask: float\n    def f(self): return self.mask": ["self.mask"],
    "class P(DataProviderBase):\n    @property\n    def mask(self): return 1\n    def f(self): return self.mask": [],
    "class P(DataProviderBase):\n    def f(self): return self.mask\nP.mask = 3": [],
    "class P(DataProviderBase):\n    @staticmethod\n    def f(it): return it.mask": [],
    "class P(DataProviderBase):\n    @classmethod\n    def f(cls): return cls.mask": [],
    "class Other:\n    def f(self): return self.mask": [],
    # families of classes
    "class A(DataProviderBase):\n    def f(self): return self.mask\nclass B(A):\n    mask = 1": [],
    "class A(DataProviderBase):\n    pass\nclass B(A):\n    def f(self): return self.mask": ["self.mask"],
    "class M:\n    def f(self): return self.mask\nclass B(M, DataProviderBase): pass": ["self.mask"],
    "import batchwright as bw\nclass A(bw.DataProviderBase):\n    def f(self): return self.mask": ["self.mask"],
    "from batchwright import DataProviderBase as Base\nclass A(Base):\n    def f(self): return self.mask": [
        "self.mask"
    ],
    "from abc import ABC\nclass A(DataProviderBase, ABC):\n    def f(self): return self.mask": ["self.mask"],
    "from mine import Mixin\nclass A(Mixin, DataProviderBase):\n    def f(self): return self.mask": [],
    "from mine import X\nclass M(X): pass\nclass A(M, DataProviderBase):\n    def f(self): return self.mask": [],
    "import mine\nclass M(mine.M): pass\nclass A(M, DataProviderBase):\n    def f(self): return self.mask": [],
    "from mine import A\nclass A(A, DataProviderBase):\n    def f(self): return self.mask": [],
    "from mine import make\nA = make()\nclass A(A, DataProviderBase):\n    def f(self): return self.mask": [],
    "from mine import DataProviderBase\nclass A(DataProviderBase):\n    def f(self): return self.mask": [],
    "import mine\nclass A(mine.DataProviderBase):\n    def f(self): return self.mask": [],
    "from mine import fill\nclass A(DataProviderBase):\n    def f(self): return fill(self), self.mask": [],
    "def fill(it): it.mask = 1\nclass A(DataProviderBase):\n    def f(self): return fill(self), self.mask": [],
    "def show(it): pass\nclass A(DataProviderBase):\n    def f(self): return show(self), self.mask": ["self.mask"],
    "class A(DataProviderBase):\n    def f(self): return super(A, self).f(), id(self), self.mask": ["self.mask"],
    "class A(DataProviderBase):\n    def __init__(self, **c):\n        DataProviderBase.__init__(self, **c)\n"
    "    def f(self): return self.mask": ["self.mask"],
    "from mine import Provider\nclass A(Provider):\n    def f(self): return self.mask": [],
    "class A(DataProviderBase):\n    def __getattr__(self, name): return 1\n    def f(self): return self.mask": [],
    "from mine import fill\n@fill\nclass A(DataProviderBase):\n    def f(self): return self.mask": [],
    "from mine import Meta\nclass A(DataProviderBase, metaclass=Meta):\n    def f(self): return self.mask": [],
    # bare names
    "VALUE = mask * 2": ["mask"],
    "mask = 3\nVALUE = mask * 2": [],
    "mask: float\nVALUE = mask * 2": ["mask"],
    "mask: float = 1\nVALUE = mask * 2": [],
    "def set_it():\n    global mask\n    mask = 3\ndef f(): return mask": [],
    "from mine import *\nVALUE = mask\nOTHER = globals()['x']": [],
    "if True:\n    mask = 3\nVALUE = mask": [],
    "import sys\nsetattr(sys.modules[__name__], 'mask', 3)\nVALUE = mask": [],
    "try:\n    import fast\nexcept ImportError:\n    fast = None\nVALUE = fast": [],
    "def f(a: Missing, b: 'Other' = 1) -> Missing:\n    c: Missing = 1\n    return c": [],
    "if __name__ == '__main__':\n    print(mask)": [],
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from x import Y\n    Z = mask\n": [],
    "@decorate\ndef f(): pass": ["decorate"],
    "class A(Unknown): pass": ["Unknown"],
    "class A:\n    x = mask": ["mask"],
    "class A:\n    mask = 1\n    def f(self): return mask": ["mask"],
    "class A:\n    sizes = [1]\n    both = [s for s in sizes]": [],
    "keys = [k for k in globals().keys() if k in ('a', 'b')]\nVALUE = mask": ["mask"],
    "[last := i for i in range(3)]\nVALUE = last": [],
    # what __init__ demands
    "class A(DataProviderBase):\n    def __init__(self, vocab, data_dir, batch_size, *, k, d=1, **c): pass": [
        "vocab in __init__",
        "k in __init__",
    ],
    "class A(DataProviderBase):\n    def __init__(self, vocab=3, **config): pass": [],
    "class A(DataProviderBase):\n    def __init__(self, a): pass\nclass B(A):\n    def __init__(self, b): pass": [],
}


@pytest.mark.parametrize("body", MODULES)
def test_a_module_is_read_as_python_would(body):
    assert in_module(body) == MODULES[body]


def test_a_source_with_a_syntax_error_says_so():
    with pytest.raises(SyntaxError) as caught:
        names_read("a = 1\nclass ?\n", "prepare_streaming.py")
    assert (caught.value.filename, caught.value.lineno) == ("prepare_streaming.py", 2)


def test_a_source_may_be_bytes_in_the_encoding_that_it_declares():
    source = "# -*- coding: latin-1 -*-\na = 'é' + größe\n".encode("latin-1")
    assert names_read(source, "p.py") == [NameRead("größe", 2, "größe")]


def test_modules_that_work_raise_no_false_alarm():
    for name in ("names.py", "config.py", "provider.py"):
        file = Path(queue.__file__).with_name(name)
        assert names_read(file.read_bytes(), str(file)) == []


def test_methods_and_fixed_properties_of_providers_are_listed_with_their_lines():
    source = """\
    from functools import cached_property
    from batchwright import DataProviderBase
    class P(DataProviderBase):
        def a(self): pass
        @property
        def b(self): pass
        @property
        def c(self): pass
        @c.setter
        def c(self, value): pass
        @cached_property
        def d(self): pass
    class Other:
        def e(self): pass
    """
    assert methods_written(textwrap.dedent(source), "p.py") == {"a": 4, "b": 6}


def test_the_base_class_says_which_names_a_provider_has():
    assert {"batch_size", "seed", "config", "data_dir", "build_meta", "reproducible"} <= base_names()
    assert {"batch_size", "block_size", "seed", "durable", "val_batches"} <= base_parameters().keys()
    assert not {"data_dir", "config", "self"} & base_parameters().keys()
