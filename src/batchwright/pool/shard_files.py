"""Shards by number: ranges such as "0-99", the files that they mean, their order, and those kept for validation.

Ranges are "0-99", "7", "0-9,20-29", "all" or "none", and inclusive. The number of a file is the last integer in its
name before its extension, compared as a number: `shard_0012.pkl.gz` is 12, and "12" means it. Missing numbers are an
error that lists them, so that no training runs without a lost shard.

No data is read. Hidden files, folders and files of other kinds (README.md, metadata.json) do not count. Other
irregularities are errors: a number twice, a file twice, a shard without a number.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any

from batchwright.base.checks import local_path, whole_number
from batchwright.base.errors import SourceError, SpecError
from batchwright.base.seeds import key_of
from batchwright.base.words import counted, listed, shortened, truncated
from batchwright.columns.shard import EXTENSIONS
from batchwright.order.mix import draw_slots

__all__ = ["discover_and_split_multiple_data", "shards_in"]

log: logging.Logger = logging.getLogger("batchwright")

_SHOWN = 5
"""Names that an error lists."""


_PART = re.compile(r"\s*([0-9]{1,40})\s*(?:-\s*([0-9]{1,40})\s*)?", re.ASCII)
_EXAMPLES = '"0-99" (both are included), "7", "0-9,20-29", "all" or "none"'
_MOST_LISTED = 20
"""Stretches of numbers that an error lists."""
_MOST_TEXT = 1000
"""Characters of a range that an error offers."""
_NOWHERE: dict[str, Any] = {"parameter": "shard_ranges", "index": None, "directory": None}

Stretch = tuple[int, int]
"""First and last of numbers that follow each other."""


# Names


def extension_of(name: str) -> str | None:
    """The extension of a shard's name; None for every other name.

    >>> extension_of("shard_0012.pkl.gz"), extension_of("README.md"), extension_of("shard_1.npz.tmp")
    ('.pkl.gz', None, None)
    """
    lowered = name.lower()
    return next((extension for extension in EXTENSIONS if lowered.endswith(extension)), None)


def number_of(name: str) -> int | None:
    """The last integer in a shard's name before its extension, or None if it has none.

    >>> number_of("shard_0012.pkl.gz"), number_of("run2_shard-007.npz"), number_of("shard.0003.npz")
    (12, 7, 3)
    >>> number_of("positions.npz") is None
    True
    """
    stem = name[: len(name) - len(extension_of(name) or "")]
    digits = re.findall(r"[0-9]+", stem)
    if not digits:
        return None
    return int(digits[-1])


# Ranges


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Numbers that are asked for. `str` gives the text that means them."""

    stretches: tuple[Stretch, ...] | None
    """Stretches in rising order, with gaps between them. () means no shard, None all existing numbers."""

    def __str__(self) -> str:
        if self.stretches is None:
            return "all"
        return _text_of(self.stretches)


def parse_range(text: Any, **where: Any) -> ShardRange:
    """The range that a text means. Errors name the place `where` it is: `directory`, `index`, `parameter`.

    >>> print(parse_range("0-99"), parse_range(" 20 - 29, 0-9, 5-12 "), parse_range("all"), parse_range("none"))
    0-99 0-12,20-29 all none
    """
    where = _NOWHERE | where | {"range": repr(text)}
    if not isinstance(text, str):
        raise SpecError(f"a range of shards is a text, not {text!r}"[:200], **where, remedy=_EXAMPLES)
    match text.strip().lower():
        case "all":
            return ShardRange(None)
        case "none":
            return ShardRange(())
    stretches = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise SpecError(f"{part.strip()[:80]!r} is not a range of shards", **where, remedy=_EXAMPLES)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            what = f"this range of shards is reversed: {first} is after {last}"
            raise SpecError(what, **where, remedy=f'"{last}-{first}"')
        stretches.append((first, last))
    return ShardRange(tuple(_merged(sorted(stretches))))


