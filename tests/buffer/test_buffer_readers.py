"""Readers while a writer writes: each version that one of them sees is one that there was, and never an older one."""

from __future__ import annotations

from writing import SETTINGS, keep_versions, read_until, step

import batchwright as bw
from batchwright.buffer import durable

CHANGES = 150


def test_two_readers_beside_a_writer_see_only_versions_that_there_were(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_CHECKPOINT_BYTES", 4000)
    monkeypatch.setattr(durable, "_CHECKPOINT_RECORDS", 9)
    path = tmp_path / "b"
    writer = bw.DatasetBuffer(path=path, **SETTINGS)
    step(writer)
    for name in ("a", "b"):
        processes.start(name, read_until, path, CHANGES)
    there = {writer.number: (len(writer), writer.content_fingerprint())}
    while writer.number < CHANGES:
        step(writer)
        there[writer.number] = len(writer), writer.content_fingerprint()
    keep_versions(writer)
    processes.finish("a", "b")
    for name in ("a", "b"):
        seen = processes.said(name)
        numbers = [line["number"] for line in seen]
        assert numbers[-1] == CHANGES
        assert numbers == sorted(numbers)
        for line in seen:
            assert tuple(line["seen"]) == there[line["number"]], line
    reader = bw.DatasetBuffer(path=path, read_only=True)
    assert reader.versions() == writer.versions()
    writer.close()


def test_what_a_reader_has_is_there_though_the_writer_removed_the_files(tmp_path):
    with bw.DatasetBuffer(path=tmp_path / "b", **SETTINGS) as writer:
        for _ in range(30):
            step(writer)
        writer.checkpoint()
        reader = bw.DatasetBuffer(path=tmp_path / "b", read_only=True)
        expected, number = reader.to_pydict(), reader.number
        for _ in range(30):
            step(writer)
        writer.checkpoint()
        assert str(reader.to_pydict()) == str(expected)
        assert reader.number == number
        assert reader.refresh().content_fingerprint() == writer.content_fingerprint()
