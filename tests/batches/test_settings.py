"""Settings are values: declared once, checked once, the same for every loader; and what every loader does with them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchwright as bw
from batchwright.batches.settings import SETTINGS, Batching, Delivery, Fields, Mixture, Setting, Shuffle
from batchwright.order.balance import balance
from refusals import refused

LOADERS = (bw.PretrainDataLoader, bw.ConversationDataLoader, bw.MixedDataLoader, bw.RolloutDataLoader)
ROLLOUTS = [{"prompt": [1, 2], "response": [3] * n, "reward": float(n)} for n in range(1, 12)]
CHAT = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a" * n}]}
    for n in range(1, 24)
]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(params=["text", "stream", "chat", "mixture", "rollouts", "buffer"])
def open_any(request: pytest.FixtureRequest, small_store: Path, chat_store: Path, raw: Path) -> Callable[..., Any]:
    """Opens one kind of loader."""
    buffer = bw.DatasetBuffer()
    buffer.extend({"x": np.arange(23)})
    kinds: dict[str, Callable[..., Any]] = {
        "text": lambda **s: bw.PretrainDataLoader(small_store, chunk_size=64, **s),
        "stream": lambda **s: bw.PretrainDataLoader(raw / "web", "bytes", 64, streaming=True, **s),
        "chat": lambda **s: bw.ConversationDataLoader(chat_store, max_length=256, **s),
        "mixture": lambda **s: bw.MixedDataLoader({"a": small_store}, chunk_size=64, **s),
        "rollouts": lambda **s: bw.RolloutDataLoader(ROLLOUTS, vocab_size=10, **s),
        "buffer": lambda **s: buffer.loader(**s),
    }
    return lambda **settings: kinds[request.param](rank=0, world_size=1, **({"framework": "numpy"} | settings))


def facts(batch: Any) -> list[int]:
    return np.asarray(batch.metadata["position"]).tolist()


# Declared once


@pytest.mark.parametrize("loader", [*LOADERS, bw.DatasetBuffer.loader], ids=lambda loader: loader.__qualname__)
def test_no_constructor_takes_more_than_20_parameters(loader):
    assert len(inspect.signature(loader).parameters) <= 20


def reference() -> str:
    """The tables of docs/settings.md."""
    parts = []
    for home in ("", "Shuffle", "Mixture", "Batching", "Fields", "Delivery"):
        rows = [row_of(each) for each in SETTINGS.values() if each.home == home]
        table = ["| setting | meaning | default | in the plan | streams take |", "|---|---|---|---|---|", *rows]
        parts.append("\n".join([f"## {home or 'Plain keywords'}", "", *table]))
    return "\n\n".join(parts) + "\n"


def row_of(each: Setting) -> str:
    fields = {} if not each.home else getattr(bw, each.home).__dataclass_fields__
    name = next((f for f, declared in fields.items() if declared.metadata["setting"].name == each.name), each.name)
    default = "" if each.default is None else each.default
    streams = {True: "any", False: "no"}.get(each.streams) or ", ".join(map(str, each.streams))
    return f"| `{name}` | {each.help} | {default} | {'yes' if each.planned else ''} | {streams} |"


def test_the_page_of_settings_is_made_of_the_declarations():
    assert reference() in (DOCS / "settings.md").read_text()
    assert all(each.help for each in SETTINGS.values())


@pytest.mark.parametrize(
    ("value", "wrong", "parameter"),
    [
        (Shuffle, {"scope": "sideways"}, "shuffle"),
        (Shuffle, {"pool_rows": 0}, "pool_rows"),
        (Mixture, {"by": "bytes"}, "by"),
        (Batching, {"size": 0}, "batch_size"),
        (Batching, {"tokens": 1.5}, "batch_tokens"),
        (Batching, {"epoch_end": "never"}, "epoch_end"),
        (Delivery, {"workers": -1}, "workers"),
        (Fields, {"border_loss": 0}, "border_loss"),
        (Batching, {"uneven": "no"}, "uneven"),
        (Batching, {"pad_to": [64, 0]}, "pad_to"),
    ],
)
def test_a_wrong_setting_is_refused_where_it_is_written(value, wrong, parameter):
    with refused(bw.SpecError, parameter=parameter):
        value(**wrong)


def test_a_value_in_the_place_of_another_is_refused(small_store):
    with refused(bw.SpecError, "Shuffle", "Batching", parameter="shuffle"):
        bw.PretrainDataLoader(small_store, chunk_size=64, shuffle=Batching(4))
    with refused(bw.SpecError, "Fields", parameter="fields", remedy="Fields(position_ids="):
        bw.PretrainDataLoader(small_store, chunk_size=64, fields=True)


def test_numbers_and_truths_may_be_of_numpy(small_store):
    assert Fields(border_loss=np.False_) == Fields(border_loss=False)
    assert Batching(np.int64(8), pad=np.int64(1), pad_to=np.array([64, 32])) == Batching(8, pad=1, pad_to=[64, 32])


def test_the_short_form_means_the_value(small_store):
    short = bw.PretrainDataLoader(small_store, chunk_size=64, shuffle="pool", batch_size=4, weights={"web": 1})
    long = bw.PretrainDataLoader(
        small_store, chunk_size=64, shuffle=Shuffle("pool"), batch_size=Batching(4), weights=Mixture({"web": 1})
    )
    assert (short.plan, short.batch_size) == (long.plan, long.batch_size)


def test_a_mixture_means_the_same_in_every_loader(small_store):
    mixture = Mixture(temperature=2, by="tokens", max_epochs=3, num_rows=100, exhausted="renormalise")
    one = bw.PretrainDataLoader(small_store, chunk_size=64, weights=mixture)
    assert one.plan.fingerprint == bw.MixedDataLoader(small_store, mixture, chunk_size=64).plan.fingerprint


# Given is not "equal to the default"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("seed", {"seed": 0}),
        ("shuffle", {"shuffle": True}),
        ("epoch_end", {"batch_size": Batching(epoch_end="drop")}),
        ("recut", {"shuffle": Shuffle(recut=True)}),
        ("split", {"split": "train"}),
        ("chunk_size", {"chunk_size": 32}),
        ("weights", {"weights": {"web": 1.0}}),
        ("num_rows", {"weights": Mixture(num_rows=10)}),
    ],
)
def test_what_is_given_beside_a_plan_must_be_as_in_the_plan(small_store, name, given):
    plan = bw.PretrainDataLoader(
        small_store,
        chunk_size=64,
        seed=7,
        split="val",
        shuffle=Shuffle("none", recut=False),
        batch_size=Batching(epoch_end="pad"),
    ).plan
    assert bw.PretrainDataLoader(small_store, plan=plan).plan.fingerprint == plan.fingerprint
    with refused(bw.SpecError, plan.fingerprint, parameter=name):
        bw.PretrainDataLoader(small_store, plan=plan, **given)


@pytest.mark.parametrize("weights", [None, Mixture({"web": 0.5, "code": 0.5}, max_epochs=2)])
def test_a_plan_beside_its_own_settings_is_fine(small_store, weights):
    settings: dict[str, Any] = {"chunk_size": 64, "seed": 7, "shuffle": Shuffle("pool", pool_rows=64), "batch_size": 4}
    plan = bw.PretrainDataLoader(small_store, weights=weights, **settings).plan
    assert bw.PretrainDataLoader(small_store, plan=plan, weights=weights, **settings).plan == plan


def test_a_plan_of_a_nested_mixture_beside_its_own_weights_is_fine(small_store):
    sources = {"both": bw.PretrainDataLoader(small_store, chunk_size=64), "more": small_store}
    plan = bw.MixedDataLoader(sources, {"both": 0.3, "more": 0.7}).plan
    assert bw.MixedDataLoader(sources, {"both": 0.3, "more": 0.7}, plan=plan).plan.fingerprint == plan.fingerprint


# Raw files


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("packing", {"packing": "best_fit"}),
        ("lanes", {"shuffle": Shuffle("window", lanes=2)}),
        ("shuffle", {"shuffle": "pool"}),
        ("pad", {"batch_size": Batching(pad=0)}),
        ("pad_to", {"batch_size": Batching(pad_to=64)}),
        ("batch_tokens", {"batch_size": Batching(tokens=512)}),
        ("balance", {"batch_size": Batching(balance=True)}),
        ("epoch_end", {"batch_size": Batching(epoch_end="wrap")}),
        ("cu_seqlens", {"fields": Fields(cu_seqlens=True)}),
        ("rows", {"fields": Fields(rows=True)}),
        ("weights", {"weights": {"web": 1}}),
        ("num_tokens", {"weights": Mixture(num_tokens=100)}),
        ("split", {"split": "val"}),
        ("workers", {"delivery": Delivery(workers=2)}),
        ("plan", {"plan": "3f2a91c04be7d155"}),
    ],
)
def test_a_stream_refuses_what_needs_to_know_all_rows(raw, name, setting):
    with refused(bw.SpecError, "streaming", parameter=name):
        bw.PretrainDataLoader(raw / "web", "bytes", 64, streaming=True, **setting)


def test_a_subclass_streams_too(raw):
    class Mine(bw.PretrainDataLoader):
        pass

    mine = Mine(raw / "web", "bytes", 64, streaming=True)
    theirs = bw.PretrainDataLoader(raw / "web", "bytes", 64, streaming=True)
    assert type(mine) is Mine
    assert mine.plan.fingerprint == theirs.plan.fingerprint
    np.testing.assert_array_equal(mine.get_batch().input_ids, theirs.get_batch().input_ids)


def test_rollouts_can_be_subclassed():
    class Mine(bw.RolloutDataLoader):
        def get_batch(self, batch_size: int | None = None, **more: Any) -> bw.TrainingBatch:
            return super().get_batch(batch_size or 2, **more)

    assert len(Mine(ROLLOUTS, vocab_size=10, batch_size=4).get_batch().input_ids) == 2


def test_a_loader_takes_a_recipe_where_it_takes_a_path(raw):
    recipe = bw.DatasetRecipe(on_error="skip").add_ingredient(["one", "two", b"three"], name="words")
    loader = bw.PretrainDataLoader(recipe.prepare_step(bw.tokenize("bytes")), chunk_size=2, batch_size=1)
    assert loader.store.num_tokens == 6
    chat = bw.DatasetRecipe().add_ingredient(CHAT).prepare_step(bw.chat("bytes", "chatml")).holdout(0.2)
    val = bw.ConversationDataLoader(chat, max_length=128, split="val")
    assert val.plan.sources[0].num_rows < len(CHAT)
    with refused(bw.SpecError, parameter="tokenizer"):
        bw.ConversationDataLoader(chat, "bytes", 128)
    with refused(bw.SpecError, parameter="path"):
        bw.PretrainDataLoader(chat, chunk_size=64)


def test_unshuffled_raw_rows_come_in_the_order_of_the_file():
    """Predictions can be joined to their rows: by place, and by the row numbers in the metadata."""
    loader = bw.ConversationDataLoader(
        CHAT,
        "bytes",
        128,
        "chatml",
        loss="all",
        shuffle=False,
        batch_size=Batching(4, epoch_end="short"),
        fields=Fields(rows=True),
    )
    batches = list(loader)
    learned = np.concatenate([np.asarray(batch.attention_mask).sum(axis=1) for batch in batches])
    assert np.array_equal(np.diff(learned[:9]), np.ones(8))  # each answer is one letter longer
    assert [rows for batch in batches for rows in batch.metadata["rows"]] == [
        [("<memory>", n)] for n in range(len(CHAT))
    ]


def test_the_rows_of_a_window_are_those_that_trace_finds(small_store):
    loader = bw.PretrainDataLoader(small_store, chunk_size=64, batch_size=8, fields=Fields(rows=True))
    loader.seek(step=3)
    batch = loader.get_batch()
    traced: dict[int, list[tuple[str, int]]] = {}
    for record in bw.trace(small_store, loader, step=3):
        traced.setdefault(record.row_in_batch, []).append((record.file, record.row))
    assert batch.metadata["rows"] == [list(dict.fromkeys(traced[row])) for row in range(8)]


# Every loader


def test_every_loader_is_one(open_any):
    assert isinstance(open_any(), bw.DataLoader)


def test_a_loader_of_ones_own_has_four_methods():
    class Countdown(bw.DataLoader[int]):
        at = 3

        def get_batch(self, batch_size: int | None = None) -> int:
            self.at -= 1
            return self.at

        def get_iterator(self) -> Iterator[int]:
            return (self.get_batch() for _ in range(self.at))

        def get_num_batches(self, batch_size: int | None = None) -> int:
            return 3

        def reset(self, epoch: int = 0) -> None:
            self.at = 3

    assert list(Countdown()) == [2, 1, 0]
    with pytest.raises(TypeError, match="abstract"):
        bw.DataLoader()  # type: ignore[abstract]


@pytest.mark.parametrize("rows", [None, 1, 3, 4])
def test_as_many_batches_as_it_says(open_any, rows):
    loader = open_any(batch_size=4)
    if loader.stream.why_uncounted():
        list(loader)
        loader.reset()
    expected, steps = loader.get_num_batches(batch_size=rows), 0
    with refused(bw.EndOfRun):
        while loader.get_batch(batch_size=rows):
            steps += 1
    assert steps == expected > 0


def test_reset_goes_to_the_first_row_of_an_epoch(open_any):
    loader = open_any(batch_size=4, epochs=2)
    first, second = ([facts(batch) for batch in loader] for _ in range(2))
    loader.reset(epoch=1)
    assert loader.epoch == 1
    assert [facts(batch) for batch in loader] == second
    loader.reset()
    assert (loader.position, loader.step) == (0, 0)
    assert [facts(batch) for batch in loader] == first
    with refused(bw.PlanError, parameter="epoch"):
        loader.reset(epoch=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_validation_split_is_read_from_its_first_row_on_every_pass(small_store, workers):
    loader = bw.PretrainDataLoader(small_store, chunk_size=64, split="val", batch_size=2, framework="numpy")
    whole = [facts(batch) for batch in loader]
    passes: Any = loader.torch().loader(num_workers=workers, persistent_workers=bool(workers))
    assert [facts(batch) for batch in itertools.islice(passes, 2)] == whole[:2]  # left early
    for _ in range(2):
        assert [facts(batch) for batch in passes] == whole


def test_a_validation_pass_that_was_saved_is_finished_first(small_store):
    loader = bw.PretrainDataLoader(small_store, chunk_size=64, split="val", batch_size=2)
    whole = [facts(batch) for batch in loader]
    loader.reset()
    loader.get_batch()
    again = bw.PretrainDataLoader(small_store, chunk_size=64, split="val", batch_size=2)
    again.load_state_dict(loader.state_dict())
    assert [facts(batch) for batch in again] == whole[1:]
    assert [facts(batch) for batch in again] == whole


# Budgets and balance


@pytest.mark.parametrize("size", [Batching(tokens=1024, multiple=2, balance=True), Batching(8, balance=(1, 0.01))])
def test_mixtures_take_budgets_and_balance(chat_store, size):
    chat = bw.ConversationDataLoader(chat_store, max_length=256, delivery=Delivery(check=False))
    opened = [
        bw.MixedDataLoader({"chat": chat}, batch_size=size, rank=rank, world_size=2, framework="numpy")
        for rank in (0, 1)
    ]
    rows: list[int] = []
    for shares in zip(*opened, strict=True):
        rows += [position for share in shares for position in facts(share)]
        widths = {share.input_ids.shape[1] for share in shares}
        assert len(widths) == 1
        if size.tokens:
            assert sum(share.input_ids.size for share in shares) <= 1024
        assert shares[0].metadata["imbalance"] == shares[1].metadata["imbalance"]
    assert len(set(rows)) >= opened[0].plan.epoch_rows - 8


@pytest.mark.parametrize("fields", [Fields(cu_seqlens=True), Fields(roles=True)])
def test_fields_that_windows_do_not_have_are_refused(small_store, fields):
    with refused(bw.SpecError, parameter=next(iter(fields.given()))):
        bw.PretrainDataLoader(small_store, chunk_size=64, fields=fields)


@pytest.mark.parametrize("wrong", [None, 3, ["gae"], np.True_])
def test_advantages_that_are_none_are_refused(wrong):
    with refused(bw.SpecError, parameter="compute_advantages"):
        bw.RolloutDataLoader(ROLLOUTS, None, wrong, vocab_size=10)


def test_windows_in_a_mixture_have_no_lengths(small_store):
    with refused(bw.SpecError, parameter="batch_tokens"):
        bw.MixedDataLoader({"a": small_store}, chunk_size=64, batch_size=Batching(tokens=4096))


def test_a_balancing_of_ones_own(chat_store):
    asked: list[tuple[int, int, bool]] = []

    @bw.register_balancing("largest_first")
    def largest_first(costs, world_size, equal_counts):
        asked.append((len(costs), world_size, equal_counts))
        order = np.argsort(-costs, kind="stable")
        return [order[rank::world_size] for rank in range(world_size)]

    ranks = [
        bw.ConversationDataLoader(
            chat_store,
            max_length=256,
            batch_size=Batching(8, balance="largest_first", pad_to="max_length"),
            rank=rank,
            world_size=2,
        )
        for rank in (0, 1)
    ]
    lengths = [np.asarray(ranks[rank].get_batch().attention_mask).sum(axis=1) for rank in (0, 1)]
    ordered = np.sort(np.concatenate(lengths))[::-1]
    assert [sorted(part) for part in lengths] == [sorted(ordered[rank::2]) for rank in (0, 1)]
    assert set(asked) == {(8, 2, True)}
    with refused(bw.SpecError, "largest_first", parameter="balance"):
        bw.ConversationDataLoader(chat_store, max_length=256, batch_size=Batching(balance="largest_frist"))


@pytest.mark.parametrize(
    "divide",
    [lambda *_: [[0], [0]], lambda *_: [[0, 1, 2, 3]], lambda *_: [[0, 1, 2], [3]]],
    ids=["twice", "one", "odd"],
)
def test_a_balancing_that_loses_rows_is_refused(chat_store, divide):
    bw.register_balancing("broken")(divide)
    loader = bw.ConversationDataLoader(
        chat_store, max_length=256, batch_size=Batching(4, balance="broken"), rank=0, world_size=2
    )
    with refused(bw.SpecError, "broken", parameter="balance"):
        loader.get_batch()


def test_a_balancing_may_give_the_larger_part_to_any_rank():
    """Of the last, short batch ranks get 3 and 2 rows, or 2 and 3: which of them gets more is decided afterwards."""

    @bw.register_balancing("first")
    def first(costs, world_size, equal_counts):
        return [range(0, len(costs), 2), range(1, len(costs), 2)]

    def read(rank: int) -> list[list[int]]:
        size = Batching(4, balance="first")
        loader = bw.RolloutDataLoader(ROLLOUTS[:9], vocab_size=10, batch_size=size, rank=rank, world_size=2)
        return [[int(p) for p, w in zip(facts(b), b.metadata["weight"], strict=True) if w] for b in loader]

    ranks = [read(rank) for rank in (0, 1)]
    assert [len(batch) for batch in ranks[0]][:2] == [2, 2]
    assert sorted(position for batches in ranks for batch in batches for position in batch) == [*range(9)]


def test_a_registered_balancing_is_as_good_as_ours_where_it_is_ours(chat_store):
    @bw.register_balancing("ours")
    def ours(costs, world_size, equal_counts):
        balanced = balance(costs, world_size, equal_counts=equal_counts)
        return [balanced.rows(rank) for rank in range(world_size)]

    def read(how: Any) -> list[list[int]]:
        size = Batching(8, balance=how)
        loader = bw.ConversationDataLoader(chat_store, max_length=256, batch_size=size, rank=0, world_size=2)
        return [facts(batch) for batch in loader]

    assert read("ours") == read(True)
