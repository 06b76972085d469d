"""Steps and ranks are arithmetic on positions: where a batch starts, who gets which rows, where an epoch ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchwright.base.errors import PlanError, SpecError
from batchwright.order.epochs import Epochs
from batchwright.order.split import EPOCH_ENDS, Cut, position_of_step, share, step_of_position
from refusals import refused

ENDS = list(EPOCH_ENDS)


@st.composite
def cuts(draw):
    rows = draw(st.integers(1, 12))
    epoch_rows = draw(st.one_of(st.none(), st.integers(rows, 60)))
    return Cut(rows_per_step=rows, epochs=Epochs.of(epoch_rows), epoch_end=draw(st.sampled_from(ENDS)))


def walk(cut: Cut, position: int, num_steps: int) -> list[int]:
    """Where each step starts, one at a time, by the words of the contract."""
    starts = []
    for _ in range(num_steps):
        if cut.epochs.last_rows is not None:
            left = cut.epochs.last_rows - position % cut.epochs.last_rows
            if cut.epoch_end == "drop" and left < cut.rows_per_step:
                position += left
                left = cut.epochs.last_rows
        starts.append(position)
        if cut.epochs.last_rows is not None and cut.epoch_end in ("short", "pad"):
            position += min(cut.rows_per_step, left)
        else:
            position += cut.rows_per_step
    return starts


@given(n=st.integers(0, 500), world=st.integers(1, 70))
def test_ranks_partition_a_batch(n, world):
    shares = [share(n, rank=rank, world=world) for rank in range(world)]
    assert [row for rows in shares for row in rows] == list(range(n))
    lengths = {len(rows) for rows in shares}
    assert max(lengths) - min(lengths) <= 1
    if n % world == 0:
        assert len(lengths) == 1


@given(cuts(), st.integers(0, 200), st.integers(0, 60))
def test_after_is_what_a_walk_reaches(cut, position, num_steps):
    starts = walk(cut, position, num_steps + 1)
    assert cut.settle(cut.after(position, num_steps)) == starts[num_steps]


@given(cuts(), st.integers(0, 200), st.integers(0, 40), st.integers(0, 40))
def test_steps_add_up(cut, position, one, two):
    assert cut.settle(cut.after(cut.after(position, one), two)) == cut.settle(cut.after(position, one + two))


@given(cuts(), st.integers(0, 200), st.integers(0, 60))
def test_steps_until_counts_the_steps_back(cut, position, num_steps):
    later = cut.settle(cut.after(position, num_steps))
    assert cut.steps_until(position, later) == num_steps


@given(cuts(), st.integers(0, 100))
def test_a_batch_never_crosses_an_epoch_unless_it_wraps(cut, position):
    for start in walk(cut, position, 30):
        real = cut.real_rows(start)
        assert 1 <= real <= cut.rows_per_step
        if not cut.is_linear:
            assert start // cut.epochs.last_rows == (start + real - 1) // cut.epochs.last_rows
        if cut.epoch_end not in ("short", "pad"):
            assert real == cut.rows_per_step


@given(st.integers(1, 12), st.integers(1, 60), st.sampled_from(["drop", "short", "pad"]))
def test_an_epoch_has_as_many_steps_as_a_walk_counts(rows, epoch_rows, epoch_end):
    if epoch_end == "drop":
        epoch_rows = max(rows, epoch_rows)
    cut = Cut(rows_per_step=rows, epochs=Epochs.of(epoch_rows), epoch_end=epoch_end)
    starts = walk(cut, 0, 200)
    for epoch in range(3):
        assert sum(start // epoch_rows == epoch for start in starts) == cut.steps_of_epoch(0)


@st.composite
def runs(draw):
    """A run that changed its batch size several times: its record of steps, and where each of its steps started."""
    end = draw(st.sampled_from(ENDS))
    epoch_rows = draw(st.one_of(st.none(), st.integers(12, 60)))
    record, starts, position = [], [], 0
    for _ in range(draw(st.integers(1, 4))):
        rows, num_steps = draw(st.integers(1, 12)), draw(st.integers(1, 20))
        cut = Cut(rows_per_step=rows, epochs=Epochs.of(epoch_rows), epoch_end=end)
        record.append([len(starts), position, rows])
        starts += walk(cut, position, num_steps)
        position = cut.settle(cut.after(position, num_steps))
    return record, starts, {"epochs": Epochs.of(epoch_rows), "epoch_end": end}


@given(runs())
def test_a_step_is_found_in_a_run_that_changed_its_batch_size(run):
    record, starts, spec = run
    assert [position_of_step(record, step, **spec)[0] for step in range(len(starts))] == starts


@given(runs())
def test_a_position_is_found_in_a_run_that_changed_its_batch_size(run):
    record, starts, spec = run
    assert [step_of_position(record, start, **spec) for start in starts] == list(range(len(starts)))


@given(runs())
def test_every_row_of_a_step_belongs_to_it(run):
    record, starts, spec = run
    for step in range(len(starts) - 1):
        start, rows = position_of_step(record, step, **spec)
        real = Cut(rows_per_step=rows, **spec).real_rows(start)
        stop = min(start + real, starts[step + 1])
        assert {step_of_position(record, p, **spec) for p in range(start, stop)} == {step}


def test_a_step_before_the_first_is_refused():
    with refused(PlanError, step=-1):
        position_of_step([[0, 0, 8]], -1, epochs=Epochs.of(None), epoch_end="drop")


def test_a_batch_larger_than_an_epoch_is_refused_with_what_to_write():
    with refused(SpecError, "batch_size=9", "5 rows", parameter="batch_size", remedy="batch_size=5"):
        Cut(rows_per_step=9, epochs=Epochs.of(5), epoch_end="drop")
    assert Cut(rows_per_step=9, epochs=Epochs.of(5), epoch_end="short").steps_of_epoch(0) == 1
    assert Cut(rows_per_step=9, epochs=Epochs.of(5), epoch_end="pad").steps_of_epoch(0) == 1


def test_an_unknown_epoch_end_is_refused_with_the_nearest():
    with refused(SpecError, "epoch_end='warp'", parameter="epoch_end", remedy="wrap"):
        Cut(rows_per_step=1, epochs=Epochs.of(5), epoch_end="warp")


def test_where_steps_start_is_pinned():
    # Never change these: a state's record of steps is read with this arithmetic.
    spec = {"epochs": Epochs.of(10)}
    assert [Cut(rows_per_step=4, epoch_end="drop", **spec).after(0, s) for s in range(5)] == [0, 4, 10, 14, 20]
    assert [Cut(rows_per_step=4, epoch_end="short", **spec).after(0, s) for s in range(5)] == [0, 4, 8, 10, 14]
    assert [Cut(rows_per_step=4, epoch_end="pad", **spec).after(0, s) for s in range(5)] == [0, 4, 8, 10, 14]
    assert [Cut(rows_per_step=4, epoch_end="wrap", **spec).after(0, s) for s in range(5)] == [0, 4, 8, 12, 16]