def choose(wanted: ShardRange, there: Iterable[int], **where: Any) -> list[int]:
    """The numbers of a range among the existing ones, in rising order. An error lists the missing numbers,
    and names the place as in `parse_range`.

    "all" must have no gaps, unless fewer than half of the numbers between the first and the last are there. Such
    numbers are ids, and their gaps are not missing shards.

    >>> choose(parse_range("2-3"), [3, 1, 2]), choose(parse_range("all"), [17, 4011, 90210])
    ([2, 3], [17, 4011, 90210])
    """
    numbers = sorted(set(there))
    asked = wanted.stretches
    if asked is None:
        if not numbers or are_ids(numbers):
            return numbers
        asked = ((numbers[0], numbers[-1]),)
    chosen: list[int] = []
    missing: list[Stretch] = []
    for first, last in asked:
        inside = numbers[bisect_left(numbers, first) : bisect_right(numbers, last)]
        chosen += inside
        missing += [(a + 1, b - 1) for a, b in pairwise([first - 1, *inside, last + 1]) if b - a > 1]
    if not missing:
        return chosen
    fits = "all"
    if chosen:
        fits = range_text(chosen)
    noun, verb = ("shard", "is") if missing[0][0] == missing[-1][1] else ("shards", "are")
    where = _NOWHERE | where | {"range": repr(str(wanted)), "missing": _listed(missing)}
    what = f"{noun} {_listed(missing)} of range {str(wanted)!r} {verb} not there"
    remedy = f'"{truncated(fits, _MOST_TEXT)}", or bring back what is missing'
    raise SpecError(what, **where, there=_listed(_stretches(numbers)) or "no shard", remedy=remedy)


def are_ids(numbers: Sequence[int]) -> bool:
    """Whether sorted numbers are ids: fewer than half of those between the first and the last are there.

    >>> are_ids([0, 1, 2, 4]), are_ids([17, 4011, 90210])
    (False, True)
    """
    return 2 * len(numbers) < numbers[-1] - numbers[0] + 1


def range_text(numbers: Iterable[int]) -> str:
    """The range that means exactly these numbers.

    >>> range_text([0, 1, 2, 7, 9, 10]), range_text([])
    ('0-2,7,9-10', 'none')
    """
    return _text_of(_stretches(sorted(set(numbers))))


def _stretches(numbers: Sequence[int]) -> list[Stretch]:
    return _merged([(number, number) for number in numbers])


