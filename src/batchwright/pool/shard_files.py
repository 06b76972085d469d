"""Which shards an epoch reads, in which order, and which are kept for validation: names and numbers, no data.

Files are found by `ranges.py`. Hidden files, folders and files of other kinds (README.md, metadata.json) do not count;
anything else that cannot be what was meant is an error: a number twice, a file twice, a shard without a number.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from batchwright.base.checks import local_path, whole_number
from batchwright.base.errors import SourceError, SpecError
from batchwright.base.seeds import key_of
from batchwright.columns.shard import EXTENSIONS
from batchwright.pool.shard_ranges import ShardRange, are_ids, choose, extension_of, number_of, parse_range, range_text

__all__ = ["ShardFile", "ShardSplit", "discover_and_split_multiple_data", "find_shards", "shard_sequence", "shards_in"]

log: logging.Logger = logging.getLogger("batchwright")

_SHOWN = 5
"""Names that an error lists."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One shard: where it is, and which of its directory."""

    directory: int
    """Which entry of data_dirs."""
    path: str
    number: int


# Discovery


def find_shards(data_dirs: Sequence[str | os.PathLike[str]], shard_ranges: Sequence[str]) -> list[list[ShardFile]]:
    """The shards of each directory that its range means, by number: `find_shards(["a", "b"], ["0-99", "all"])`.

    Every number of an explicit range is there; "all" has no gaps, unless numbers are ids (see `ranges.choose`). No
    file is there twice. A directory whose range is "none" is not looked at.
    """
    directories, ranges = _pairs(data_dirs, shard_ranges)
    found = [
        [] if wanted.is_none else _find(directory, wanted, index)
        for index, (directory, wanted) in enumerate(zip(directories, ranges, strict=True))
    ]
    if not any(found):
        raise SpecError(
            "no shard is left: the range of every directory is 'none'",
            parameter="shard_ranges",
            directories=_side_by_side(directories, [str(wanted) for wanted in ranges]),
            remedy='a range such as "0-99" or "all" for one of them',
        )
    _refuse_a_file_twice(found, directories)
    return found


def shards_in(
    directory: str | os.PathLike[str], text: str = "all", *, parameter: str = "shard_ranges"
) -> list[ShardFile]:
    """The shards of one directory that a range means, by number. `parameter`: what an error calls the range."""
    folder = str(local_path(directory=directory))
    wanted = parse_range(text, directory=folder, parameter=parameter)
    if wanted.is_none:
        raise SpecError("range 'none' leaves no shard", parameter=parameter, directory=directory, remedy='"all"')
    found = _find(folder, wanted, None, parameter)
    _refuse_a_file_twice([found], [folder])
    return found


def shard_sequence(found: Sequence[Sequence[ShardFile]]) -> list[ShardFile]:
    """The order of an epoch: directories in proportion to their counts, shards in order inside each, each once.

    Every prefix has of each directory its share of the prefix, within one shard.

    >>> found = [[ShardFile(0, f"a/{n}.npz", n) for n in range(4)], [ShardFile(1, f"b/{n}.npz", n) for n in range(2)]]
    >>> [shard.path for shard in shard_sequence(found)]
    ['a/0.npz', 'b/0.npz', 'a/1.npz', 'a/2.npz', 'b/1.npz', 'a/3.npz']
    """
    from batchwright.order.draw import draw_slots

    if not any(found):
        return []
    following = [iter(shards) for shards in found]
    return [next(following[directory]) for directory in draw_slots(tuple(map(len, found))).tolist()]


def _pairs(data_dirs: Any, shard_ranges: Any) -> tuple[list[str], list[ShardRange]]:
    for given, name, example in ((data_dirs, "data_dirs", "data/games"), (shard_ranges, "shard_ranges", "0-99")):
        if not isinstance(given, list | tuple):
            fits = f'["{os.fspath(given)}"]' if isinstance(given, str | os.PathLike) else f'["{example}"]'
            raise SpecError(
                f"{name} is a list, and this is {type(given).__name__}",
                parameter=name,
                given=repr(given)[:200],
                remedy=f"{name}={fits}",
            )
    for index, given in enumerate(data_dirs):
        if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str) or not os.fspath(given):
            raise SpecError(
                f"data_dirs[{index}] is not the path of a directory",
                parameter="data_dirs",
                index=index,
                given=repr(given)[:200],
                remedy='data_dirs=["data/games"]: a text or a Path each',
            )
    directories = [str(local_path(data_dirs=given)) for given in data_dirs]
    if len(directories) != len(shard_ranges):
        raise SpecError(
            f"data_dirs has {len(directories)} entries and shard_ranges has {len(shard_ranges)}",
            parameter="shard_ranges",
            entries=_side_by_side(directories, list(map(str, shard_ranges))),
            remedy=f'one range for each directory: shard_ranges=["all"] * {len(directories)}',
        )
    if not directories:
        raise SpecError(
            "data_dirs is empty", parameter="data_dirs", remedy='data_dirs=["data/games"], shard_ranges=["all"]'
        )
    ranges = [
        parse_range(text, directory=directory, index=index)
        for index, (directory, text) in enumerate(zip(directories, shard_ranges, strict=True))
    ]
    return directories, ranges


