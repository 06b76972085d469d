"""Each promise of docs/buffer.md that is not about types, choices or files: those have tests of their own."""

from __future__ import annotations

import io
import logging
import pickle
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.buffer import blocks
from refusals import refused

torch = pytest.importorskip("torch")


def texts_in(buffer: Any) -> list[str]:
    return buffer.to_pydict()["text"]


# The samples that the buffer was asked for with: only the import differs


def test_the_quick_start():
    buffer = bw.DatasetBuffer(max_size=100, drop_strategy="oldest")
    buffer.append([{"label": 0, "meta": "first"}, {"label": 1, "meta": "second"}])
    buffer.append({"label": 1, "meta": "third"}, retain_prior=0.5, retain_prior_by="latest")

    assert len(buffer) == 2
    assert buffer[0] == {"label": 1, "meta": "second"}
    batch = buffer.get_batch([0, len(buffer) - 1])
    assert isinstance(batch, pa.Table)
    assert batch.to_pydict() == {"label": [1, 1], "meta": ["second", "third"]}
    torch_batch = buffer.to_torch()
    assert torch_batch["label"].tolist() == [1, 1]
    assert torch_batch["meta"] == ["second", "third"]


def test_a_normalizer_of_ones_own():
    class MySample:
        def __init__(self, text: str, score: float) -> None:
            self.text, self.score, self.secret = text, score, object()

    @bw.register_normalizer(MySample)
    def normalize_sample(sample: MySample) -> dict[str, Any]:
        return {"text": sample.text, "score": sample.score}

    buffer = bw.DatasetBuffer([MySample("a good one", 0.9)])
    assert buffer.append(MySample("a bad one", 0.1)) == range(1, 2)
    assert buffer.to_pydict() == {"text": ["a good one", "a bad one"], "score": [0.9, 0.1]}


def test_a_hugging_face_dataset_goes_in_and_comes_out():
    datasets = pytest.importorskip("datasets")
    buffer = bw.DatasetBuffer()
    hf_dataset = datasets.Dataset.from_dict({"col1": [1, 2], "col2": ["a", "b"]})
    buffer.append(hf_dataset)

    hf_converted = buffer.to_hf_dataset()
    assert isinstance(hf_converted, datasets.Dataset)
    assert hf_converted[:] == {"col1": [1, 2], "col2": ["a", "b"]}
    assert bw.DatasetBuffer.from_hf_dataset(hf_dataset).content_fingerprint() == buffer.content_fingerprint()


def test_arrays_survive_the_way_through_a_hugging_face_dataset():
    pytest.importorskip("datasets")
    buffer = bw.DatasetBuffer({"obs": np.arange(6, dtype=np.float32).reshape(2, 3), "label": np.arange(2)})
    again = bw.DatasetBuffer.from_hf_dataset(buffer.to_hf_dataset())
    assert np.asarray(again[1]["obs"]).tolist() == [3, 4, 5]
    assert again[1]["label"] == 1


def test_a_negative_share_keeps_no_row_and_max_size_drops_at_random():
    buffer = bw.DatasetBuffer([{"n": n} for n in range(5)])
    buffer.append({"n": 9}, retain_prior=-1)
    assert buffer.to_pydict() == {"n": [9]}
    small = bw.DatasetBuffer([{"n": n} for n in range(50)], max_size=10, drop_strategy="random", seed=1)
    assert len(small) == 10
    assert small.to_pydict()["n"] != list(range(40, 50))


def test_the_samples_that_normalize_themselves():
    image = pytest.importorskip("PIL.Image")
    tensors = bw.DatasetBuffer(torch.arange(3.0))
    assert tensors[0]["tensor"].tolist() == [0, 1, 2]
    picture = image.new("RGB", (2, 1), (255, 0, 0))
    pictures = bw.DatasetBuffer(picture)
    stored = image.open(io.BytesIO(pictures.to_pydict()["image"][0]))
    assert (stored.format, stored.mode, stored.getpixel((1, 0))) == ("PNG", "RGB", (255, 0, 0))

    @dataclass
    class Sample:
        text: str
        label: int

    assert bw.DatasetBuffer([Sample("a", 1)])[0] == {"text": "a", "label": 1}


# Rows in


