"""batchwright rollouts: where every prompt of a log is, and all that happened to one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.base.journal import Journal
from batchwright.rollouts.log.ledger import encode


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of 9 prompts: 0 stale, 1 and 2 taken, 3 waiting, 4 given back, 5 dropped, 6 in flight, of a process that died."""
    with bw.RolloutLog(tmp_path / "log", [str(n) for n in range(9)], group_size=2, shuffle=False) as log:
        jobs = log.next_prompts(7)
        for job in jobs[:4]:
            log.add(job, ["a", "b"], [1.0, 0.0], policy_version=job.ordinal)
        log.take(2, policy_version=2, max_staleness=1)
        log.give_back(jobs[4], "no room")
        log.drop(5, "a bad one")
        log.add(jobs[0], ["a", "b"], [1.0, 0.0])
    return tmp_path / "log"


def test_status_says_where_every_prompt_is(log, batchwright):
    ran = batchwright("rollouts status", str(log))
    assert ran.code == 0
    holder, seconds = re.search(r"attempt 1, (\S+), for (\d+) s", ran.out).groups()
    assert ran.out.splitlines()[1:] == [
        f"  prompts    9 ({bw.RolloutLog(log).state()['prompts'][:16]}), 1 epoch, groups of 2",
        "  issued     7 of 9",
        "  in flight  1",
        f"    6: attempt 1, {holder}, for {seconds} s, its holder died",
        "  again      2 (0, 4)",
        "  waiting    1 answered, and not taken",
        "  taken      2",
        "  dropped    1 (5)",
        "  stale      1 answer",
        "  late       1 answer",
        "  lost       0",
        "  used twice 0",
    ]


def test_status_as_json(log, batchwright):
    facts = json.loads(batchwright("rollouts status", str(log), "--json").out)
    assert (facts["lost"], facts["used_twice"], facts["taken"], facts["again"]) == ([], [], 2, [0, 4])
    assert facts["dropped"] == {"5": "a bad one"}
    assert [(lease["ordinal"], lease["is_dead"]) for lease in facts["in_flight"]] == [(6, True)]


def test_status_of_a_checkpoint_says_what_comes_again(log, batchwright):
    ran = batchwright("rollouts status", str(log), "--position", "2")
    assert ran.code == 0
    assert "checkpoint at row 2: 1 group used; 1 more were taken after it, and come again in the same order" in ran.out


def test_a_checkpoint_that_used_what_is_not_in_the_log_is_a_loss(log, batchwright):
    ran = batchwright("rollouts status", str(log), "--position", "6")
    assert ran.code == 1
    assert "missing    1 use of the checkpoint" in ran.out


def test_a_group_whose_content_is_gone_is_a_loss(log, batchwright):
    for file in (log / "groups").iterdir():
        file.unlink()
    ran = batchwright("rollouts status", str(log))
    assert ran.code == 1
    assert "  lost       3 (1, 2, 3)" in ran.out


def test_show_tells_all_that_happened_to_a_prompt_in_order(log, batchwright):
    lines = batchwright("rollouts show", str(log), "0").out.splitlines()
    assert lines[0] == "prompt 0: row 0 in epoch 0"
    assert lines[1:4] == ["  0", "    0         1  a", "    1         0  b"]
    assert [line[23:].split(":")[0] for line in lines[4:]] == ["issued", "answered", "stale", "answered too late"]
    told = json.loads(batchwright("rollouts show", str(log), "2", "--json").out)
    assert [event["event"] for event in told["events"]] == ["issued", "answered", "taken"]
    assert told["events"][2]["group"] == 1
    (_, back) = json.loads(batchwright("rollouts show", str(log), "4", "--json").out)["events"]
    assert (back["event"], back["reason"]) == ("given back", "no room")


def test_show_finds_the_prompt_of_a_row_that_a_trainer_used(log, batchwright):
    batch = bw.RolloutDataLoader(bw.RolloutLog(log), "bytes", batch_size=4, framework="numpy").get_batch()
    for position, ordinal, number in zip(*(batch.metadata[n] for n in ("position", "ordinal", "answer")), strict=True):
        told = json.loads(batchwright("rollouts show", str(log), "--position", str(position), "--json").out)
        assert (told["ordinal"], told["response"]) == (ordinal, number)
        assert told["answer"] == {"prompt": str(ordinal), "responses": ["a", "b"], "rewards": [1.0, 0.0]}
    assert "  b    at position 3" in batchwright("rollouts show", str(log), "--position", "3").out


def test_show_tells_what_happened_though_the_content_is_gone(log, batchwright):
    for file in (log / "groups").iterdir():
        file.unlink()
    ran = batchwright("rollouts show", str(log), "1")
    assert ran.code == 0
    assert "a file of groups is gone" in ran.out
    assert "taken" in ran.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "--position", "4"], "position 4"),
        (["show", "1", "--position", "3"], "which prompt?"),
        (["show"], "which prompt?"),
        (["show", "7"], "prompt 7"),
        (["status", "7"], "unrecognized arguments: 7"),
    ],
)
def test_what_cannot_be_answered_says_why(log, batchwright, arguments, said):
    what, *rest = arguments
    ran = batchwright("rollouts", what, str(log), *rest)
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.parametrize(("asked", "remedy"), [("0", "next_prompts issues"), ("--position 0", "take some first")])
def test_show_of_a_log_where_nothing_happened_yet_says_what_must_come_first(tmp_path, batchwright, asked, remedy):
    bw.RolloutLog(tmp_path / "log", ["a prompt"], group_size=2).close()
    assert remedy in batchwright(f"rollouts show {tmp_path}/log {asked}").err


def test_a_folder_without_a_log_is_named(tmp_path, batchwright):
    ran = batchwright("rollouts status", str(tmp_path))
    assert ran.code == 2
    assert str(tmp_path) in ran.err


def test_a_log_with_an_event_that_cannot_be_is_named(log, batchwright):
    journal = Journal.open_to_append(log / "ledger.journal")
    journal.write(journal.last_number + 1, encode(["drop", 0.0, "w", [1], ""]))
    journal.close()
    for arguments in (["status", str(log)], ["show", str(log), "1"]):
        ran = batchwright("rollouts", *arguments)
        assert ran.code == 2
        assert "ledger.journal" in ran.err