def _merged(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Sorted stretches, with those that touch or overlap as one."""
    found: list[Stretch] = []
    for first, last in stretches:
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _text_of(stretches: Sequence[Stretch]) -> str:
    return ",".join(map(_shown, stretches)) or "none"


def _listed(stretches: Sequence[Stretch]) -> str:
    return listed(map(_shown, stretches), _MOST_LISTED)


def _shown(stretch: Stretch) -> str:
    first, last = stretch
    if first == last:
        return str(first)
    return f"{first}-{last}"


# Discovery


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One shard: its path, and its number in its directory."""

    directory: int
    """The index of its entry in data_dirs."""
    path: str
    number: int


def find_shards(data_dirs: Sequence[str | os.PathLike[str]], shard_ranges: Sequence[str]) -> list[list[ShardFile]]:
    """The shards of each directory that its range means, by number: `find_shards(["a", "b"], ["0-99", "all"])`.

    Every number of an explicit range is there; "all" has no gaps, unless numbers are ids (see `shard_ranges.choose`).
    No file is there twice. A directory whose range is "none" is not looked at.
    """
    directories = _checked_directories(data_dirs, shard_ranges)
    pairs = enumerate(zip(directories, shard_ranges, strict=True))
    found = [_find(directory, text, index) for index, (directory, text) in pairs]
    if not any(found):
        what = "no shard is left: the range of every directory is 'none'"
        remedy = 'a range such as "0-99" or "all" for one of them'
        raise SpecError(what, parameter="shard_ranges", directories=listed(directories), remedy=remedy)
    _refuse_a_file_twice(found, directories)
    return found


def shards_in(
    directory: str | os.PathLike[str], text: str = "all", *, parameter: str = "shard_ranges"
) -> list[ShardFile]:
    """The shards of one directory that a range means, by number. `parameter`: the name of the range in errors."""
    folder = str(local_path(directory=directory))
    found = _find(folder, text, None, parameter)
    if not found:
        raise SpecError("range 'none' leaves no shard", parameter=parameter, directory=directory, remedy='"all"')
    _refuse_a_file_twice([found], [folder])
    return found


def shard_sequence(found: Sequence[Sequence[ShardFile]]) -> list[ShardFile]:
    """The order of an epoch: directories in proportion to their counts, shards in order inside each, each once.

    Every prefix has of each directory its share of the prefix, within one shard.

    >>> found = [[ShardFile(0, f"a/{n}.npz", n) for n in range(4)], [ShardFile(1, f"b/{n}.npz", n) for n in range(2)]]
    >>> [shard.path for shard in shard_sequence(found)]
    ['a/0.npz', 'b/0.npz', 'a/1.npz', 'a/2.npz', 'b/1.npz', 'a/3.npz']
    """
    if not any(found):
        return []
    following = [iter(shards) for shards in found]
    return [next(following[directory]) for directory in draw_slots(tuple(map(len, found))).tolist()]


def _checked_directories(data_dirs: Any, shard_ranges: Any) -> list[str]:
    for name, given in (("data_dirs", data_dirs), ("shard_ranges", shard_ranges)):
        if not isinstance(given, list | tuple):
            what = f"{name} is a list, and this is {type(given).__name__}"
            remedy = f'{name}=["..."], an item for each directory'
            raise SpecError(what, parameter=name, given=shortened(given, 200), remedy=remedy)
    directories = [str(local_path(data_dirs=given)) for given in data_dirs]
    if len(directories) != len(shard_ranges) or not directories:
        raise SpecError(
            f"data_dirs has {len(directories)} entries and shard_ranges has {len(shard_ranges)}",
            parameter="shard_ranges",
            data_dirs=listed(directories),
            shard_ranges=listed(shard_ranges),
            remedy=f'one range for each directory: shard_ranges=["all"] * {max(1, len(directories))}',
        )
    return directories


def _find(directory: str, text: Any, index: int | None, parameter: str = "shard_ranges") -> list[ShardFile]:
    where = {"index": index, "directory": directory}
    wanted = parse_range(text, **where, parameter=parameter)
    if wanted.stretches == ():
        return []
    by_number = _shard_names(directory, where)
    chosen = choose(wanted, by_number, **where, parameter=parameter)
    twice = [f"{number}: {' and '.join(by_number[number])}" for number in chosen if len(by_number[number]) > 1]
    if twice:
        what = "several shards of this directory have one number"
        remedy = "keep one file for each number, and move the others out of this directory"
        raise SourceError(what, **where, files=listed(twice, _SHOWN), remedy=remedy)
    if wanted.stretches is None and are_ids(chosen):
        log.info(
            "%s: %d shards with numbers from %d to %d are taken as ids: nobody can tell whether one is missing",
            *(directory, len(chosen), chosen[0], chosen[-1]),
        )
    return [ShardFile(index or 0, _file(directory, by_number[number][0], where), number) for number in chosen]


def _shard_names(directory: str, where: dict[str, Any]) -> dict[int, list[str]]:
    """Sorted names of the files in a directory that end as a shard's does, by number."""
    try:
        with os.scandir(directory) as entries:
            there = sorted(entry.name + "/" * entry.is_dir() for entry in entries)
    except OSError as error:
        what = "this directory of shards cannot be listed"
        remedy = "the directory that has files such as shard_0000.npz, listable by this user"
        raise SourceError(what, **where, reason=os.strerror(error.errno or 0), remedy=remedy) from None
    visible = [name for name in there if not name.startswith(".")]
    names = [name for name in visible if extension_of(name)]  # not a folder, which ends with a slash
    if not names:
        raise SourceError(
            "no shard is in this directory",
            **where,
            found=listed(visible) or "it is empty",
            shards_are="*" + ", *".join(EXTENSIONS),
            remedy="the directory that has the shards themselves, or 'none' as its range",
        )
    log.debug("%s: %d shards; %d other entries are ignored", directory, len(names), len(there) - len(names))
    by_number: dict[int, list[str]] = {}
    for name in names:
        number = number_of(name)
        if number is None:
            what = f"{name} has no number in its name, so no range can mean it"
            remedy = "a name such as shard_0000.npz; or move it out of this directory"
            raise SourceError(what, **where, file=os.path.join(directory, name), remedy=remedy)
        by_number.setdefault(number, []).append(name)
    return by_number


def _file(directory: str, name: str, where: dict[str, Any]) -> str:
    path = os.path.join(directory, name)
    if not os.path.isfile(path):
        what = "this is not a file, or a link to nothing"
        raise SourceError(what, **where, file=path, remedy="put the shard there, or leave its number out of the range")
    return path


def _refuse_a_file_twice(found: list[list[ShardFile]], directories: list[str]) -> None:
    first: dict[tuple[int, int], ShardFile] = {}
    twice: list[tuple[ShardFile, ShardFile]] = []
    for shard in itertools.chain.from_iterable(found):
        status = os.stat(shard.path)
        other = first.setdefault((status.st_dev, status.st_ino), shard)
        if other is not shard:
            twice.append((other, shard))
    if not twice:
        return
    once, again = twice[0]
    numbers = range_text(later.number for _, later in twice if later.directory == again.directory)
    raise SpecError(
        f"{counted(len(twice), 'shard')} chosen twice",
        parameter="data_dirs",
        index=again.directory,
        directory=directories[again.directory],
        files=listed([f"{one.path} is {two.path}" for one, two in twice], _SHOWN),
        remedy=f"leave {numbers} out of the range of data_dirs[{again.directory}], or of data_dirs[{once.directory}]",
    )


# Validation


@dataclass(frozen=True, repr=False)
class ShardSplit:
    """Shards for training and shards for validation: `discover_and_split_multiple_data` makes it; print it."""

    data_dirs: tuple[str, ...]
    train_ranges: tuple[str, ...]
    """A range for each directory: `StreamingMixedShardDataset(split.data_dirs, split.train_ranges)`."""
    validation_ranges: tuple[str, ...]
    train_shards: tuple[ShardFile, ...]
    validation_shards: tuple[ShardFile, ...]

    @property
    def weights(self) -> dict[str, dict[str, float]]:
        """Each directory's share of the shards of "train" and of "validation"."""
        return {"train": self._shares(self.train_shards), "validation": self._shares(self.validation_shards)}

    def _shares(self, shards: tuple[ShardFile, ...]) -> dict[str, float]:
        counts = Counter(self.data_dirs[shard.directory] for shard in shards)
        return {directory: counts[directory] / max(1, len(shards)) for directory in self.data_dirs}

    def __str__(self) -> str:
        sides = (self.train_shards, self.validation_shards)
        width = max(len("directory"), *map(len, self.data_dirs))
        lines = [
            f"{len(self.train_shards):,} shards for training, {len(self.validation_shards):,} for validation",
            f"{'directory':<{width}}  {'train':>7}  {'share':>7}  {'validation':>10}  {'share':>7}  validation shards",
        ]
        for index, directory in enumerate(self.data_dirs):
            train, validation = (sum(shard.directory == index for shard in shards) for shards in sides)
            lines.append(
                f"{directory:<{width}}  {train:>7,}  {_percent(train, len(self.train_shards)):>7}  "
                f"{validation:>10,}  {_percent(validation, len(self.validation_shards)):>7}  "
                f"{truncated(self.validation_ranges[index], 60)}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def discover_and_split_multiple_data(
    data_dirs: Sequence[str | os.PathLike[str]],
    shard_ranges: Sequence[str],
    validation_split: float,
    random_seed: int = 0,
) -> ShardSplit:
    """Keep whole shards of each directory for validation: `validation_split=0.1` keeps about a tenth of each.
    `shard_ranges` lists the shards of each directory: "0-99", or "all".

    A directory of n shards gives round(n * validation_split), and keeps at least one for training. If all give
    none, the largest directory gives one. The choice follows from `random_seed`, the place of the directory in
    `data_dirs` and the numbers of its shards, not from paths: data that is moved is split as before. Where shards are
    added later, at most as many old ones change sides as were added (as long as `validation_split` itself comes to a
    shard); the ranges of a split that must not change at all are for keeping.
    """
    share, seed = _checked_split(validation_split), whole_number(random_seed=random_seed)
    found = find_shards(data_dirs, shard_ranges)
    counts = _num_kept(found, share, directories=listed(data_dirs), shard_ranges=listed(map(repr, shard_ranges)))
    train, validation = [], []
    for shards, count in zip(found, counts, strict=True):
        kept = set(sorted(shards, key=lambda shard: _noise(seed, shard))[:count])
        train.append([shard for shard in shards if shard not in kept])
        validation.append([shard for shard in shards if shard in kept])
    return ShardSplit(
        data_dirs=tuple(os.fspath(directory) for directory in data_dirs),
        train_ranges=tuple(range_text(shard.number for shard in shards) for shards in train),
        validation_ranges=tuple(range_text(shard.number for shard in shards) for shards in validation),
        train_shards=tuple(itertools.chain.from_iterable(train)),
        validation_shards=tuple(itertools.chain.from_iterable(validation)),
    )


def _num_kept(found: Sequence[Sequence[ShardFile]], share: float, **where: str) -> list[int]:
    """The number of shards of each directory that are kept for validation. An error names `where`."""
    counts = [min(round(len(shards) * share), max(0, len(shards) - 1)) for shards in found]
    if not share or any(counts):
        return counts
    largest = max(range(len(found)), key=lambda index: len(found[index]))
    if len(found[largest]) < 2:
        what = "no shard can be kept for validation: no directory has two"
        remedy = "more shards, smaller ones; or validation_split=0"
        raise SpecError(what, parameter="validation_split", **where, remedy=remedy)
    counts[largest] = 1
    return counts


def _noise(seed: int, shard: ShardFile) -> tuple[int, int]:
    return key_of(seed, "validation split", shard.directory, shard.number), shard.number


def _checked_split(given: Any) -> float:
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if is_number and 0 <= given < 1:
        return float(given)
    remedy = "validation_split=0.1"
    if is_number and 1 < given < 100:
        remedy = f"validation_split={given / 100:g}"
    raise SpecError(
        f"validation_split is a share of the shards, 0 or more and below 1, and not {given!r}",
        parameter="validation_split",
        given=repr(given),
        remedy=remedy,
    )


def _percent(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else "-"
