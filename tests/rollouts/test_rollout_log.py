"""RolloutLog: prompts that are leased, answers that count once, and decisions that stay."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import batchwright as bw
from batchwright.base import journal as journal_module
from batchwright.base.errors import (
    BusyError,
    PlanError,
    RowIndexError,
    SampleError,
    SourceError,
    SpecError,
    StoreError,
)
from batchwright.rollouts.log import folder as folder_module
from batchwright.rollouts.log.groups import decode_group
from batchwright.rollouts.log.log import RolloutLog
from batchwright.rollouts.log.status import status
from refusals import refused

PROMPTS = [{"prompt": f"{n} + 1 = ", "answer": str(n + 1)} for n in range(6)]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power cuts."""
    monkeypatch.setattr(journal_module, "_sync", lambda descriptor: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def log(path: Path):
    with RolloutLog(path, PROMPTS, group_size=2, seed=0) as log:
        yield log


def answer(log: RolloutLog, job: Any, version: int | None = None, text: str = "yes") -> bool:
    return log.add(job, [text] * log.group_size, [1.0] * log.group_size, policy_version=version)


def ordinals(jobs: list[Any]) -> list[int]:
    return [job.ordinal for job in jobs]


# Prompts


def test_a_job_has_the_prompt_its_row_and_all_of_the_row(log):
    jobs = log.next_prompts(6)
    assert ordinals(jobs) == list(range(6))
    assert sorted(job.row for job in jobs) == list(range(6))
    for job in jobs:
        assert (job.prompt, job.fields) == (PROMPTS[job.row]["prompt"], PROMPTS[job.row])
        assert (job.epoch, job.attempt) == (0, 1)


def test_the_order_of_prompts_is_pinned(path):
    # Ordinals in running logs are positions in this order: if it changes, they are other prompts.
    with RolloutLog(path, PROMPTS, group_size=1, seed=0, epochs=2) as log:
        assert [job.row for job in log.next_prompts(12)] == [2, 4, 0, 3, 1, 5, 0, 1, 2, 3, 5, 4]


def test_without_shuffle_prompts_come_in_the_order_of_the_file(path):
    with RolloutLog(path, PROMPTS, group_size=1, shuffle=False, epochs=None) as log:
        jobs = log.next_prompts(8)
        assert [(job.epoch, job.row) for job in jobs] == [(0, n) for n in range(6)] + [(1, 0), (1, 1)]


def test_what_a_reward_function_changes_in_a_row_stays_with_it(path):
    with RolloutLog(path, PROMPTS, group_size=1, epochs=2, shuffle=False) as log:
        log.next_prompts(6)[0].fields["answer"] = "changed"
        assert log.next_prompts(1)[0].fields == PROMPTS[0]


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "p.csv").write_text(
        "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in PROMPTS)
    )
    return {
        "path": tmp_path / "p.jsonl",
        "text of a path": str(tmp_path / "p.jsonl"),
        "list of paths": [tmp_path / "p.jsonl"],
        "csv": tmp_path / "p.csv",
        "rows": PROMPTS,
        "generator": (row for row in PROMPTS),
        "table": pa.Table.from_pylist(PROMPTS),
        "texts": [row["prompt"] for row in PROMPTS],
    }


@pytest.mark.parametrize(
    "kind", ["path", "text of a path", "list of paths", "csv", "rows", "generator", "table", "texts"]
)
def test_prompts_come_from_any_source(path, sources, kind):
    with RolloutLog(path, sources[kind], group_size=1, shuffle=False) as log:
        assert [job.prompt for job in log.next_prompts(6)] == [row["prompt"] for row in PROMPTS]


@pytest.mark.parametrize("kind", ["path", "table", "generator"])
def test_prompts_are_known_by_their_content_wherever_they_lie(path, sources, kind):
    RolloutLog(path, PROMPTS, group_size=1).close()
    RolloutLog(path, sources[kind]).close()


