"""Readers while a writer writes: each version that one of them sees is one that there was, and never an older one."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import batchwright as bw
from batchwright.buffer import durable

sys.path.insert(0, str(Path(__file__).parent))
from writing import SETTINGS, fault_in, keep_versions, step

CHANGES = 150


def read_until(path: Path, last: int, say: int) -> None:
    """Refresh until the last change is there; say (number, rows, fingerprint) of every version seen."""
    reader, seen = bw.DatasetBuffer(path=path, read_only=True), []
    while True:
        reader.refresh()
        seen.append((reader.number, len(reader), reader.content_fingerprint()))
        fault = fault_in(reader.to_pydict()) if len(reader) else None
        if fault:
            seen.append((-1, 0, fault))
        if reader.number >= last or fault:
            os.write(say, json.dumps(seen).encode())
            return


def test_two_readers_beside_a_writer_see_only_versions_that_there_were(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_CHECKPOINT_BYTES", 4000)
    monkeypatch.setattr(durable, "_CHECKPOINT_RECORDS", 9)
    path = tmp_path / "b"
    writer = bw.DatasetBuffer(path=path, **SETTINGS)
    step(writer)
    listening = []
    for _ in range(2):
        listen, say = os.pipe()
        process = os.fork()
        if not process:
            try:
                read_until(path, CHANGES, say)
            except BaseException:
                os.write(say, json.dumps([(-1, 0, traceback.format_exc())]).encode())
            os._exit(0)
        os.close(say)
        listening.append((process, listen))
    there = {writer.number: (len(writer), writer.content_fingerprint())}
    while writer.number < CHANGES:
        step(writer)
        there[writer.number] = len(writer), writer.content_fingerprint()
    keep_versions(writer)
    for process, listen in listening:
        with open(listen, "rb") as said:
            seen = json.load(said)
        os.waitpid(process, 0)
        assert seen[-1][0] == CHANGES, seen[-1][2]
        numbers = [number for number, _, _ in seen]
        assert numbers == sorted(numbers)
        for number, rows, content in seen:
            assert (rows, content) == there[number], number
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