def _side_by_side(directories: list[str], ranges: list[str]) -> str:
    """
    >>> print(_side_by_side(["data/a", "b"], ["0-9"]))
    0  data/a  0-9
    1  b       (no range)
    """
    count = max(len(directories), len(ranges))
    left = [*directories, *["(no directory)"] * (count - len(directories))]
    right = [*ranges, *["(no range)"] * (count - len(ranges))]
    width = max(map(len, left))
    return "\n".join(f"{index}  {left[index]:<{width}}  {right[index]}" for index in range(count))


def _find(directory: str, wanted: ShardRange, index: int | None, parameter: str = "shard_ranges") -> list[ShardFile]:
    where = {"index": index, "directory": directory}
    names = _shard_names(directory, where)
    by_number: dict[int, list[str]] = {}
    for name in names:
        number = number_of(name)
        if number is None:
            raise SourceError(
                f"{name} has no number in its name, so no range can mean it",
                **where,
                file=os.path.join(directory, name),
                remedy="a name such as shard_0000.npz; or move it out of this directory",
            )
        by_number.setdefault(number, []).append(name)
    chosen = choose(wanted, by_number, directory=directory, index=index, parameter=parameter)
    twice = {number: by_number[number] for number in chosen if len(by_number[number]) > 1}
    if twice:
        raise SourceError(
            f"{'a number belongs' if len(twice) == 1 else f'{len(twice)} numbers belong'} to more than one shard",
            **where,
            files=_some([f"{number}: {', '.join(sorted(names))}" for number, names in twice.items()], "\n"),
            remedy="keep one file for each number, and move the others out of this directory",
        )
    if wanted.is_all and are_ids(chosen):
        log.info(
            "%s: %d shards with numbers from %d to %d are taken as ids: nobody can tell whether one is missing",
            *(directory, len(chosen), chosen[0], chosen[-1]),
        )
    return [ShardFile(index or 0, _file(directory, by_number[number][0], where), number) for number in chosen]


def _shard_names(directory: str, where: dict[str, Any]) -> list[str]:
    """Names of files in a directory that end as a shard's does."""
    try:
        with os.scandir(directory) as entries:
            listed = [(entry.name, entry.is_dir()) for entry in entries]
    except OSError as error:
        raise _no_directory(directory, error, where) from None
    visible = [(name, is_folder) for name, is_folder in listed if not name.startswith(".")]
    names = sorted(name for name, is_folder in visible if not is_folder and extension_of(name))
    if not names:
        folders = sorted(name + "/" for name, is_folder in visible if is_folder)
        others = sorted(name for name, is_folder in visible if not is_folder)
        raise SourceError(
            "no shard is in this directory",
            **where,
            found=_some([*folders, *others], ", ") if visible else "it is empty",
            shards_are="*" + ", *".join(EXTENSIONS),
            remedy="the directory that has the shards themselves, or 'none' as its range",
        )
    if len(listed) > len(names):
        log.debug("%s: %d shards; %d other entries are ignored", directory, len(names), len(listed) - len(names))
    return names


def _no_directory(directory: str, error: OSError, where: dict[str, Any]) -> SourceError:
    whole = os.path.abspath(directory)
    if isinstance(error, NotADirectoryError) and os.path.isfile(whole):
        return SourceError(
            "this is a file, not a directory of shards",
            **where,
            found=f"a file of {os.path.getsize(whole):,} bytes",
            remedy=f"its directory, {os.path.dirname(directory) or '.'!r}, and a range",
        )
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        parent = os.path.dirname(whole)
        while not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        return SourceError(
            "this directory of shards does not exist",
            **where,
            found=f"{parent} has {_folders_in(parent)}",
            remedy="the directory that has files such as shard_0000.npz",
        )
    return SourceError(
        "this directory of shards cannot be read",
        **where,
        reason=os.strerror(error.errno or 0),
        remedy="allow this user to list it (chmod u+rx), or mend what holds it",
    )


def _folders_in(directory: str) -> str:
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return "what this user cannot list"
    return _some([name + "/" for name in names], ", ") if names else "no folders"


def _file(directory: str, name: str, where: dict[str, Any]) -> str:
    path = os.path.join(directory, name)
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise SourceError(
            "the name of this shard is not UTF-8",
            **where,
            file=ascii(path),
            remedy="rename it: logs and states name it",
        ) from None
    if not os.path.isfile(path):
        what = "this link leads nowhere" if os.path.islink(path) and not os.path.exists(path) else "this is no file"
        raise SourceError(what, **where, file=path, remedy="put the shard there, or leave its number out of the range")
    return path


