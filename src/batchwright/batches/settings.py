"""The settings of loaders, each declared once: type, default, check and one line of documentation.

Declarations also give the settings that a plan fixes, those that a stream over raw files refuses, the flags of the
command line, and the tables of docs/settings.md. `None` always means "not given", never "the default".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, Field, dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from batchwright.base.checks import at_least, one_of, whole_number
from batchwright.base.errors import SpecError
from batchwright.base.words import shortened

if TYPE_CHECKING:
    from batchwright.order.plan import Plan
    from batchwright.typing import Balance, EpochEnd, Mesh, PadTo, ShardingLike, WeightsLike

__all__ = ["SETTINGS", "Asked", "Batching", "Delivery", "Fields", "Mixture", "Scope", "Setting", "Shuffle"]

Scope = Literal["global", "pool", "window", "none"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of one setting."""

    name: str
    help: str
    default: Any = None
    """The value if none is given and no plan sets one, or a description of it."""
    check: Callable[..., Any] | None = None
    """check(name=value) -> the value, or a SpecError."""
    choices: tuple[str, ...] = ()
    planned: Callable[[Plan], Any] | None = None
    """Reads the value from a plan. None: plans do not hold it."""
    streams: bool | tuple[Any, ...] = True
    """Whether a stream over raw files takes the setting, or the values that it takes."""
    metavar: str | None = None
    """The name of its value on the command line; empty for a switch. None: no flag."""
    home: str = ""
    """The class that holds the setting. Empty: a plain keyword."""

    def checked(self, value: Any) -> Any:
        if value is None or self.check is None:
            return value
        return self.check(**{self.name: value})


def setting(help: str, *, name: str = "", choices: tuple[str, ...] = (), **facts: Any) -> Any:
    """Declare a setting as a field of a value."""
    return field(default=None, metadata={"setting": _declared(name, help, choices, **facts)})


def switch(help: str, **facts: Any) -> Any:
    """Declare a setting that is True or False."""
    return setting(help, check=_switch, **facts)


def _declared(name: str, help: str, choices: tuple[str, ...] = (), **facts: Any) -> Setting:
    if choices:
        facts.setdefault("check", partial(one_of, choices))
        facts.setdefault("metavar", "HOW")
    return Setting(name=name, help=help, choices=choices, **facts)


def _of_rows(name: str) -> Callable[[Plan], Any]:
    return lambda plan: dict(plan.sources[0].rows).get(name)


def _no_record(_: Plan) -> str:
    """For settings that a plan was made from and does not hold."""
    return "no record of what it was made from"


_COUNT = partial(at_least, 1)


def _switch(**parameter: Any) -> bool:
    ((name, value),) = parameter.items()
    if value in (True, False) and type(value).__name__ in ("bool", "bool_"):  # NumPy's too
        return bool(value)
    raise SpecError(f"{name}={value!r} is neither True nor False", parameter=name, remedy=f"{name}=True")


def _token(**parameter: Any) -> int | str:
    ((_, value),) = parameter.items()
    if isinstance(value, str):
        return value
    return at_least(0, **parameter)


def _width(pad_to: Any) -> Any:
    if isinstance(pad_to, str):
        return pad_to
    if hasattr(pad_to, "__len__"):
        return [at_least(1, pad_to=width) for width in pad_to]
    return at_least(1, pad_to=pad_to)


