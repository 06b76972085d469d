"""`batchwright info` and `batchwright look` of a buffer's folder, also while a process writes to it."""

from __future__ import annotations

import numpy as np
import pytest

import batchwright as bw


@pytest.fixture
def folder(tmp_path):
    """A buffer with two versions, that a writer has open."""
    with bw.DatasetBuffer(path=tmp_path / "rows", max_size=5, seed=3) as buffer:
        buffer.append([{"text": f"row {n}", "obs": np.arange(12, dtype=np.float32)} for n in range(2)], origin="first")
        buffer.commit("after epoch 1")
        buffer.append({"text": "a late\x1b[2J one", "obs": np.zeros(12, np.float32)}, origin="fresh")
        buffer.set([0], loss=[0.5])
        buffer.commit("after epoch 2")
        yield tmp_path / "rows"


def test_info_says_rows_columns_origins_settings_and_versions(folder, succeeds):
    lines = [" ".join(line.split()) for line in succeeds(f"info {folder}").out.splitlines()]
    with bw.DatasetBuffer(path=folder, read_only=True) as buffer:
        assert lines[0] == f"buffer {folder} ({buffer.content_fingerprint()[:16]})"
    for line in (
        "rows 3, after 3 changes",
        "column text string",
        "column obs float32[12]",
        "column loss float64, optional",
        "origin 2 rows from 'first'",
        "origin 1 row from 'fresh'",
        "settings at most 5, dropping by oldest, seed 3",
    ):
        assert line in lines
    versions = [line for line in lines if line.startswith("version ")]
    assert [line.partition(", 2")[0] for line in versions] == [
        "version after epoch 1: 2 rows, after change 1",
        "version after epoch 2: 3 rows, after change 3",
    ]


def test_info_as_json_has_the_sizes_of_the_files(folder, succeeds):
    facts = succeeds(f"info {folder} --json").json
    assert facts["journal_bytes"] == sum(file.stat().st_size for file in folder.glob("journal-*.log")) > 0
    assert facts["num_block_files"] == len(list(folder.glob("blocks/*"))) > 0
    assert facts["settings"] == {"max_size": 5, "drop_strategy": "oldest", "seed": 3}


@pytest.mark.parametrize("version", ["after epoch 1", "1"], ids=["by name", "by number"])
def test_info_of_a_version_says_what_it_had(folder, succeeds, version):
    facts = succeeds(f"info {folder} --json --version", version).json
    assert facts["num_rows"] == 2
    assert [column["name"] for column in facts["columns"]] == ["text", "obs"]


def test_look_shows_rows_with_their_ids_and_origins(folder, succeeds):
    printed = succeeds(f"look {folder} --count 1").out
    assert printed == (
        "row 0 (id 0, from 'first')\n  text  'row 0'\n  obs  float32[12]  0 1 2 3 4 5 6 7 ...\n  loss  0.5\n"
    )


def test_look_shows_control_characters_as_escapes(folder, succeeds):
    printed = succeeds(f"look {folder} --document 2").out
    assert "row 2 (id 2, from 'fresh')" in printed
    assert "\x1b" not in printed
    assert "loss  None" in printed


def test_look_as_json_has_whole_values(folder, succeeds):
    (row,) = succeeds(f"look {folder} --document 1 --count 1 --json").json["rows"]
    assert row == {"row": 1, "id": 1, "origin": "first", "values": {"text": "row 1", "obs": [*range(12)], "loss": None}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["info", "--version", "after epch 1"], "try        version 'after epoch 1'"),
        (["info", "3f2a"], "3f2a"),
        (["info", "--files"], "--files"),
        (["look", "--document", "3"], "row 3 "),
        (["look", "3f2a"], "3f2a"),
        (["look", "--step", "0"], "--step"),
        (["look", "--ids"], "--ids"),
        (["look", "--chunk-size", "8"], "--chunk-size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_buffer_does_not_have_is_refused(folder, refuses, arguments, said):
    assert said in refuses(arguments[0], folder, *arguments[1:])


def test_verify_reads_every_byte_of_a_buffer(folder, succeeds, batchwright):
    assert succeeds(f"verify {folder}").out == f"{folder}: whole\n"
    file = max(folder.glob("blocks/*"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    ran = batchwright(f"verify {folder}")
    assert ran.code == 1
    assert file.name in ran.err
    assert batchwright(f"verify {folder} --json").json["ok"] is False