def test_append_and_extend_give_the_ids_of_the_new_rows():
    buffer = bw.DatasetBuffer()
    assert buffer.append({"n": 0}) == range(1)
    assert buffer.append([{"n": 1}, {"n": 2}]) == range(1, 3)
    assert buffer.extend({"n": [3, 4]}, retain_prior=0) == range(3, 5)
    assert buffer.append([]) == range(5, 5)
    assert buffer.ids.tolist() == [3, 4]


def test_ids_are_never_used_again(eight):
    eight.commit("all")
    eight.drop([6, 7])
    assert list(eight.append({"text": "new", "loss": 0.0})) == [8]
    eight.rollback("all")
    assert list(eight.append({"text": "newer", "loss": 0.0})) == [9]
    assert eight.ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    copy = pickle.loads(pickle.dumps(eight))
    assert list(copy.append({"text": "newest", "loss": 0.0})) == [10]


@pytest.mark.parametrize(
    "columns",
    [
        {"n": np.arange(4), "text": ["a", "b", "c", "d"]},
        pa.table({"n": [0, 1, 2, 3], "text": ["a", "b", "c", "d"]}),
    ],
    ids=["dict", "table"],
)
def test_extend_takes_columns(columns):
    buffer = bw.DatasetBuffer()
    assert buffer.extend(columns) == range(4)
    assert buffer[2] == {"n": 2, "text": "c"}
    assert bw.DatasetBuffer.from_table(pa.table({"n": [1]}), max_size=3).max_size == 3


def test_extend_takes_a_tensor_of_rows_and_append_one_row():
    rows = bw.DatasetBuffer()
    rows.extend(torch.arange(6).reshape(3, 2))
    assert len(rows) == 3
    one = bw.DatasetBuffer()
    one.append(torch.arange(2))
    assert one[0]["tensor"].tolist() == rows[0]["tensor"].tolist() == [0, 1]


def test_the_first_tensor_that_may_be_many_rows_is_logged_with_a_word_about_extend(caplog, monkeypatch):
    monkeypatch.setattr("batchwright.buffer.normalize._logged", set())
    with caplog.at_level(logging.INFO, "batchwright"):
        bw.DatasetBuffer().append(torch.zeros(3, 2))
    assert "extend" in caplog.text


def test_the_kind_stays_though_all_rows_go():
    buffer = bw.DatasetBuffer([{"n": 1}])
    buffer.drop([0])
    assert len(buffer) == 0
    with pytest.raises(bw.SampleError):
        buffer.append(torch.zeros(3))


def test_a_schema_said_beforehand_decides():
    schema = pa.schema([pa.field("label", pa.int8(), nullable=False), pa.field("note", pa.string())])
    buffer = bw.DatasetBuffer(schema=schema)
    buffer.append({"label": 3})
    assert buffer.schema.field("label").type == pa.int8()
    assert buffer[0] == {"label": 3, "note": None}
    with pytest.raises(bw.SampleError):
        buffer.append({"label": 300})


# Rows out


def test_rows_are_found_by_number_from_both_ends(eight):
    assert eight[0] == {"text": "example 0", "loss": 0.0}
    assert eight[-1] == eight[np.int64(7)] == {"text": "example 7", "loss": 7.0}
    assert eight[2:4].to_pydict() == {"text": ["example 2", "example 3"], "loss": [2.0, 3.0]}