class Value:
    """A few settings together. Those that are not given follow the plan or the default."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _declared: ClassVar[dict[str, Setting]]
    """The declaration of each field, under its full name."""

    def __init_subclass__(cls) -> None:
        given = {name: each.metadata["setting"] for name, each in vars(cls).items() if isinstance(each, Field)}
        cls._declared = {name: replace(of, name=of.name or name, home=cls.__name__) for name, of in given.items()}
        lines = [f"{name}: {declared.help}" for name, declared in cls._declared.items()]
        cls.__doc__ = "\n".join([cls.__doc__ or "", "", *lines])

    def __post_init__(self) -> None:
        for each, declared in self._declared.items():
            object.__setattr__(self, each, declared.checked(getattr(self, each)))

    def given(self) -> dict[str, Any]:
        """The settings that were given, by their names in errors and flags."""
        values = ((declared.name, getattr(self, each)) for each, declared in self._declared.items())
        return {name: value for name, value in values if value is not None}

    @classmethod
    def names(cls) -> list[str]:
        """The names of its settings."""
        return [declared.name for declared in cls._declared.values()]

    @classmethod
    def _of(cls, asked: Any) -> Self:
        """A value from itself, or from its short form: the first field alone."""
        if asked is None or isinstance(asked, cls):
            return asked or cls()
        first = fields(cls)[0]
        if isinstance(asked, Value) or first.kw_only:
            raise SpecError(
                f"{shortened(asked)} was given where {cls.__name__}(...) belongs",
                parameter=cls.__name__.lower() if first.kw_only else cls.names()[0],
                remedy=f"{cls.__name__}({first.name}=...)",
            )
        return cls(**{first.name: asked})


@dataclass(frozen=True)
class Shuffle(Value):
    """The rows that are shuffled with each other. Short forms: `shuffle=True`, `False`, or the scope."""

    scope: Scope | bool | None = setting(
        "among all rows (global), inside windows (pool; over raw files: window), or not at all (none)",
        name="shuffle",
        check=partial(one_of, (*get_args(Scope), True, False)),
        default="global; none for validation and for raw files that are streamed",
        planned=attrgetter("shuffle"),
        streams=("window", "none", True, False),
        metavar="HOW",
    )
    _: KW_ONLY
    pool_rows: int | None = setting(
        "rows of a window of the pool",
        check=_COUNT,
        default="a gigabyte of them; over raw files 1,024 rows",
        planned=attrgetter("pool_rows"),
        metavar="ROWS",
    )
    lanes: int | None = setting(
        "parallel lanes of windows, so that each rank reads its own",
        check=_COUNT,
        planned=lambda plan: plan.lanes and plan.lanes[0],
        streams=False,
        metavar="N",
    )
    recut: bool | None = switch(
        "whether each epoch cuts windows at other places", default=True, planned=attrgetter("recut"), metavar=""
    )


@dataclass(frozen=True)
class Mixture(Value):
    """The shares of the sources, and the end of the run. Short form: `weights={"web": 0.7, "code": 0.3}`."""

    weights: WeightsLike | None = setting(
        "a share for each source; or (position, shares) pairs, from each position on",
        default="natural proportion",
        planned=attrgetter("schedule"),
        streams=False,
        metavar="NAME=W,...",
    )
    _: KW_ONLY
    by: Literal["rows", "tokens"] | None = setting(
        "what weights are shares of",
        choices=("rows", "tokens"),
        default="rows",
        planned=attrgetter("by"),
        streams=False,
    )
    temperature: float | None = setting(
        "weights (or sizes) to the power 1 / temperature", planned=_no_record, streams=False, metavar="T"
    )
    max_epochs: Mapping[str, int] | int | None = setting(
        "how often a source is read at most, by name, or one number for all",
        planned=attrgetter("caps"),
        streams=False,
        metavar="NAME=N,...",
    )
    exhausted: Literal["repeat", "stop", "renormalise"] | None = setting(
        "what happens when a source has given its epochs",
        choices=("repeat", "stop", "renormalise"),
        default="repeat",
        planned=attrgetter("exhausted"),
        streams=False,
    )
    num_rows: int | None = setting(
        "end after this number of rows", check=_COUNT, planned=attrgetter("end_rows"), streams=False, metavar="N"
    )
    num_tokens: int | None = setting(
        "end after this number of tokens", check=_COUNT, planned=_no_record, streams=False, metavar="N"
    )
    stop: Literal["first_exhausted", "all_exhausted"] | None = setting(
        "end when the first, or the last, source was read once",
        choices=("first_exhausted", "all_exhausted"),
        planned=_no_record,
        streams=False,
    )


@dataclass(frozen=True)
class Batching(Value):
    """The size and shape of batches, and the rows of each rank. Short form: `batch_size=8`."""

    size: int | None = setting(
        "rows of a batch over all ranks together", name="batch_size", check=_COUNT, default=8, metavar="ROWS"
    )
    _: KW_ONLY
    tokens: int | None = setting(
        "tokens of a batch at most, padding included, in place of a size",
        name="batch_tokens",
        check=_COUNT,
        streams=False,
    )
    multiple: int | None = setting(
        "what the rows of a batch by tokens are a multiple of",
        name="row_multiple",
        check=_COUNT,
        default=1,
        streams=False,
    )
    balance: Balance | str | None = setting(
        "give ranks equal work: by tokens (True), by a * n + b * n * n for (a, b), or as a registered function does",
        default=False,
        streams=False,
    )
    equal_counts: bool | None = switch(
        "whether ranks get equally many rows of a balanced batch", default=True, streams=False
    )
    pad_to: PadTo | None = setting(
        "how wide a batch is: its longest row, max_length, a multiple, or the next of a list",
        check=_width,
        default="longest for single samples, max_length for packed rows and mixtures",
        streams=False,
    )
    padding_side: Literal["right", "left"] | None = setting(
        "where short rows are filled up", choices=("right", "left"), default="right", streams=False, metavar=None
    )
    pad: int | str | None = setting(
        "the token, or its id, that fills up short rows",
        check=_token,
        default="the tokenizer's own",
        planned=attrgetter("pad"),
        streams=False,
        metavar="TOKEN",
    )
    epoch_end: EpochEnd | None = setting(
        "what an epoch's last, partial batch is",
        choices=("drop", "short", "pad", "wrap"),
        default="drop; short for validation, buffers and rollouts",
        planned=attrgetter("epoch_end"),
        streams=("drop", "short", "pad"),
    )
    uneven: bool | None = switch("whether ranks may get different numbers of rows", default=False)
    sharding: ShardingLike | None = setting(
        "which rows of a batch a rank gets: contiguous, strided, a registered name, or a function", default="contiguous"
    )
    mesh: Mesh | None = setting(
        "a torch DeviceMesh: ranks that it does not split data among read the same rows",
        default="what the launcher says",
    )


@dataclass(frozen=True, kw_only=True)
class Fields(Value):
    """Fields of a batch besides its tokens and masks."""

    position_ids: bool | None = switch("positions that start again with every document", default="True for packed rows")
    segment_ids: bool | None = switch(
        "the number of the document inside its row, from 1", default="True for packed rows"
    )
    cu_seqlens: bool | None = switch(
        "where parts begin that do not attend to each other", default="True for packed rows", streams=False
    )
    roles: bool | None = switch("role and turn of every token, in metadata", default=False, streams=False)
    rows: bool | None = switch(
        "which file and which of its rows each row was made from, in metadata", default=False, streams=False
    )
    border_loss: bool | None = switch(
        "whether the first token of a document is learned from the document before it", default=True
    )

    def with_defaults(self, is_packed: bool) -> Fields:
        """The fields, each decided. `is_packed`: whether rows hold several documents by plan."""
        decided = dict.fromkeys(("position_ids", "segment_ids", "cu_seqlens"), is_packed)
        return Fields(**{**decided, "roles": False, "rows": False, "border_loss": True, **self.given()})

    @property
    def need_borders(self) -> bool:
        return bool(self.position_ids or self.segment_ids or self.border_loss is False)


@dataclass(frozen=True, kw_only=True)
class Delivery(Value):
    """The means of making batches in time: threads, processes, read-ahead. The content of batches does not change."""

    prefetch: int | None = setting(
        "batches that a thread makes ahead", check=partial(at_least, 0), default="0; over raw files 2"
    )
    workers: int | None = setting("processes that make them", check=partial(at_least, 0), default=0, streams=(0,))
    read_ahead: bool | None = switch(
        "read cold data before it is needed", default="where the data is large and not cached", streams=(False,)
    )
    check: bool | None = switch(
        "look at the first conversations for what would be trained wrong", default=True, streams=False
    )


_KEYWORDS = (
    _declared(
        "chunk_size", "tokens of a row of text", check=_COUNT, planned=attrgetter("row_tokens"), metavar="TOKENS"
    ),
    _declared(
        "max_length",
        "tokens of a conversation at most",
        check=partial(at_least, 2),
        planned=attrgetter("row_tokens"),
        streams=False,
        metavar="TOKENS",
    ),
    _declared(
        "packing",
        "put whole documents side by side into rows",
        choices=("best_fit", "first_fit", "greedy"),
        planned=_of_rows("packing"),
        streams=False,
        metavar="[NAME=]HOW",
    ),
    _declared(
        "loss",
        "what is learned of conversations: assistant (turns), last, all, or roles such as user+assistant; "
        "with ', without end of turn' after it, not the token that ends a turn",
        default="assistant",
        planned=_of_rows("loss"),
        streams=False,
        metavar="WHAT",
    ),
    _declared(
        "truncation",
        "what happens to conversations over max_length",
        choices=("drop", "keep_start", "keep_end", "drop_oldest", "raise"),
        default="drop",
        planned=_of_rows("truncation"),
        streams=False,
    ),
    _declared("seed", "of the shuffle", check=whole_number, default=0, planned=attrgetter("seed"), metavar="N"),
    _declared(
        "split",
        "which side of a holdout",
        choices=("train", "val"),
        default="train",
        planned=lambda plan: plan.sources[0].split,
        streams=("train",),
    ),
    _declared("plan", "read exactly the rows of this plan", streams=False),
    _declared("streaming", "read raw files without a bake", default=False, check=_switch),
    _declared("epochs", "how often the data is read; None never ends", default=1, check=_COUNT),
    _declared("rank", "which process this is", default="what the launcher says"),
    _declared("world_size", "of how many that train together", default="what the launcher says"),
    _declared(
        "framework",
        "whose arrays batches are of",
        choices=("numpy", "torch", "jax", "mlx"),
        default="torch where it was imported, else numpy",
        metavar=None,
    ),
)
_VALUES: tuple[type[Value], ...] = (Shuffle, Mixture, Batching, Fields, Delivery)

SETTINGS: dict[str, Setting] = {
    **{declared.name: declared for declared in _KEYWORDS},
    **{declared.name: declared for value in _VALUES for declared in value._declared.values()},
}
"""Every setting, by name."""


class Asked(Mapping[str, Any]):
    """The settings that were given to a loader. Looking up one that was not gives None."""

    def __init__(
        self,
        *,
        shuffle: Shuffle | Scope | bool | None = None,
        weights: Mixture | WeightsLike | None = None,
        batch_size: Batching | int | None = None,
        fields: Fields | None = None,
        delivery: Delivery | None = None,
        **keywords: Any,
    ) -> None:
        self._given = {n: SETTINGS[n].checked(v) for n, v in keywords.items() if v is not None}
        for kind, given in zip(_VALUES, (shuffle, weights, batch_size, fields, delivery), strict=True):
            self._given |= kind._of(given).given()

    def __getitem__(self, name: str) -> Any:
        assert name in SETTINGS, name
        return self._given.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self._given.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    @classmethod
    def by_name(cls, **given: Any) -> Asked:
        """Settings by the names in errors and flags."""
        return cls().changed(**{name: SETTINGS[name].checked(value) for name, value in given.items()})

    def some(self, *names: str) -> dict[str, Any]:
        """Those of `names` that were given, as keywords."""
        return {name: self._given[name] for name in names if name in self._given}

    def changed(self, **keywords: Any) -> Asked:
        """A copy with some settings changed. None removes one."""
        new = Asked()
        new._given = {name: value for name, value in {**self._given, **keywords}.items() if value is not None}
        return new

    def refuse_other_than(self, plan: Plan, **meant: Any) -> None:
        """Refuse settings that differ from the plan, because one of the two would be ignored.

        `meant` translates settings into the plan's own terms.
        """
        for name in self:
            declared = SETTINGS[name]
            if declared.planned is None:
                continue
            asked, planned = meant.get(name, self[name]), declared.planned(plan)
            if asked != planned:
                raise SpecError(
                    f"{name}={self[name]!r} was given, and plan {plan.fingerprint} has {planned!r}",
                    parameter=name,
                    remedy=f"leave out {name}=, or leave out plan=; plan.amend() changes what is to come",
                )

    def refuse_for_a_stream(self) -> None:
        """Refuse settings that need to know all rows."""
        for name in self:
            takes = SETTINGS[name].streams
            if takes is True or (takes and self[name] in takes):
                continue
            raise SpecError(
                f"a stream over raw files does not know all rows, and cannot take {name}={self[name]!r}",
                parameter=name,
                remedy=f"streaming=False (bakes once, into a cache), or leave out {name}=",
            )

    def refuse(self, names: tuple[str, ...], why: str) -> None:
        """Refuse settings that a loader does not have."""
        for name in names:
            if name in self:
                raise SpecError(f"{name}={self[name]!r} {why}", parameter=name, remedy=f"leave out {name}=")
