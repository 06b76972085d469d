"""Addresses (s3://bucket/store) wherever a path is given: one clear error, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from batchwright.audit.digesting import digest_steps
from batchwright.audit.drilling import drill
from batchwright.base.checks import local_path
from batchwright.buffer import DatasetBuffer
from batchwright.order.plan import Plan
from batchwright.pool.convert import convert
from batchwright.queue.status import queue_status
from batchwright.rollouts.log.status import status
from batchwright.store import collect_garbage
from batchwright.store.plans import find_plan, forget_plan
from refusals import refused

AT = "s3://bucket/x.jsonl"


def recipe(source="a text", **settings):
    return bw.DatasetRecipe().add_ingredient(source, name="a").prepare_step(bw.tokenize("bytes", **settings))


IN_PYTHON = {
    "bake to": lambda store: bw.bake(recipe(["a text"]), to=AT, workers=0),
    "bake a source": lambda store: bw.bake(recipe(AT), to="new.store", workers=0),
    "bake a list of sources": lambda store: bw.bake(recipe([AT, Path("a.jsonl")]), to="new.store", workers=0),
    "tokenizer": lambda store: bw.tokenize(AT),
    "after a blank": lambda store: bw.open_store(" " + AT),
    "tokenizer to write": lambda store: bw.train_tokenizer(["a text"], 300, out=AT),
    "chat template": lambda store: bw.chat("bytes", "s3://bucket/x.jinja"),
    "open_store": lambda store: bw.open_store(AT),
    "a loader's store": lambda store: bw.PretrainDataLoader(AT, chunk_size=8),
    "a loader's raw files": lambda store: bw.PretrainDataLoader(AT, "bytes", 8),
    "a streaming loader's files": lambda store: bw.PretrainDataLoader(AT, "bytes", 8, streaming=True),
    "a loader's list of files": lambda store: bw.PretrainDataLoader([AT], "bytes", 8),
    "a loader's plan": lambda store: bw.PretrainDataLoader(store, plan=AT),
    "a mixture's store": lambda store: bw.MixedDataLoader({"a": AT}, chunk_size=8),
    "conversations": lambda store: bw.ConversationDataLoader(AT, "bytes", max_length=64),
    "rollouts": lambda store: bw.RolloutDataLoader(AT, "bytes", batch_size=1),
    "rollout log": lambda store: bw.RolloutLog(AT),
    "status of a rollout log": lambda store: status(AT),
    "buffer": lambda store: DatasetBuffer(path=AT),
    "buffer to read": lambda store: DatasetBuffer(path=AT, read_only=True),
    "adopt": lambda store: bw.adopt(AT, tokenizer="bytes"),
    "adopt to": lambda store: bw.adopt("../tokens.npy", "bytes", to=AT),
    "export": lambda store: bw.export(AT, "out", to="npy"),
    "export to": lambda store: bw.export(store, AT, to="npy"),
    "save a plan": lambda store: bw.PretrainDataLoader(store, chunk_size=8, batch_size=1).plan.save(AT),
    "load a plan": lambda store: Plan.load(AT),
    "find_plan": lambda store: find_plan(AT, "dead"),
    "forget_plan": lambda store: forget_plan(AT, "dead"),
    "collect_garbage": lambda store: collect_garbage(AT),
    "trace": lambda store: list(bw.trace(AT, "dead", step=0)),
    "digest": lambda store: digest_steps(AT, "dead", 0, 1),
    "drill": lambda store: drill(AT, "dead"),
    "shards": lambda store: bw.StreamingMixedShardDataset([AT], ["all"]),
    "split shards": lambda store: bw.discover_and_split_multiple_data([AT], ["all"], 0.1),
    "convert shards": lambda store: convert(AT, "out"),
    "convert shards to": lambda store: convert("..", AT),
    "queue's data_dir": lambda store: bw.DatasetConsumer(AT),
    "queue_status": lambda store: queue_status(AT),
    "load_config": lambda store: bw.load_config(AT),
    "load_config's data": lambda store: bw.load_config(__file__, data=AT),
}

IN_THE_SHELL = [
    "bake STORE --to AT --tokenizer bytes",
    "bake AT --to new.store --tokenizer bytes",
    "bake web=AT --to new.store --tokenizer bytes",
    "bake STORE --to new.store --tokenizer AT",
    "adopt AT --tokenizer bytes",
    "info AT",
    "look AT",
    "look STORE --html AT",
    "verify AT",
    "gc AT",
    "plan AT",
    "plan STORE AT",
    "plan STORE --chunk-size 8 --save AT",
    "plan forget AT dead",
    "trace AT dead --step 0",
    "digest AT dead --steps 0-1",
    "drill AT --chunk-size 8",
    "export AT out --to npy",
    "export STORE AT --to npy",
    "doctor chat AT --tokenizer bytes --template chatml",
    "train-tokenizer AT --vocab-size 300 --out tokenizer.json",
    "queue status AT",
    "queue purge AT",
    "shards info AT",
    "shards convert AT out",
    "rollouts status AT",
    "prepare AT",
    "demo --folder AT",
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    np.save(tmp_path / "tokens.npy", np.arange(9, dtype=np.uint16))
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cwd"


@pytest.mark.parametrize("call", IN_PYTHON.values(), ids=IN_PYTHON)
def test_an_address_is_refused_in_python(call, here, small_store):
    with refused(bw.SpecError, "s3:", "address"):
        call(small_store)
    assert os.listdir(here) == []


@pytest.mark.parametrize("arguments", IN_THE_SHELL)
def test_an_address_is_refused_in_the_shell(arguments, here, small_store, capsys):
    from batchwright.cli.main import main

    words = [word.replace("STORE", str(small_store)).replace("AT", AT) for word in arguments.split()]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "s3:/" in said
    assert "address" in said
    assert os.listdir(here) == []


@pytest.mark.parametrize(
    "address", ["s3://b/x", "gs://b/x", "hf://x", "https://host/x.jsonl", "a+b.c://x", Path("s3://b/x")]
)
def test_every_scheme_is_refused(address):
    with refused(bw.SpecError, parameter="to"):
        local_path(to=address)


def test_a_file_address_is_answered_with_its_path():
    with refused(bw.SpecError, parameter="to", remedy="to='/data/a b'"):
        local_path(to="file:///data/a%20b")


@pytest.mark.parametrize("name", ["a:b", "s3:", "run:3/x", "C:/x", "C:\\x", "1://x", "/s3://x", "a b://x", "./s3://x"])
def test_a_name_with_a_colon_is_a_name(name):
    assert local_path(to=name) == Path(name)


def test_a_store_may_have_a_colon_in_its_name(here):
    bw.bake(recipe(["a text"]), to="run:3.store", workers=0, show_progress=False)
    assert bw.open_store("run:3.store").num_rows == 1