def test_an_iterator_gives_one_row_tables_of_the_version_at_which_it_began(eight):
    rows = iter(eight)
    first = next(rows)
    assert isinstance(first, pa.Table)
    eight.set([1], loss=[99.0])
    eight.append([{"text": "new", "loss": 0.0}], retain_prior=0.5, retain_prior_by="latest")
    assert [row["loss"][0].as_py() for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_a_row_is_in_a_buffer_that_has_an_equal_one(eight):
    assert {"text": "example 3", "loss": 3.0} in eight
    assert {"text": "example 3", "loss": 4.0} not in eight
    assert {"text": "example 3"} not in eight
    assert None not in eight


def test_a_batch_is_in_the_order_of_its_indices(eight):
    assert eight.get_batch([7, 0, 7, -2])["loss"].to_pylist() == [7.0, 0.0, 7.0, 6.0]
    assert eight.get_batch(np.array([1])).num_rows == 1
    assert eight.get_batch([]).schema == eight.schema


def test_select_and_filter_are_buffers_that_share_memory_until_one_of_them_changes(eight):
    picked, high = eight.select(range(1, 7)), eight.filter(lambda row: row["loss"] > 5)
    assert picked.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.shares_memory(picked.to_numpy()["loss"], eight.to_numpy()["loss"])
    picked.set([2], loss=[50.0])
    eight.set([3], loss=[60.0])
    assert picked.to_pydict()["loss"] == [1.0, 50.0, 3.0, 4.0, 5.0, 6.0]
    assert eight.to_pydict()["loss"][2:4] == [2.0, 60.0]
    assert texts_in(high) == ["example 6", "example 7"]
    assert texts_in(eight.filter(pc.field("loss") < 1)) == ["example 0"]
    assert texts_in(eight.filter(np.arange(8) == 4)) == ["example 4"]
    assert texts_in(eight.select([5, 1])) == ["example 5", "example 1"]


def test_to_numpy_is_a_view_that_cannot_be_written_to_and_does_not_change(eight):
    loss = eight.to_numpy()["loss"]
    assert np.shares_memory(loss, eight.to_numpy()["loss"])
    with pytest.raises(ValueError, match="read-only"):
        loss[0] = 1
    eight.set([0], loss=[5.0])
    eight.update(1, {"loss": 6.0})
    assert loss.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert eight.to_numpy()["loss"].tolist()[:2] == [5, 6]


def test_a_tensor_of_to_torch_does_not_change_with_the_buffer(eight):
    loss = eight.to_torch()["loss"]
    eight.set([0], loss=[5.0])
    assert loss[0] == 0


def test_a_draw_is_a_function_of_the_number_the_seed_and_the_step():
    def drawn(step: int, seed: int = 7) -> list[int]:
        buffer = bw.DatasetBuffer({"obs": np.zeros((100, 2), np.float32), "reward": np.arange(100.0)}, seed=seed)
        return buffer.sample(32, step=step).ids.tolist()

    assert drawn(0) == drawn(0) != drawn(1)
    assert drawn(0) != drawn(0, seed=8)


def test_rows_with_larger_values_are_drawn_more_often_and_weights_undo_it():
    buffer = bw.DatasetBuffer({"reward": np.array([0.0, 1.0, 99.0])})
    batch = buffer.sample(500, step=0, by="reward")
    counts = np.bincount(batch.ids, minlength=3)
    assert counts[0] == 0
    assert counts[2] > 20 * counts[1] > 0
    assert batch.weights[batch.ids == 1][0] > batch.weights[batch.ids == 2][0]


def test_a_draw_by_a_column_follows_what_was_set():
    buffer = bw.DatasetBuffer({"reward": np.array([1.0, 0.0])})
    assert set(buffer.sample(9, step=0, by="reward").ids) == {0}
    buffer.set([0, 1], reward=[0.0, 1.0])
    assert set(buffer.sample(9, step=0, by="reward").ids) == {1}


def test_a_loader_goes_over_the_version_at_which_it_was_made(eight):
    loader = eight.loader(batch_size=4, seed=1, framework="numpy")
    eight.drop(range(8))
    seen = [float(loss) for batch in loader.get_iterator() for loss in batch["loss"]]
    assert sorted(seen) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_torchs_own_loader_reads_with_one_gather_for_each_batch(eight):
    calls = []
    gather = type(eight).__getitems__

    class Counting(bw.DatasetBuffer):
        def __getitems__(self, indices: Any) -> Any:
            calls.append(list(indices))
            return gather(self, indices)

    counting = Counting([{"n": n} for n in range(8)])
    loader = torch.utils.data.DataLoader(counting, batch_size=4, shuffle=True)
    found = [n for batch in loader for n in batch["n"].tolist()]
    assert sorted(found) == list(range(8))
    assert [len(indices) for indices in calls] == [4, 4]


def test_torchs_own_loader_works_with_workers():
    buffer = bw.DatasetBuffer([{"n": n, "text": f"{n}"} for n in range(64)])
    loader = torch.utils.data.DataLoader(buffer, batch_size=32, shuffle=True, num_workers=2)
    assert sorted(n for batch in loader for n in batch["n"].tolist()) == list(range(64))


# Changes and what stays


def test_update_changes_what_it_names_in_one_row(eight):
    eight.update(-1, {"loss": 0.25})
    assert eight[7] == {"text": "example 7", "loss": 0.25}
    assert eight.ids.tolist() == list(range(8))


def test_set_adds_a_column_that_is_null_in_other_rows(eight):
    eight.set([1, 0], score=np.array([0.5, 0.25], np.float32))
    assert eight.to_pydict()["score"] == [0.25, 0.5] + [None] * 6
    eight.append({"text": "without one", "loss": 1.0})
    assert eight[-1]["score"] is None


def test_retention_comes_before_the_append_and_keeps_the_order(eight):
    eight.append({"text": "new", "loss": 3.5}, retain_prior=0.5, retain_prior_by="-loss")
    assert texts_in(eight) == ["example 4", "example 5", "example 6", "example 7", "new"]
    eight.append([], retain_prior=0.4, retain_prior_by="loss")
    assert texts_in(eight) == ["example 4", "new"]


@pytest.mark.parametrize(("by", "left"), [("oldest", [3, 4, 5]), ("loss", [3, 4, 5]), ("-loss", [0, 1, 2])])
def test_max_size_drops_by_its_strategy(by, left):
    buffer = bw.DatasetBuffer(max_size=3, drop_strategy=by)
    for n in range(6):
        buffer.append({"loss": float(n)})
    assert buffer.to_pydict()["loss"] == left


def test_the_same_seed_and_calls_give_the_same_rows():
    def rows(seed: int) -> list[int]:
        buffer = bw.DatasetBuffer(max_size=30, drop_strategy="random", seed=seed)
        for n in range(0, 100, 10):
            buffer.append([{"n": n + i} for i in range(10)], retain_prior=0.9)
        return buffer.to_pydict()["n"]

    assert rows(1) == rows(1) != rows(2)


# Versions


def test_versions_are_listed_read_compared_and_gone_back_to(eight):
    first = eight.commit("epoch 1")
    eight.append({"text": "a fresh one", "loss": 9.0}, retain_prior=0.5, retain_prior_by="-loss")
    eight.set([7], loss=[0.0])
    eight.commit("epoch 2")
    assert [(v.name, v.rows) for v in eight.versions()] == [("epoch 1", 8), ("epoch 2", 5)]
    changes = eight.diff("epoch 1", "epoch 2")
    assert (changes.added.tolist(), changes.removed.tolist(), changes.changed.tolist()) == ([8], [0, 1, 2, 3], [7])
    assert str(changes) == "1 row added, 4 removed, 1 changed (loss in 1)"
    assert eight.at(first)[7]["loss"] == eight.at(first.number)[7]["loss"] == 7.0
    eight.rollback("epoch 1")
    assert texts_in(eight)[0] == "example 0"
    assert [v.name for v in eight.versions()] == ["epoch 1", "epoch 2"]
    assert not eight.diff("epoch 1")


def test_a_version_without_a_name_is_named_after_its_number(eight):
    assert eight.commit().name == f"version {eight.number}"


def test_equal_rows_committed_again_under_a_name_are_that_version_with_its_ids(eight):
    """As a loop that was killed does it: its rows come again, with new ids, and others know the version's."""
    eight.commit("epoch 1")
    eight.append({"text": "a fresh one", "loss": 9.0})
    version = eight.commit("epoch 2")
    eight.rollback("epoch 1")
    assert eight.append({"text": "a fresh one", "loss": 9.0}) == range(9, 10)
    assert eight.commit("epoch 2") == version
    assert eight.ids.tolist() == eight.at("epoch 2").ids.tolist() == list(range(9))
    eight.set(eight.at("epoch 2").ids, loss=0.0)


@pytest.mark.parametrize("setting", ["max_size", "drop_strategy", "seed"])
def test_settings_are_given_once_so_that_a_journal_has_them(eight, setting):
    with pytest.raises(AttributeError, match=setting):
        setattr(eight, setting, 1)


def test_a_version_can_be_let_go_of(eight):
    eight.commit("a")
    eight.commit("b")
    eight.forget("a")
    assert [v.name for v in eight.versions()] == ["b"]
    with refused(SpecError, "'a'", parameter="version"):
        eight.at("a")


def test_versions_share_the_memory_of_rows_that_did_not_change():
    buffer = bw.DatasetBuffer({"obs": np.zeros((1000, 10)), "loss": np.zeros(1000)})
    written, copied = blocks.costs.written, blocks.costs.copied
    for epoch in range(20):
        buffer.commit(f"{epoch}")
    assert (blocks.costs.written, blocks.costs.copied) == (written, copied)
    buffer.set(range(1000), loss=np.ones(1000))
    assert np.shares_memory(buffer.at("0").to_numpy()["obs"], buffer.to_numpy()["obs"])
    assert not np.shares_memory(buffer.at("0").to_numpy()["loss"], buffer.to_numpy()["loss"])


def test_a_column_of_which_nothing_was_known_is_not_changed_where_it_is_still_null():
    buffer = bw.DatasetBuffer([{"n": n, "later": None, "meta": {"tag": None}} for n in range(3)])
    buffer.commit("before")
    buffer.set([1], later=[2.5], meta=[{"tag": "x"}])
    assert buffer.diff("before").changed.tolist() == [1]


def test_provenance_says_when_and_with_which_append_a_row_came(eight):
    number = eight.number
    eight.append({"text": "x", "loss": 1.0}, origin="hard negatives")
    eight.append({"text": "y", "loss": 2.0}, retain_prior=0.9, retain_prior_by="random")
    table = eight.provenance([-2, -1])
    assert table["id"].to_pylist() == [8, 9]
    assert table["number"].to_pylist() == [number + 1, number + 2]
    assert table["origin"].to_pylist() == ["hard negatives", None]
    assert table["time"][0].as_py() <= table["time"][1].as_py()
    assert eight.provenance()["number"].to_pylist()[0] == number


def test_a_fingerprint_names_the_rows_however_they_came(eight):
    one_by_one = bw.DatasetBuffer()
    for row in eight.__getitems__(range(8)):
        one_by_one.append(row)
    assert one_by_one.content_fingerprint() == eight.content_fingerprint()
    one_by_one.update(3, {"loss": 3.5})
    assert one_by_one.content_fingerprint() != eight.content_fingerprint()


def test_a_fingerprint_does_not_tell_that_there_were_nulls_once(eight):
    once = bw.DatasetBuffer(
        [{"text": f"example {n}" if n < 8 else None, "loss": float(n) if n < 8 else None} for n in range(9)]
    )
    once.drop([8])
    assert once.content_fingerprint() == eight.content_fingerprint()
    filled = bw.DatasetBuffer([{"text": None, "loss": None if n else 0.0} for n in range(8)])
    filled.set(range(8), text=[f"example {n}" for n in range(8)], loss=np.arange(8.0))
    assert filled.content_fingerprint() == eight.content_fingerprint()


def test_rows_that_are_read_by_threads_while_others_come_are_whole():
    """Text waits as Python values before it becomes Arrow: a reader may come in between."""
    buffer, stop, faults = bw.DatasetBuffer([{"text": "0", "n": 0}]), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            rows = buffer.snapshot().to_pydict()
            if rows["text"] != [str(n) for n in rows["n"]]:
                faults.append(rows)

    readers = [threading.Thread(target=read) for _ in range(2)]
    patience = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for reader in readers:
            reader.start()
        for n in range(1, 800):
            buffer.append({"text": str(n), "n": n if n % 3 else np.int64(n)})  # of another type: text is taken back
    finally:
        sys.setswitchinterval(patience)
        stop.set()
    for reader in readers:
        reader.join()
    assert not faults
    assert texts_in(buffer) == [str(n) for n in range(800)]


def test_a_rollback_to_before_the_first_row_lets_another_kind_of_sample_in(tmp_path):
    with bw.DatasetBuffer(path=tmp_path / "buffer") as buffer:
        buffer.commit("empty")
        buffer.append({"a": 1})
        buffer.rollback("empty")
        buffer.append(np.ones(3, np.float32))
    with bw.DatasetBuffer(path=tmp_path / "buffer", read_only=True) as buffer:
        assert buffer.kind == "tensor"
        assert buffer[0]["tensor"].tolist() == [1, 1, 1]
