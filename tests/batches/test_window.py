"""Windows: documents end to end, cut every row_tokens, one token more for the last label; a ring in later epochs."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.base.errors import SpecError
from batchwright.batches.gather import windows_at
from batchwright.batches.window import JointWindows, WindowRows
from refusals import refused


class ListStream:
    """Documents of the given lengths in one array: token i of the stream is the number i."""

    split, fingerprint, dtype = "train", "list", np.dtype(np.uint32)

    def __init__(self, lengths, name="web"):
        self.name = name
        self.stops = np.cumsum(lengths)
        self.num_tokens, self.num_documents = int(self.stops[-1]), len(lengths)
        self.tokens = np.arange(self.num_tokens, dtype=np.uint32)

    def addresses(self, starts, length):
        return self.tokens.ctypes.data + starts * 4, starts + length <= self.num_tokens, [self.tokens]

    def read(self, start, stop, out=None):
        assert 0 <= start < stop <= self.num_tokens
        out = np.empty(stop - start, np.uint32) if out is None else out
        out[:] = self.tokens[start:stop]
        return out

    def borders(self, start, stop):
        begins = np.concatenate([[0], self.stops[:-1]])
        return begins[(begins >= start) & (begins < stop)]

    def documents_in(self, start, stop):
        begins = np.concatenate([[0], self.stops[:-1]])
        return [
            (d, int(b), int(e))
            for d, (b, e) in enumerate(zip(begins, self.stops, strict=True))
            if b < stop and e > start and e > b
        ]


lengths_of_documents = st.lists(st.integers(1, 30), min_size=1, max_size=12)
streams = lengths_of_documents.filter(lambda lengths: sum(lengths) > 13).map(ListStream)
row_lengths = st.integers(1, 12)


def all_rows(rows: WindowRows, epoch: int) -> np.ndarray:
    out = np.empty((rows.num_rows, rows.row_tokens + 1), np.int64)
    rows.gather(np.arange(rows.num_rows), np.full(rows.num_rows, epoch), out)
    return out


def test_the_first_epoch_is_cut_at_0_and_neighbours_share_one_token():
    rows = WindowRows(ListStream([5, 6]), 3, seed=0)
    assert all_rows(rows, epoch=0).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


@given(streams, row_lengths, st.integers(0, 5), st.booleans())
def test_every_epoch_predicts_different_tokens_in_each_row(stream, row_tokens, epoch, recut):
    rows = WindowRows(stream, row_tokens, seed=1, recut=recut)
    labels = all_rows(rows, epoch)[:, 1:].ravel()
    assert rows.num_rows == (stream.num_tokens - 1) // row_tokens
    assert len(set(labels.tolist())) == rows.num_rows * row_tokens  # no token is learned twice in an epoch


@given(streams, row_lengths, st.integers(0, 5), st.booleans())
def test_a_row_is_consecutive_tokens_of_the_ring(stream, row_tokens, epoch, recut):
    rows = WindowRows(stream, row_tokens, seed=1, recut=recut)
    tokens = all_rows(rows, epoch)
    assert ((tokens[:, 1:] - tokens[:, :-1]) % stream.num_tokens == 1 % stream.num_tokens).all()
    assert tokens[0, 0] == rows.offset(epoch)


def test_later_epochs_cut_elsewhere_and_one_row_runs_over_the_end():
    rows = WindowRows(ListStream([11]), 5, seed=0)
    (epoch,) = [e for e in range(1, 20) if rows.offset(e) == 3][:1]
    assert all_rows(rows, epoch).tolist() == [[3, 4, 5, 6, 7, 8], [8, 9, 10, 0, 1, 2]]


def test_offsets_of_later_epochs_take_every_value():
    rows = WindowRows(ListStream([100]), 5, seed=0)
    assert {rows.offset(epoch) for epoch in range(1, 60)} == {0, 1, 2, 3, 4}


def test_recut_false_cuts_every_epoch_alike():
    rows = WindowRows(ListStream([40]), 5, seed=0, recut=False)
    assert np.array_equal(all_rows(rows, 3), all_rows(rows, 0))


def test_rows_of_different_epochs_can_be_asked_together():
    rows = WindowRows(ListStream([60]), 7, seed=2)
    index, epoch = np.array([0, 3, 3, 7]), np.array([0, 2, 1, 5])
    out = np.empty((4, 8), np.int64)
    rows.gather(index, epoch, out)
    assert out.tolist() == [all_rows(rows, int(e))[i].tolist() for i, e in zip(index, epoch, strict=True)]


@given(streams, row_lengths, st.integers(0, 3))
def test_borders_are_where_documents_begin_inside_the_window(stream, row_tokens, epoch):
    rows = WindowRows(stream, row_tokens, seed=1)
    begins = {0, *stream.stops[:-1].tolist()}
    for tokens in all_rows(rows, epoch):
        expected = [i for i, token in enumerate(tokens.tolist()) if i and token in begins]
        assert sorted(rows.borders(int(tokens[0])).tolist()) == expected


@given(streams, row_lengths, st.integers(0, 3))
def test_pieces_tile_the_window(stream, row_tokens, epoch):
    rows = WindowRows(stream, row_tokens, seed=1)
    for tokens in all_rows(rows, epoch):
        read = [token for _, start, stop in rows.pieces(int(tokens[0])) for token in range(start, stop)]
        assert read == tokens.tolist()


@given(streams, row_lengths, st.integers(0, 3), st.data())
def test_rows_touching_are_those_that_a_scan_finds(stream, row_tokens, epoch, data):
    rows = WindowRows(stream, row_tokens, seed=1)
    start = data.draw(st.integers(0, stream.num_tokens - 1))
    stop = data.draw(st.integers(start + 1, stream.num_tokens))
    wanted = set(range(start, stop))
    scanned = [i for i, tokens in enumerate(all_rows(rows, epoch).tolist()) if wanted & set(tokens)]
    assert rows.rows_touching(start, stop, epoch) == scanned


def test_a_row_longer_than_the_source_is_refused_with_the_longest_that_fits():
    with refused(SpecError, "chunk_size=20", "21", parameter="chunk_size", source="web", remedy="chunk_size=11"):
        WindowRows(ListStream([5, 7]), 20, seed=0)
    assert WindowRows(ListStream([5, 7]), 11, seed=0).num_rows == 1


def test_offsets_are_pinned():
    # Never change these: they decide what tokens the rows of every later epoch are made of, so jobs in their second
    # epoch depend on them.
    rows = WindowRows(ListStream([10_000]), 2048, seed=7)
    assert [rows.offset(epoch) for epoch in range(6)] == [0, 2028, 861, 124, 1320, 1357]
    other = WindowRows(ListStream([10_000], name="code"), 256, seed=0)
    assert [other.offset(epoch) for epoch in range(6)] == [0, 84, 86, 203, 61, 253]


class Shard:
    """Some tokens, mapped: in an array of their own."""

    def __init__(self, tokens):
        self.tokens = tokens.copy()
        self.address = self.tokens.ctypes.data


class ShardedList(ListStream):
    """The same tokens in shards of the given lengths, and `mapped`: the shards that were asked for."""

    def __init__(self, lengths, name):
        super().__init__(lengths, name)
        self.tokens += 10_000 * (1 + int(name))  # every token of every stream is another
        self.token_starts = np.concatenate([[0], self.stops])
        self.mapped = {}

    def shard(self, shard):
        if shard not in self.mapped:
            self.mapped[shard] = Shard(self.tokens[self.token_starts[shard] : self.token_starts[shard + 1]])
        return self.mapped[shard]


class GrownRows(WindowRows):
    """Rows of a stream that had only its first 40 tokens in the epochs before the third."""

    def ring(self, epoch):
        return self.offset(epoch), self.num_tokens if epoch >= 2 else 40


def joint_of(*lengths, rows=WindowRows):
    return JointWindows([rows(ShardedList(each, str(n)), 5, seed=3) for n, each in enumerate(lengths)])


def all_places(joint, num_epochs):
    """(source, index, epoch) of every row of some epochs, shuffled."""
    places = [(s, i, e) for s, r in enumerate(joint.rows) for e in range(num_epochs) for i in range(r.num_rows)]
    source, index, epoch = np.random.default_rng(0).permutation(np.array(places)).T
    return source.astype(np.int32), index, epoch


@pytest.mark.parametrize("lengths", [([100], [37], [61]), ([30, 12, 7, 51], [37], [20, 41])], ids=["whole", "sharded"])
@pytest.mark.parametrize("num_epochs", [1, 3, 11])
def test_rows_of_several_sources_are_found_together_as_they_are_apart(lengths, num_epochs):
    joint = joint_of(*lengths)
    source, index, epoch = all_places(joint, num_epochs)
    for some in (slice(0, 7), slice(None), slice(3, 40)):
        address, whole, start = joint.find(source[some], index[some], epoch[some])
        assert whole.any()
        windows, at = windows_at(address[whole], 6, np.dtype(np.uint32))
        found = windows[at]
        expected = np.empty((len(address), 6), np.int64)
        for row, (s, i, e) in enumerate(zip(source[some], index[some], epoch[some], strict=True)):
            joint.rows[s].gather(np.array([i]), np.array([e]), expected[row : row + 1])
            assert start[row] == joint.rows[s].starts(np.array([i]), np.array([e]))[0]
        assert found.tolist() == expected[whole].tolist()


def test_a_row_over_the_border_of_a_shard_or_the_end_of_the_stream_is_not_whole():
    joint = joint_of([12, 9], [11])
    source, index = np.array([0, 0, 0, 1, 1], np.int32), np.array([0, 1, 2, 0, 1])
    _, whole, start = joint.find(source, index, np.zeros(5, np.int64))
    assert start.tolist() == [0, 5, 10, 0, 5]
    assert whole.tolist() == [True, True, False, True, True]  # of [10, 16) two tokens are in the first shard
    offset = joint.rows[1].offset(1)
    assert offset
    _, whole, _ = joint.find(np.array([1], np.int32), np.array([1]), np.array([1]))
    assert not whole[0]  # [5 + offset, 11 + offset) of 11 tokens


def test_a_row_over_the_end_that_the_stream_had_in_its_epoch_is_not_whole():
    joint = joint_of([100], [100], rows=GrownRows)
    row = np.array([0], np.int32), np.array([7])
    assert joint.find(*row, np.array([0]))[1].tolist() == [False]  # [35, 41) of 40 tokens
    assert joint.find(*row, np.array([2]))[1].tolist() == [True]


def test_shards_are_mapped_when_rows_of_them_are_found():
    joint = joint_of([30, 30], [30, 30], [30])
    joint.find(np.array([1], np.int32), np.array([7]), np.array([0]))
    assert [list(rows.stream.mapped) for rows in joint.rows] == [[], [1], []]


def test_what_finds_rows_together_goes_to_other_processes():
    joint = joint_of([30, 30], [37])
    places = all_places(joint, 2)
    _, whole, start = joint.find(*places)
    copy = pickle.loads(pickle.dumps(joint))
    assert all(not rows.stream.mapped for rows in pickle.loads(pickle.dumps(joint_of([30], [30]))).rows)
    _, again, also = copy.find(*places)
    assert (whole.tolist(), start.tolist()) == (again.tolist(), also.tolist())


def test_rows_of_another_length_or_in_very_many_shards_are_not_found_together(monkeypatch):
    rows = joint_of([30, 30], [37]).rows
    assert JointWindows.can(rows)
    assert not JointWindows.can([*rows, WindowRows(ShardedList([100], "9"), 6, seed=0)])
    monkeypatch.setattr(JointWindows, "MOST_SHARDS", 2)
    assert not JointWindows.can(rows)