def _refuse_a_file_twice(found: list[list[ShardFile]], directories: list[str]) -> None:
    places = [os.path.realpath(directory) for directory in directories]
    first: dict[str, ShardFile] = {}
    twice: list[tuple[ShardFile, ShardFile]] = []
    for shard in (shard for shards in found for shard in shards):
        link = os.path.islink(shard.path)
        name = os.path.basename(shard.path)
        place = os.path.realpath(shard.path) if link else os.path.join(places[shard.directory], name)
        other = first.setdefault(place, shard)
        if other is not shard:
            twice.append((other, shard))
    if not twice:
        return
    once, again = twice[0]
    numbers = range_text(later.number for _, later in twice if later.directory == again.directory)
    raise SpecError(
        f"{'a shard is' if len(twice) == 1 else f'{len(twice)} shards are'} chosen twice",
        parameter="data_dirs",
        index=again.directory,
        directory=directories[again.directory],
        files=_some([f"{one.path} is {two.path}" for one, two in twice], "\n"),
        remedy=f"leave {numbers} out of the range of data_dirs[{again.directory}], or of data_dirs[{once.directory}]",
    )


def _some(texts: Sequence[str], between: str) -> str:
    rest = len(texts) - _SHOWN
    return between.join(texts[:_SHOWN]) + (
        f"{between if between.isspace() else ' '}and {rest:,} more" if rest > 0 else ""
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
        """Of "train" and of "validation": each directory's share of the shards."""
        return {"train": self._shares(self.train_shards), "validation": self._shares(self.validation_shards)}

    def _shares(self, shards: tuple[ShardFile, ...]) -> dict[str, float]:
        counts = Counter(self.data_dirs[shard.directory] for shard in shards)
        return {directory: counts[directory] / max(1, len(shards)) for directory in self.data_dirs}

    def __str__(self) -> str:
        count = {
            name: Counter(shard.directory for shard in shards)
            for name, shards in (("train", self.train_shards), ("validation", self.validation_shards))
        }
        width = max(len("directory"), *map(len, self.data_dirs))
        lines = [
            f"{len(self.train_shards):,} shards for training, {len(self.validation_shards):,} for validation",
            f"{'directory':<{width}}  {'train':>7}  {'share':>7}  {'validation':>10}  {'share':>7}  validation shards",
        ]
        for index, directory in enumerate(self.data_dirs):
            train, validation = count["train"][index], count["validation"][index]
            lines.append(
                f"{directory:<{width}}  {train:>7,}  {_percent(train, len(self.train_shards)):>7}  "
                f"{validation:>10,}  {_percent(validation, len(self.validation_shards)):>7}  "
                f"{_shortened(self.validation_ranges[index])}"
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
    `shard_ranges` says which shards of each directory there are: "0-99", or "all".

    A directory of n shards gives round(n * validation_split), and keeps at least one for training; where all come to
    none, the largest directory gives one. Which ones follows from `random_seed`, the place of the directory in
    `data_dirs` and the numbers of its shards, not from paths: data that is moved is split as before. Where shards are
    added later, at most as many old ones change sides as were added (as long as `validation_split` itself comes to a
    shard); the ranges of a split that must not change at all are for keeping.
    """
    share, seed = _checked_split(validation_split), whole_number(random_seed=random_seed)
    found = find_shards(data_dirs, shard_ranges)
    take = [min(round(len(shards) * share), max(0, len(shards) - 1)) for shards in found]
    if share and not any(take):
        largest = max(range(len(found)), key=lambda index: len(found[index]))
        if len(found[largest]) < 2:
            raise SpecError(
                "no shard can be kept for validation: no directory has two",
                parameter="validation_split",
                directories=_side_by_side(
                    [os.fspath(directory) for directory in data_dirs],
                    [f"{len(shards)} of range {text!r}" for shards, text in zip(found, shard_ranges, strict=True)],
                ),
                remedy="more shards, smaller ones; or validation_split=0",
            )
        take[largest] = 1
    kept = [
        {shard.number for shard in sorted(shards, key=lambda shard: _noise(seed, shard))[:count]}
        for shards, count in zip(found, take, strict=True)
    ]
    train = [[shard for shard in shards if shard.number not in kept[i]] for i, shards in enumerate(found)]
    validation = [[shard for shard in shards if shard.number in kept[i]] for i, shards in enumerate(found)]
    return ShardSplit(
        data_dirs=tuple(os.fspath(directory) for directory in data_dirs),
        train_ranges=tuple(range_text(shard.number for shard in shards) for shards in train),
        validation_ranges=tuple(range_text(shard.number for shard in shards) for shards in validation),
        train_shards=tuple(shard for shards in train for shard in shards),
        validation_shards=tuple(shard for shards in validation for shard in shards),
    )


def _noise(seed: int, shard: ShardFile) -> tuple[int, int]:
    return key_of(seed, "validation split", shard.directory, shard.number), shard.number


def _checked_split(given: Any) -> float:
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if not is_number or not math.isfinite(given) or not 0 <= given < 1:
        shown = f"{given:g}" if is_number else repr(given)
        raise SpecError(
            f"validation_split is a share of the shards, 0 or more and below 1, and not {shown}",
            parameter="validation_split",
            given=shown,
            remedy=f"validation_split={given / 100:g}" if is_number and 1 < given < 100 else "validation_split=0.1",
        )
    return float(given)


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
