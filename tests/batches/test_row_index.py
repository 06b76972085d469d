"""Rows of whole documents: nothing lost, nothing twice, and what is left out is counted."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.base.errors import SpecError
from batchwright.batches.row_index import RowSpec, SpanWeights, plan_rows
from refusals import refused

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


def borders_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def tokens_of(index):
    """The tokens of the stream that rows have as inputs, row by row."""
    pieces = [range(start, start + length) for start, length in zip(index.start, index.length, strict=True)]
    return [[token for piece in pieces[a:b] for token in piece] for a, b in pairwise(index.row_starts)]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 16), st.sampled_from(["best_fit", "first_fit", "greedy", None]))
def test_cut_documents_give_every_token_once_and_no_row_is_too_long(lengths, capacity, packing):
    index = plan_rows(borders_of(lengths), RowSpec(capacity, packing, "split"))
    rows = tokens_of(index)
    assert sorted(token for row in rows for token in row) == list(range(sum(lengths)))
    assert all(0 < len(row) <= capacity for row in rows)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 16), st.sampled_from(["best_fit", "first_fit", "greedy"]))
def test_dropping_keeps_every_other_document_whole(lengths, capacity, packing):
    borders = borders_of(lengths)
    index = plan_rows(borders, RowSpec(capacity, packing, "drop"))
    kept = [n for n, length in enumerate(lengths) if 0 < length <= capacity]
    assert sorted(index.document.tolist()) == kept
    assert index.start.tolist() == borders[index.document].tolist()
    assert index.length.tolist() == [lengths[n] for n in index.document]
    over = sum(length > capacity for length in lengths)
    assert index.counts.get("over length", 0) == over
    assert index.counts.get("no tokens", 0) == lengths.count(0)


def test_a_document_is_cut_only_where_it_is_longer_than_a_row():
    # 3 + 1 fit into one row of 4; 8 is two rows, of which the first goes on.
    index = plan_rows(np.array([0, 3, 4, 12]), RowSpec(4, "best_fit", "split"))
    assert tokens_of(index) == [[4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3]]
    assert index.goes_on.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("truncation", "tokens", "counts"),
    [
        ("drop", [[0, 1]], {"documents": 2, "over length": 1}),
        ("keep_start", [[0, 1], [2, 3, 4]], {"documents": 2, "cut": 1}),
        ("keep_end", [[0, 1], [4, 5, 6]], {"documents": 2, "cut": 1}),
    ],
)
def test_what_becomes_of_a_document_that_is_too_long(truncation, tokens, counts):
    index = plan_rows(np.array([0, 2, 7]), RowSpec(3, None, truncation))
    assert tokens_of(index) == tokens
    assert index.counts == counts
    assert not index.goes_on.any()  # what was cut off is not even a label


def test_raise_names_the_first_document_that_is_too_long():
    with refused(SpecError, "max_length=3", document=1, parameter="max_length", source="chat", remedy="max_length=5"):
        plan_rows(np.array([0, 2, 7]), RowSpec(3, None, "raise"), source="chat")


def trained(spans):
    """spans[d] is [(stop, weight), ...] of document d."""
    flat = [span for document in spans for span in document]
    starts = borders_of([len(document) for document in spans])
    return SpanWeights(starts, np.array([s for s, _ in flat], np.int32), np.array([w for _, w in flat], np.float32))


def test_a_sample_that_teaches_nothing_is_in_no_row():
    # The first has trained tokens 2 and 3; the second none; the third only its first token, which nothing predicts.
    masks = trained([[(2, 0), (4, 1)], [(4, 0)], [(1, 1), (4, 0)]])
    index = plan_rows(np.array([0, 4, 8, 12]), RowSpec(4, None, "drop", "assistant"), trained=masks)
    assert index.document.tolist() == [0]
    assert index.counts == {"documents": 3, "empty mask": 2}


def test_a_cut_that_leaves_nothing_to_learn_is_seen():
    masks = trained([[(6, 0), (8, 1)]])
    spec = RowSpec(4, None, "keep_start", "assistant")
    assert plan_rows(np.array([0, 8]), spec, trained=masks).counts["empty mask"] == 1
    spec = RowSpec(4, None, "keep_end", "assistant")
    assert "empty mask" not in plan_rows(np.array([0, 8]), spec, trained=masks).counts


def test_both_sides_of_a_pair_are_kept_or_none():
    borders, sides = np.array([0, 5, 12, 16]), np.array([2, 1, 2])  # 2 + 3, 1 + 6, 2 + 2 tokens
    index = plan_rows(borders, RowSpec(4, None, "drop", pairs=True), sides=sides)
    assert index.row_starts.tolist() == [0, 2, 4]
    assert index.start.tolist() == [0, 2, 12, 14]
    assert index.length.tolist() == [2, 3, 2, 2]
    assert index.counts == {"documents": 3, "over length": 1}


def test_pairs_are_not_packed():
    with refused(SpecError, parameter="packing"):
        plan_rows(np.array([0, 4]), RowSpec(4, "best_fit", "drop", pairs=True), sides=np.array([2]))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_spans_expand_to_their_tokens(data):
    documents = data.draw(
        st.lists(
            st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=5), min_size=1, max_size=6
        )
    )
    spans, plain = [], []
    for document in documents:
        stops = np.cumsum([count for count, _ in document]).tolist()
        spans.append([(stop, value) for stop, (_, value) in zip(stops, document, strict=True)])
        plain.append([value for count, value in document for _ in range(count)])
    which = data.draw(st.lists(st.integers(0, len(documents) - 1), min_size=1, max_size=8))
    begin = [data.draw(st.integers(0, len(plain[d]))) for d in which]
    end = [data.draw(st.integers(b, len(plain[d]))) for b, d in zip(begin, which, strict=True)]
    masks = trained(spans)
    asked = np.array(which), np.array(begin), np.array(end)
    expected = [plain[d][b:e] for d, b, e in zip(which, begin, end, strict=True)]
    assert masks.expand(masks.weight, *asked).tolist() == [value for part in expected for value in part]
    assert masks.count(*asked).tolist() == [sum(value > 0 for value in part) for part in expected]
