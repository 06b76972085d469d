"""The demo's training process: what it prints, what it leaves behind, and that it goes on from there."""

from __future__ import annotations

import json

import pytest

import batchwright as bw
from batchwright.demo import train
from batchwright.demo.model import CHECKPOINT, read_checkpoint, write_checkpoint


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rows = [f"{i} and {i * i} and {i * i * i}\n" * 10 for i in range(200)]
    recipe = bw.DatasetRecipe().add_ingredient(rows, name="numbers").prepare_step(bw.tokenize("bytes", append_eos=True))
    return bw.bake(recipe, to=tmp_path_factory.mktemp("train") / "numbers.store", workers=0, show_progress=False).path


def _trained(store, folder, capsys, steps):
    folder.mkdir(exist_ok=True)
    train.train(str(store), str(folder), steps, 4, chunk_size=train.ROW_TOKENS, seed=7)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_step_is_one_line_with_loss_speed_and_wait(store, tmp_path, capsys):
    *steps, end = _trained(store, tmp_path, capsys, 3)
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert float.fromhex(steps[0]["loss"]) == pytest.approx(5.55, abs=0.1)
    assert all(line["tokens_per_second"] > 0 and 0 <= line["data_wait_percent"] <= 100 for line in steps)
    assert len(end["weights"]) == 16


def test_a_checkpoint_read_and_written_again_is_the_same_file(store, tmp_path, capsys):
    _trained(store, tmp_path, capsys, 2)
    written = (tmp_path / CHECKPOINT).read_bytes()
    write_checkpoint(tmp_path / "again.npz", read_checkpoint(tmp_path / CHECKPOINT))
    assert (tmp_path / "again.npz").read_bytes() == written


def test_the_data_part_of_a_checkpoint_is_a_small_json_value(store, tmp_path, capsys):
    _trained(store, tmp_path, capsys, 2)
    state = read_checkpoint(tmp_path / CHECKPOINT).loader
    assert state["position"] == 16
    assert len(json.dumps(state)) < 100


def test_a_run_taken_up_again_does_what_an_uninterrupted_one_does(store, tmp_path, capsys, monkeypatch):
    whole = _trained(store, tmp_path / "whole", capsys, 9)
    monkeypatch.setattr(train, "write_checkpoint", _write_and_stop)
    with pytest.raises(_Stopped):
        _trained(store, tmp_path / "parts", capsys, 9)
    monkeypatch.undo()
    capsys.readouterr()
    rest = _trained(store, tmp_path / "parts", capsys, 9)
    assert [line["step"] for line in rest[:-1]] == [4, 5, 6, 7, 8]
    assert [line["loss"] for line in rest[:-1]] == [line["loss"] for line in whole[4:-1]]
    assert rest[-1] == whole[-1]


class _Stopped(Exception):
    pass


def _write_and_stop(path, checkpoint):
    write_checkpoint(path, checkpoint)
    raise _Stopped