def test_the_tools_of_a_prompt_of_messages_go_to_the_trainer_with_it(path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    prompts = [{"prompt": [{"role": "user", "content": "2 + 2"}], "tools": tools}, {"prompt": "text", "tools": tools}]
    with RolloutLog(path, prompts, group_size=2, shuffle=False) as log:
        for job in log.next_prompts(2):
            answer(log, job)
        log.take(2)
    with RolloutLog(path) as log:  # as a trainer opens it, without the prompts
        messages, text = log.groups(0, 2)
        assert [row["tools"] for row in messages.rows()] == [tools, tools]
        assert not any("tools" in row for row in text.rows()), "no template writes them"


def test_prompts_may_be_token_ids_or_messages(path):
    prompts = [{"prompt": [1, 2, 3]}, {"prompt": [{"role": "user", "content": "hello"}]}]
    with RolloutLog(path, prompts, group_size=1, shuffle=False) as log:
        jobs = log.next_prompts(2)
        assert [job.prompt for job in jobs] == [row["prompt"] for row in prompts]
        for job in jobs:
            answer(log, job)
        assert log.take(2) == 2
        ids, messages = (group.prompt for group in log.groups(0, 2))
        assert (ids.tolist(), ids.dtype, messages) == ([1, 2, 3], np.int32, prompts[1]["prompt"])


def test_another_column_may_hold_the_prompt(path):
    with RolloutLog(path, [{"question": "why?"}], group_size=1, prompt_column="question") as log:
        assert log.next_prompts(1)[0].prompt == "why?"


@pytest.mark.parametrize(
    ("prompts", "kind", "named", "where"),
    [
        ([{"question": "?"}], SampleError, "'question'", {"row": 0, "column": "prompt"}),
        (["a", ""], SampleError, "", {"row": 1, "column": "prompt"}),
        ([{"prompt": None}], SampleError, "", {"row": 0, "column": "prompt"}),
        ([{"prompt": [1, -2]}], SampleError, "-2", {"row": 0}),
        ([{"prompt": [1.5]}], SampleError, "numbers", {"row": 0}),
        ([{"prompt": np.array([1, 100], np.uint16)}], SampleError, "vocabulary of 100", {"row": 0}),
        ([{"prompt": [{"content": "no role"}]}], SampleError, "role", {"row": 0}),
        ([{"prompt": [{"role": "user", "content": np.zeros((2, 2))}]}], SampleError, "", {"row": 0}),
        (["a", 7], SampleError, "dict", {"row": 1}),
        ([], SpecError, "", {"parameter": "prompts"}),
        (7, SpecError, "", {"parameter": "prompts"}),
        ({"prompt": "a"}, SpecError, "", {"parameter": "prompts"}),
        ("missing.jsonl", SourceError, "", {"file": "missing.jsonl"}),
    ],
)
def test_prompts_that_cannot_be_are_refused_and_nothing_is_made(path, prompts, kind, named, where):
    with refused(kind, named, **where):
        RolloutLog(path, prompts, group_size=1, vocab_size=100)
    assert not path.exists()


def test_a_prompt_that_cannot_be_read_is_named_by_its_line(path, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with refused(SourceError, file=tmp_path / "p.jsonl", line=2) as error:
        RolloutLog(path, tmp_path / "p.jsonl", group_size=1)
    assert "on_error" not in error.value.remedy


# Opening


def test_a_log_that_is_there_needs_no_settings(log, path):
    with RolloutLog(path) as other:
        assert (other.group_size, other.num_prompts, other.epochs, other.seed) == (2, 6, 1, 0)
        assert other.fingerprint == log.fingerprint


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"group_size": 3}, "group_size=2, not 3"),
        ({"seed": 1}, "seed=0, not 1"),
        ({"shuffle": False}, "shuffle=True, not False"),
        ({"epochs": None}, "epochs=1, not None"),
        ({"samples_per_insert": 2, "round_groups": 2}, "samples_per_insert=1, not 2"),
        ({"prompts": PROMPTS[:5]}, "prompts"),
        ({"prompts": [*PROMPTS[:5], {"prompt": "5 + 1 = ", "answer": "7"}]}, "prompts"),
    ],
)
def test_other_prompts_or_settings_are_refused_by_name(log, path, settings, named):
    before = (path / "ledger.journal").read_bytes()
    with refused(PlanError, named, folder=path, remedy="another folder"):
        RolloutLog(path, **settings)
    assert (path / "ledger.journal").read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({}, "group_size"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 1.5}, "group_size"),
        ({"group_size": 1, "seed": "x"}, "seed"),
        ({"group_size": 1, "epochs": 0}, "epochs"),
        ({"group_size": 1, "samples_per_insert": 2}, "round_groups"),
        ({"group_size": 1, "samples_per_insert": 0}, "samples_per_insert"),
        ({"group_size": 1, "lease_seconds": 0}, "lease_seconds"),
        ({"group_size": 1, "lease_seconds": math.nan}, "lease_seconds"),
        ({"group_size": 1, "max_attempts": 0}, "max_attempts"),
        ({"group_size": 1, "on_stuck": "ignore"}, "on_stuck"),
        ({"group_size": 1, "stale": "keep"}, "stale"),
        ({"group_size": 1, "ahead": 0}, "ahead"),
        ({"group_size": 1, "vocab_size": 0}, "vocab_size"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(path, settings, parameter):
    with refused(SpecError, parameter=parameter):
        RolloutLog(path, PROMPTS, **settings)
    assert not path.exists()


@pytest.mark.parametrize(
    "settings", [{}, {"read_only": True}, {"read_only": True, "prompts": PROMPTS, "group_size": 1}]
)
def test_a_log_that_is_not_there_is_not_made_by_a_reader(path, settings):
    with refused(StoreError, folder=path, remedy="prompts="):
        RolloutLog(path, **settings)
    assert not path.exists()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(StoreError, file=tmp_path / "file"):
        RolloutLog(tmp_path / "file", PROMPTS, group_size=1)


def test_a_log_opened_without_prompts_asks_for_them_when_they_are_needed(log, path):
    with RolloutLog(path) as other, refused(SpecError, parameter="prompts", remedy="prompts="):
        other.next_prompts(1)


def test_a_reader_never_writes_or_locks(log, path):
    answer(log, log.next_prompts(1)[0])
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with RolloutLog(path, PROMPTS, read_only=True) as reader:
        assert reader.state() == log.state()
        assert (reader.take(1), reader.groups(0, 0)) == (0, [])
        for call in (lambda: reader.next_prompts(1), lambda: reader.drop(0)):
            with refused(SpecError, parameter="read_only", remedy="read_only=True"):
                call()
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_file_system_without_locks_is_refused(path, monkeypatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folder_module.fcntl, "flock", refuse)
    with refused(StoreError, folder=path, reason=os.strerror(errno.ENOLCK)):
        RolloutLog(path, PROMPTS, group_size=1)
    assert not (path / "ledger.journal").exists()


def test_processes_that_begin_one_log_at_the_same_time_share_it(path):
    script = (
        "import sys, batchwright as bw\n"
        "log = bw.RolloutLog(sys.argv[1], [str(n) for n in range(100)], group_size=1)\n"
        "sys.stdin.read(1)\n"
        "print(*(job.ordinal for _ in range(10) for job in log.next_prompts(3)))\n"
        "sys.stdout.flush(); sys.stdin.read(1)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in processes:
        process.stdin.write("g")
        process.stdin.flush()
    issued = [int(number) for process in processes for number in process.stdout.readline().split()]
    for process in processes:
        process.communicate("e")
        assert process.returncode == 0
    assert sorted(issued) == list(range(60))


def test_a_closed_log_says_so(path):
    log = RolloutLog(path, PROMPTS, group_size=1)
    log.close()
    log.close()
    assert "closed" in repr(log)
    with refused(StoreError, folder=path, remedy="RolloutLog(path"):
        log.next_prompts(1)


def test_a_forked_child_is_told_to_open_the_log_itself(log, path):
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            log.state()
        except BusyError as error:
            os.write(write, f"{error.headline}; {error.remedy}".encode())
        with RolloutLog(path) as mine:
            os.write(write, str(mine.state()["cursor"]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(read, 1000).decode()
    os.close(read)
    os.close(write)
    assert said.startswith("this log can be used by the process that opened it")
    assert "open it in the child" in said
    assert said.endswith("0")


def test_a_log_travels_to_another_process_as_its_path(log):
    with pickle.loads(pickle.dumps(log)) as other:
        assert other.state() == log.state()


# Leases


def test_prompts_are_leased_once(log):
    assert ordinals(log.next_prompts(4)) == [0, 1, 2, 3]
    assert ordinals(log.next_prompts(4)) == [4, 5]
    assert log.next_prompts(4) == []
    assert not log.is_over


def test_prompts_of_a_log_that_was_closed_are_issued_again_at_once(log, path):
    with RolloutLog(path, PROMPTS) as other:
        assert ordinals(other.next_prompts(2)) == [0, 1]
    jobs = log.next_prompts(3)
    assert [(job.ordinal, job.attempt) for job in jobs] == [(0, 2), (1, 2), (2, 1)]


def test_prompts_of_a_process_that_was_killed_are_issued_again_at_once(log, path):
    script = (
        "import sys, os, batchwright as bw\n"
        "log = bw.RolloutLog(sys.argv[1], [{'prompt': f'{n} + 1 = ', 'answer': str(n + 1)} for n in range(6)])\n"
        "log.next_prompts(2); print('leased'); sys.stdout.flush(); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "leased\n"
    assert ordinals(log.next_prompts(1)) == [2]  # it lives
    process.kill()
    process.communicate()
    assert [(job.ordinal, job.attempt) for job in log.next_prompts(9)] == [(0, 2), (1, 2), (3, 1), (4, 1), (5, 1)]


def test_a_lease_on_another_machine_ends_only_by_time(log, path, monkeypatch):
    with RolloutLog(path, PROMPTS) as other:
        monkeypatch.setattr(folder_module.socket, "gethostname", lambda: "elsewhere")
        other.next_prompts(1)
        monkeypatch.undo()
    assert ordinals(log.next_prompts(1)) == [1]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 601)
    assert ordinals(log.next_prompts(1)) == [0]


def test_a_lease_ends_after_its_time_unless_a_heartbeat_renews_it(log, monkeypatch):
    now = time.time()
    first, second = log.next_prompts(2)
    monkeypatch.setattr(time, "time", lambda: now + 500)
    assert log.heartbeat([first]) == [first]
    monkeypatch.setattr(time, "time", lambda: now + 700)
    again = log.next_prompts(1)
    assert [(job.ordinal, job.attempt) for job in again] == [(second.ordinal, 2)]
    assert log.heartbeat([first, second]) == [first]
    assert log.heartbeat() == [first, *again]


def test_heartbeats_are_journaled_when_a_quarter_of_the_lease_has_passed(log, monkeypatch):
    log.next_prompts(2)
    now = time.time()
    before = log.state()["journal"]
    for seconds in (1, 2, 140):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: now + seconds)
        assert len(log.heartbeat()) == 2
    assert log.state()["journal"] == before
    monkeypatch.setattr(time, "time", lambda: now + 151)
    log.heartbeat()
    log.heartbeat()
    assert log.state()["journal"] == before + 1


def test_a_prompt_that_is_given_back_is_issued_again(log):
    job, _ = log.next_prompts(2)
    log.give_back(job, "the engine is busy")
    log.give_back(job)  # nothing to end any more
    assert log.state()["again"] == [0]
    (again,) = log.next_prompts(1)
    assert (again.ordinal, again.attempt) == (0, 2)
    log.give_back(job)  # of an attempt that is over
    assert log.state()["in_flight"] == [0, 1]


def test_fresh_prompts_wait_for_the_trainer(path):
    with RolloutLog(path, PROMPTS, group_size=1, ahead=2) as log:
        jobs = log.next_prompts(5)
        assert ordinals(jobs) == [0, 1]
        assert log.next_prompts(1) == []
        answer(log, jobs[0])
        assert log.next_prompts(1) == []
        log.take(1)
        assert ordinals(log.next_prompts(5)) == [2]
        log.give_back(jobs[1])
        assert ordinals(log.next_prompts(5)) == [1]


def test_next_prompts_waits_until_there_is_one(log, path):
    jobs = log.next_prompts(6)
    with RolloutLog(path, PROMPTS) as other:
        assert other.next_prompts(1, timeout=0.05) == []
        later = threading.Timer(0.1, log.give_back, [jobs[3]])
        later.start()
        assert ordinals(other.next_prompts(2, timeout=240)) == [3]
        later.join()


@pytest.mark.parametrize("call", [{"num_prompts": 0}, {"num_prompts": "2"}, {"num_prompts": 1, "timeout": -1}])
def test_a_number_of_prompts_that_cannot_be_is_refused(log, call):
    with pytest.raises(SpecError):
        log.next_prompts(**call)
    assert log.state()["cursor"] == 0


# Prompts that are never answered


def tried(path: Path, times: int, **settings: Any) -> RolloutLog:
    """Prompt 0 was issued so often, and never answered."""
    log = RolloutLog(path, PROMPTS, group_size=2, max_attempts=3, **settings)
    for _ in range(times):
        log.give_back(log.next_prompts(1)[0])
    return log


def test_a_group_that_never_completes_is_an_error_that_names_it_and_leases_nothing(path):
    with tried(path, 3) as log:
        before = log.state()
        with refused(SampleError, ordinal=0, row=2, attempts=3, remedy="log.drop(0"):
            log.next_prompts(4)
        assert log.state() == before
        log.drop(0, reason="no answer")
        assert ordinals(log.next_prompts(2)) == [1, 2]


def test_it_is_dropped_instead_where_that_was_asked_for(path, caplog):
    with tried(path, 3, on_stuck="drop") as log:
        assert ordinals(log.next_prompts(2)) == [1, 2]
        assert status(path)["dropped"] == {0: "issued 3 times without an answer"}
    assert "dropped 1 prompt" in caplog.text


def test_more_attempts_go_on(path):
    tried(path, 3).close()
    with RolloutLog(path, PROMPTS, max_attempts=4) as log:
        assert log.next_prompts(1)[0].attempt == 4


@pytest.mark.parametrize("ordinal", [5, -1, 0])
def test_only_what_was_issued_and_not_used_can_be_dropped(log, ordinal):
    answer(log, log.next_prompts(2)[0])
    log.take(1)
    before = log.state()
    with refused(SpecError, f"prompt {ordinal}", parameter="ordinal"):
        log.drop(ordinal)
    assert log.state() == before


def test_an_answer_that_waits_can_be_dropped(log):
    jobs = log.next_prompts(2)
    for job in jobs:
        answer(log, job)
    log.drop(0, "a bad one")
    log.drop(0, "again")
    assert log.take(2) == 1
    assert log.groups(0, 1)[0].ordinal == 1


# Answers


def test_a_group_comes_back_as_it_was_given(path):
    with RolloutLog(path, PROMPTS, group_size=2, shuffle=False) as log:
        (job,) = log.next_prompts(1)
        assert log.add(
            job,
            [[5, 6, 7], np.array([8, 9], np.int64)],
            [[0.5, 0.25], [0.0, 2.5]],
            policy_version=np.int64(3),
            old_log_probs=[[-1.0, -2.0], np.array([-0.5, -0.25])],
            values=np.zeros((2, 2)),
            response_mask=[[1, 0, 1], [True, True]],
        )
        assert log.take(1) == 1
        (group,) = log.groups(0, 1)
    assert (group.ordinal, group.attempt, group.epoch, group.row, group.prompt) == (0, 1, 0, 0, "0 + 1 = ")
    assert [ids.tolist() for ids in group.responses] == [[5, 6, 7], [8, 9]]
    assert group.responses[0].dtype == np.int32
    assert group.rewards[0].tolist() == [0.5, 0.25]
    assert group.rewards[1].tolist() == [0.0, 2.5]
    assert group.policy_version == 3
    assert [column.tolist() for column in group.old_log_probs] == [[-1.0, -2.0], [-0.5, -0.25]]
    assert group.values[1].dtype == np.float32
    assert group.ref_log_probs is None
    assert [mask.tolist() for mask in group.response_mask] == [[1, 0, 1], [1, 1]]


def test_texts_and_turns_come_back_too(log):
    turns = [
        {"role": "assistant", "token_ids": [1, 2]},
        {"role": "tool", "token_ids": [3], "name": "search"},
        {"role": "assistant", "content": "done"},
    ]
    (job,) = log.next_prompts(1)
    log.add(job, ["a text \N{SNOWMAN}", turns], [1, 0])
    log.take(1)
    text, found = log.groups(0, 1)[0].responses
    assert text == "a text \N{SNOWMAN}"
    assert found[0]["token_ids"].tolist() == [1, 2]
    assert found[1]["name"] == "search"
    assert found[2] == turns[2]


def test_tensors_are_as_good_as_arrays(log):
    torch = pytest.importorskip("torch")
    (job,) = log.next_prompts(1)
    log_probs = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    log.add(job, [torch.tensor([1, 2, 3])] * 2, torch.tensor([1.0, 0.5]), old_log_probs=log_probs)
    log.take(1)
    (group,) = log.groups(0, 1)
    assert group.responses[0].tolist() == [1, 2, 3]
    assert group.rewards == [1.0, 0.5]
    assert group.old_log_probs[1].tolist() == [0, 0, 0]


def test_columns_of_arrow_are_as_good_as_lists(log):
    (job,) = log.next_prompts(1)
    log.add(job, pa.array([[1, 2], [3]]), pa.chunked_array([[1.0, 0.5]]))
    log.take(1)
    (group,) = log.groups(0, 1)
    assert [response.tolist() for response in group.responses] == [[1, 2], [3]]
    assert group.rewards == [1.0, 0.5]


def test_a_group_gives_rows_that_the_loader_reads(log):
    (job,) = log.next_prompts(1)
    log.add(job, ["a", "b"], [1, 0], policy_version=4)
    log.take(1)
    rows = log.groups(0, 1)[0].rows("name")
    assert rows[1] == {"prompt": job.prompt, "group": "name", "policy_version": 4, "response": "b", "reward": 0.0}


def test_the_first_answer_counts_and_later_ones_are_counted_as_late(log, path):
    (slow,) = log.next_prompts(1)
    log.give_back(slow)
    (fast,) = log.next_prompts(1)
    assert answer(log, fast, text="first")
    assert not answer(log, slow, text="second")
    assert not answer(log, fast, text="third")
    assert log.take(1) == 1
    assert log.groups(0, 1)[0].responses == ["first"] * 2
    assert log.state()["late"] == 2


def test_a_straggler_that_answers_before_the_next_attempt_counts(log):
    (slow,) = log.next_prompts(1)
    log.give_back(slow)
    (fast,) = log.next_prompts(1)
    assert answer(log, slow)
    assert log.heartbeat([fast]) == []
    assert not answer(log, fast)


def test_an_answer_that_another_process_gives_while_this_one_writes_is_the_one_that_counts(log, path, monkeypatch):
    (job,) = log.next_prompts(1)
    with RolloutLog(path) as other:
        write_group = log._folder.write_group

        def and_meanwhile(payload: bytes) -> Any:
            assert answer(other, job, text="meanwhile")
            return write_group(payload)

        monkeypatch.setattr(log._folder, "write_group", and_meanwhile)
        assert not answer(log, job, text="too late")
    log.take(1)
    assert log.groups(0, 1)[0].responses == ["meanwhile"] * 2
    assert status(path)["used_twice"] == []


def test_generators_may_be_threads(path):
    with RolloutLog(path, [str(n) for n in range(60)], group_size=1) as log:

        def generate() -> None:
            while jobs := log.next_prompts(3):
                counted.extend([answer(log, job, text=job.prompt) for job in jobs])

        counted: list[bool] = []
        threads = [threading.Thread(target=generate) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counted == [True] * 60
        assert log.take(60) == 60
        groups = log.groups(0, 60)
        assert sorted(int(group.responses[0]) for group in groups) == list(range(60))
        assert all(group.responses == [group.prompt] for group in groups)


OTHER_COLUMNS = {
    "log-probs": ({"old_log_probs": [[-1.0]] * 2, "values": [[0.5]] * 2}, "old_log_probs"),
    "no values": ({"values": None}, "values"),
    "a mask": ({"values": [[0.5]] * 2, "response_mask": [[1]] * 2}, "response_mask"),
    "a version": ({"values": [[0.5]] * 2, "policy_version": 3}, "policy_version"),
    "token rewards": ({"values": [[0.5]] * 2, "rewards": [[1.0]] * 2}, "rewards for each token"),
}


@pytest.mark.parametrize(("columns", "column"), OTHER_COLUMNS.values(), ids=OTHER_COLUMNS)
def test_a_group_with_other_columns_than_the_first_is_refused(log, columns, column):
    first, second = log.next_prompts(2)
    log.add(first, [[1], [2]], [1.0, 0.0], values=[[0.5]] * 2)
    before = log.state()
    with refused(SampleError, ordinal=second.ordinal, column=column):
        log.add(second, [[1], [2]], **{"rewards": [1.0, 0.0], **columns})
    assert log.state() == before
    log.drop(first.ordinal, "it is the wrong one")
    assert log.add(second, [[1], [2]], **{"rewards": [1.0, 0.0], **columns})


def test_a_group_that_becomes_the_first_while_this_one_writes_says_what_columns_there_are(log, path, monkeypatch):
    first, second = log.next_prompts(2)
    with RolloutLog(path) as other:
        write_group = log._folder.write_group

        def and_meanwhile(payload: bytes) -> Any:
            assert answer(other, first, version=3)
            return write_group(payload)

        monkeypatch.setattr(log._folder, "write_group", and_meanwhile)
        with refused(SampleError, ordinal=second.ordinal, column="policy_version", first="prompt 0"):
            answer(log, second)
    assert log.state()["in_flight"] == [second.ordinal]


# Folders that go away


def asked_of_a_folder_that_went_away(log: RolloutLog, jobs: list[Any]) -> dict[str, Any]:
    return {
        "add": lambda: answer(log, jobs[0]),
        "next_prompts": lambda: log.next_prompts(1),
        "give_back": lambda: log.give_back(jobs[0]),
        "drop": lambda: log.drop(0),
        "take": lambda: log.take(1),
        "state": log.state,
    }


def test_where_the_folder_was_deleted_nothing_is_said_to_have_been_written(log, path):
    jobs = log.next_prompts(2)
    shutil.rmtree(path)
    for call in asked_of_a_folder_that_went_away(log, jobs).values():
        with refused(StoreError, file=path / "ledger.journal", remedy="copy"):
            call()


def test_a_log_that_another_was_put_in_the_place_of_is_not_written_to(log, path):
    jobs = log.next_prompts(2)
    shutil.rmtree(path)
    with RolloutLog(path, PROMPTS, group_size=2, seed=0) as other:
        other.next_prompts(2)  # its journal is as long as the other was
        before = other.state()
        for call in asked_of_a_folder_that_went_away(log, jobs).values():
            with refused(StoreError, file=path / "ledger.journal", remedy="RolloutLog(path"):
                call()
        assert other.state() == before


@pytest.mark.parametrize("call", ["next_prompts", "take"])
def test_a_log_that_may_not_be_written_to_says_so(path, monkeypatch, call):
    with RolloutLog(path, PROMPTS, group_size=2) as log:
        answer(log, log.next_prompts(1)[0])
    with RolloutLog(path, PROMPTS) as log:

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(Path, "mkdir", refuse)  # a real folder would not refuse root
        before = log.state()
        with refused(StoreError, folder=path, reason=os.strerror(errno.EACCES), remedy="read_only=True"):
            getattr(log, call)(1)
        assert log.state() == before


def test_a_reason_may_hold_what_no_text_can(log, path):
    first, second = log.next_prompts(2)
    log.give_back(first, "an error said \ud800")
    log.drop(second.ordinal, "an error said \ud800")
    assert status(path)["dropped"] == {second.ordinal: "an error said \\ud800"}


BAD = {
    "rewards of two kinds": ({"responses": [[1], [2]], "rewards": [1.0, [1.0]]}, "some rewards are num", "rewards", 1),
    "three responses": ({"responses": ["a", "b", "c"]}, "3 responses for a group of 2", "responses", None),
    "one reward": ({"rewards": [1.0]}, "1 rewards for a group of 2", "rewards", None),
    "a text for responses": ({"responses": "ab"}, "must be a list", "responses", None),
    "a number for rewards": ({"rewards": 1.0}, "must be a list", "rewards", None),
    "a reward that is NaN": ({"rewards": [1.0, math.nan]}, "the reward is nan", "rewards", 1),
    "a reward that is infinite": ({"rewards": [math.inf, 1.0]}, "the reward is inf", "rewards", 0),
    "a reward that is missing": ({"rewards": [1.0, None]}, "without a reward", "rewards", 1),
    "a reward that is text": ({"rewards": ["good", 1.0]}, "rewards are numbers", "rewards", 0),
    "a token's reward that is NaN": ({"rewards": [[0, math.nan, 1], 1.0]}, "NaN or infinite", "rewards", 0),
    "rewards of other tokens": ({"rewards": [[0, 1], 1.0]}, "2 numbers for a response of 3 tokens", "rewards", 0),
    "log-probs of other tokens": (
        {"old_log_probs": [[0.0] * 3, [0.0]]},
        "1 numbers for a response of 2 tokens",
        "old_log_probs",
        1,
    ),
    "log-probs that are NaN": ({"ref_log_probs": [[math.nan] * 3, [0.0] * 2]}, "NaN", "ref_log_probs", 0),
    "values that are too large": ({"values": [[0, 0, 1e300], [0, 0]]}, "infinite", "values", 0),
    "values of one response": ({"values": [[0.0] * 3]}, "1 values for a group of 2", "values", None),
    "values that are text": ({"values": ["abc", [0, 0]]}, "values are numbers", "values", 0),
    "an empty response": ({"responses": [[], [1]]}, "an empty response", "responses", 0),
    "an empty text": ({"responses": ["a", ""]}, "an empty response", "responses", 1),
    "no response": ({"responses": ["a", None]}, "an empty response", "responses", 1),
    "a negative id": ({"responses": [[1, -1], [1]]}, "token id -1 is negative", "responses", 0),
    "an id outside the vocabulary": ({"responses": [[1], [1, 100]]}, "outside the vocabulary of 100", "responses", 1),
    "ids that are no numbers": ({"responses": [[1], [1.5]]}, "whole numbers", "responses", 1),
    "a table of ids": ({"responses": [[[1, 2]], [1]]}, "shape", "responses", 0),
    "a turn without a role": ({"responses": [[{"content": "a"}], "b"]}, "no role", "responses", 0),
    "a turn without anything": ({"responses": [[{"role": "tool"}], "b"]}, "neither content nor", "responses", 0),
    "a turn's id outside": (
        {"responses": [[{"role": "assistant", "token_ids": [100]}], "b"]},
        "outside the vocabulary",
        "responses",
        0,
    ),
    "a turn with something strange": (
        {"responses": [[{"role": "tool", "content": "a", "extra": object()}], "b"]},
        "cannot be written",
        "responses",
        None,
    ),
    "a mask of other tokens": ({"response_mask": [[1, 1], [1, 1]]}, "a mask of 2 numbers", "response_mask", 0),
    "a mask of other numbers": ({"response_mask": [[1, 2, 1], [1, 1]]}, "0 and 1", "response_mask", 0),
    "a mask of text": ({"responses": ["a", "b"], "response_mask": [[1], [1]]}, "token ids", "response_mask", 0),
    "a negative version": ({"policy_version": -1}, "policy_version must be", "policy_version", None),
    "half a version": ({"policy_version": 1.5}, "policy_version must be", "policy_version", None),
}


@pytest.mark.parametrize("case", BAD)
def test_an_answer_that_cannot_be_is_refused_before_anything_is_written(path, case):
    changes, match, column, response = BAD[case]
    with RolloutLog(path, PROMPTS, group_size=2, vocab_size=100) as log:
        (job,) = log.next_prompts(1)
        before = log.state(), sorted(file.stat().st_size for file in path.rglob("*"))
        with refused(SampleError, ordinal=0, column=column) as error:
            log.add(**{"job": job, "responses": [[1, 2, 3], [4, 5]], "rewards": [1.0, 0.0]} | changes)
        assert re.search(match, str(error.value))
        assert error.value.where.get("response") == response
        assert (log.state(), sorted(file.stat().st_size for file in path.rglob("*"))) == before
        assert log.add(job, [[1, 2, 3], [4, 5]], [1.0, 0.0])


def test_a_job_of_another_log_is_refused(log, tmp_path):
    with RolloutLog(tmp_path / "other", PROMPTS, group_size=2, seed=0) as other:
        (job,) = other.next_prompts(1)
    log.next_prompts(1)
    for call in (lambda: answer(log, job), lambda: log.give_back(job), lambda: log.heartbeat([job])):
        with refused(SpecError, parameter="job", remedy="next_prompts"):
            call()
    with refused(SpecError, "a int", parameter="job"):
        answer(log, 7)


# Trainers


@pytest.fixture
def answered(log: RolloutLog) -> RolloutLog:
    """All six, the last first; prompt n by version n."""
    for job in reversed(log.next_prompts(6)):
        answer(log, job, version=job.ordinal)
    return log


def taken(log: RolloutLog) -> list[int]:
    return [group.ordinal for group in log.groups(0, log.num_taken)]


def test_groups_are_taken_in_the_order_in_which_they_were_answered(answered):
    assert answered.take(2) == 2
    assert answered.take(2) == 2
    assert taken(answered) == [5, 4]
    assert answered.take(9) == 6
    assert taken(answered) == [5, 4, 3, 2, 1, 0]
    assert answered.is_over


def test_whoever_asks_first_decides_for_all_ranks(answered, path):
    with RolloutLog(path) as rank:
        assert answered.take(3, policy_version=6, max_staleness=1) == 1
        assert rank.take(1, policy_version=0, max_staleness=0) == 1  # it is decided, whatever this one would say
        assert rank.take(1) == 1
        assert taken(rank) == taken(answered) == [5]


def test_stale_groups_are_not_used_and_their_prompts_issued_again(answered):
    assert answered.take(4, policy_version=5, max_staleness=2) == 3
    assert taken(answered) == [5, 4, 3]
    assert answered.state()["stale"] == 3
    jobs = answered.next_prompts(9)
    assert [(job.ordinal, job.attempt) for job in jobs] == [(0, 2), (1, 2), (2, 2)]
    answer(answered, jobs[0], version=5)
    assert answered.take(4, policy_version=5, max_staleness=2) == 4


def test_stale_groups_may_be_dropped(path):
    with RolloutLog(path, PROMPTS[:1], group_size=1, stale="drop") as log:
        answer(log, log.next_prompts(1)[0], version=0)
        assert log.take(1, policy_version=5, max_staleness=2) == 0
        assert log.is_over
        assert status(path)["dropped"] == {0: "stale"}


def test_take_waits_for_answers(log, path):
    (job,) = log.next_prompts(1)
    with RolloutLog(path) as trainer:
        assert trainer.take(1, timeout=0.05) == 0
        later = threading.Timer(0.1, answer, [log, job])
        later.start()
        assert trainer.take(1, timeout=240) == 1
        later.join()


def test_take_does_not_wait_for_what_will_never_come(path):
    with RolloutLog(path, PROMPTS[:1], group_size=1) as log:
        answer(log, log.next_prompts(1)[0])
        assert log.take(5, timeout=600) == 1


def test_weights_that_were_restored_may_decide_at_a_lower_version_and_that_is_said_once(answered, caplog):
    answered.take(1, policy_version=7)
    assert answered.take(2, policy_version=6) == 2
    assert answered.take(3, policy_version=6) == 3
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "policy_version=6, and groups were decided on at 7 before"
    ]


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        ({"num_groups": -1}, "num_groups"),
        ({"num_groups": 1.5}, "num_groups"),
        ({"num_groups": 1, "policy_version": -1}, "policy_version"),
        ({"num_groups": 1, "max_staleness": 1}, "policy_version"),
        ({"num_groups": 1, "policy_version": 1, "max_staleness": -1}, "max_staleness"),
        ({"num_groups": 1, "timeout": "long"}, "timeout"),
    ],
)
def test_what_cannot_be_taken_is_refused(answered, call, parameter):
    with refused(SpecError, parameter=parameter):
        answered.take(**call)
    assert answered.num_taken == 0


def test_groups_that_were_not_taken_cannot_be_read(answered):
    answered.take(2)
    for first, last in ((0, 3), (2, 1), (-1, 1)):
        with refused(RowIndexError, f"{first} to {last}", remedy="log.take("):
            answered.groups(first, last)


# Uses


def test_each_group_is_used_once_unless_asked_otherwise(answered):
    assert answered.take_uses(4) == 4
    assert answered.uses(0, 4).tolist() == [0, 1, 2, 3]
    assert [group.ordinal for group in answered.groups_at([1, 3])] == [4, 2]


def test_groups_are_used_in_rounds_each_pass_in_another_order(path):
    with RolloutLog(path, PROMPTS, group_size=1, samples_per_insert=3, round_groups=4) as log:
        for job in log.next_prompts(5):
            answer(log, job)
        assert [log.groups_needed(n) for n in (0, 1, 4, 5, 12, 13)] == [0, 1, 4, 4, 4, 5]
        assert log.take_uses(2) == 2
        assert log.take_uses(5) == 12
        uses = log.uses(0, 12).tolist()
        assert uses[:4] == [0, 1, 2, 3]
        assert [sorted(uses[n : n + 4]) for n in (4, 8)] == [[0, 1, 2, 3]] * 2
        assert uses[4:8] != uses[8:]
        assert log.take_uses(16) == 13
        with refused(RowIndexError, "0 to 14", remedy="log.take_uses("):
            log.uses(0, 14)
        # The end: the last round has two groups, and three passes as well.
        answer(log, log.next_prompts(1)[0])
        assert log.take_uses(99) == 18
        assert log.uses(0, 12).tolist() == uses
        last = log.uses(12, 18).tolist()
        assert last[:2] == [4, 5]
        assert [sorted(last[n : n + 2]) for n in (2, 4)] == [[4, 5]] * 2
        assert [group.ordinal for group in log.groups_at(range(12, 18))] == last


def test_the_order_of_later_passes_is_pinned(path):
    # Positions in checkpoints are uses: if this changes, they are of other groups.
    with RolloutLog(path, PROMPTS, group_size=1, seed=7, samples_per_insert=2, round_groups=6) as log:
        for job in log.next_prompts(6):
            answer(log, job)
        log.take(6)
        assert log.uses(6, 12).tolist() == [5, 4, 2, 3, 1, 0]


# What is there


def test_the_state_is_a_small_dict(log, path):
    jobs = log.next_prompts(5)
    for job in jobs[:3]:
        answer(log, job, version=job.ordinal)
    log.give_back(jobs[4])
    log.take(1, policy_version=1, max_staleness=0)
    state = log.state()
    assert json.loads(json.dumps(state)) == state
    assert state == {
        "cursor": 5,
        "in_flight": [3],
        "again": [0, 4],
        "waiting": 1,
        "consumed": 1,
        "stale": 1,
        "dropped": 0,
        "late": 0,
        "prompts": state["prompts"],
        "journal": 7,
    }
    assert repr(log).splitlines() == [
        f"RolloutLog({str(path)!r}): 6 prompts, 1 epoch, groups of 2",
        "  5 issued: 1 in flight, 2 to be issued again, 1 waiting, 1 taken, 0 dropped",
    ]


def test_a_log_is_over_when_everything_is_taken_or_dropped(path):
    with RolloutLog(path, PROMPTS[:2], group_size=1, epochs=2) as log:
        jobs = log.next_prompts(9)
        assert len(jobs) == 4
        for job in jobs[:3]:
            answer(log, job)
        log.take(3)
        assert not log.is_over
        log.drop(3)
        assert log.is_over
        assert log.next_prompts(1, timeout=600) == []


# Damage


@pytest.fixture
def finished(answered: RolloutLog, path: Path, tmp_path: Path) -> Path:
    """A log whose last record is a decision about all groups."""
    answered.take(6)
    answered.close()
    return path


def opened(path: Path) -> dict[str, Any]:
    with RolloutLog(path) as log:
        return log.state()


def test_a_journal_cut_at_any_byte_of_its_last_record_is_without_it_and_goes_on(finished):
    ledger = finished / "ledger.journal"
    whole = ledger.read_bytes()
    *_, before, _ = journal_module.read_records(ledger)
    for size in range(before.end_offset, len(whole)):
        ledger.write_bytes(whole[:size])
        assert opened(finished)["consumed"] == 0
        with RolloutLog(finished) as log:
            assert log.take(6) == 6
    ledger.write_bytes(whole)
    assert opened(finished)["consumed"] == 6


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_a_flipped_bit_in_the_journal_is_damage_or_the_last_record_is_gone(finished, mask, monkeypatch):
    monkeypatch.setattr(journal_module, "_LOOKS", 1)
    ledger = finished / "ledger.journal"
    whole = ledger.read_bytes()
    for offset in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[offset] ^= mask
        ledger.write_bytes(changed)
        with pytest.raises(StoreError) as error:
            opened(finished)
        assert error.value.where["file"] == ledger


def test_a_flipped_bit_in_a_group_is_damage_when_it_is_read(finished, monkeypatch):
    monkeypatch.setattr(journal_module, "_LOOKS", 1)
    (groups,) = (finished / "groups").iterdir()
    whole = groups.read_bytes()
    for offset in range(journal_module.HEAD_BYTES, len(whole), 5):
        changed = bytearray(whole)
        changed[offset] ^= 0x10
        groups.write_bytes(changed)
        with RolloutLog(finished) as log, pytest.raises(StoreError) as error:
            log.groups(0, 6)
        assert error.value.where["file"] == groups
    groups.write_bytes(whole)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_file_of_groups_that_is_gone_or_cut_is_named_and_counted_as_lost(finished, damage):
    (groups,) = (finished / "groups").iterdir()
    size = groups.stat().st_size
    if damage == "gone":
        groups.unlink()
    else:
        os.truncate(groups, size - 1)
    with RolloutLog(finished) as log, pytest.raises(StoreError) as error:
        log.groups(0, 6)
    assert error.value.where["file"] == groups
    assert status(finished)["lost"] == ([0, 1, 2, 3, 4, 5] if damage == "gone" else [0])


def test_a_group_of_another_log_is_not_taken_for_this_ones(finished, tmp_path):
    with RolloutLog(tmp_path / "other", PROMPTS, group_size=2, seed=0) as other:
        for job in reversed(other.next_prompts(6)):
            answer(other, job, version=job.ordinal)
    (mine,) = (finished / "groups").iterdir()
    (theirs,) = (tmp_path / "other" / "groups").iterdir()
    shutil.copy(theirs, mine)
    with RolloutLog(finished) as log, refused(StoreError, file=mine, byte=44):
        log.groups(0, 1)


def test_a_group_in_the_place_of_another_is_noticed(finished):
    (groups,) = (finished / "groups").iterdir()
    head, records = journal_module.read_head(groups), list(journal_module.read_records(groups))
    journal = journal_module.Journal.create(groups, 1, head.owner_id)
    for record in records:
        journal.write(record.number, record.payload.replace(b"yes", b"no!"))
    journal.close()
    with RolloutLog(finished) as log, refused(StoreError, file=groups, byte=44):
        log.groups(0, 1)


def test_events_that_contradict_each_other_are_damage(finished):
    ledger = finished / "ledger.journal"
    *_, last = journal_module.read_records(ledger)
    journal = journal_module.Journal.open_to_append(ledger)
    journal.write(last.number + 1, last.payload)
    journal.close()
    with refused(StoreError, file=ledger, record=last.number + 1):
        RolloutLog(finished)


@pytest.mark.parametrize("payload", [b"", b"\x93\x01\x02\x03", b"\xc1" * 20])
def test_a_group_that_is_no_group_is_refused(payload):
    with refused(StoreError, file="a.journal"):
        decode_group(payload, 2, file="a.journal")


# A full disk, and interrupts


def test_a_full_disk_leaves_the_log_as_it_was_and_it_goes_on_later(tmp_path):
    script = """
import resource, signal, sys, batchwright as bw
from batchwright.base.errors import OutOfSpaceError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = bw.RolloutLog(sys.argv[1], [str(n) for n in range(4)], group_size=1, shuffle=False)
first, second = log.next_prompts(2)
log.add(first, ["small"], [1.0])
state = log.state()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ((log.path / "ledger.journal").stat().st_size + 5, hard))
for call in (
    lambda: log.add(second, ["large" * 1000], [1.0]),       # no room for the group
    lambda: log.add(second, ["small"], [1.0]),              # room for the group, none for the event
    lambda: log.next_prompts(2), lambda: log.take(1), lambda: log.drop(1), lambda: log.give_back(second),
):
    try:
        call()
    except OutOfSpaceError as error:
        assert "free some space" in error.remedy
    else:
        raise SystemExit("no error")
    assert log.state() == state, (log.state(), state)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert log.add(second, ["large" * 1000], [1.0]) and log.take(2) == 2
print([group.responses[0][:5] for group in log.groups(0, 2)], [job.ordinal for job in log.next_prompts(2)])
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log")], capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr) == ("['small', 'large'] [2, 3]\n", "")


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_in_the_middle_of_a_write_leaves_a_log_that_agrees_with_its_journal(log, path, monkeypatch, when):
    jobs = log.next_prompts(2)
    write = log._folder.write

    def interrupted(payload: bytes) -> Any:
        if when == "after":
            write(payload)
        raise KeyboardInterrupt

    monkeypatch.setattr(log._folder, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer(log, jobs[0])
    monkeypatch.undo()
    assert log.state() == opened(path)
    assert log.state()["waiting"] == (when == "after")
    assert answer(log, jobs[0]) == (when == "before")
    assert answer(log, jobs[1])
    assert log.take(9) == 2


def test_the_public_name_is_the_class():
    assert bw.RolloutLog is RolloutLog


def test_an_engine_that_writes_into_the_messages_it_was_given_does_not_change_what_was_asked(path):
    asked = [{"role": "user", "content": "2 + 2?"}]
    with RolloutLog(path, [{"prompt": asked}], group_size=1) as log:
        (job,) = log.next_prompts(1)
        job.prompt.append({"role": "assistant", "content": "4"})
        log.add(job, ["4"], [1.0])
        log.take(1)
        assert log.groups(0, 1)[0].prompt == asked
