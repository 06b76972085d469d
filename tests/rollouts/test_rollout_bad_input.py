"""Bad rollouts: one clear error each, which names the row, the column and the remedy; and data that is as before.

One case for each line of the promise; the test asserts what the error is, what it names and advises. Each is met in
rows from memory and in an Arrow table, where one can hold it.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import batchwright as bw
from batchwright.rollouts import read_rollouts
from refusals import refused

ROW = {"prompt": [1, 2], "response": [3, 4, 5], "reward": 1.0, "group": "g"}
NAN = math.nan


def rows(**changed: Any) -> list[dict[str, Any]]:
    """Three good rows, of which number 1 is changed; None takes a key away."""
    bad = {name: value for name, value in {**ROW, **changed}.items() if value is not None}
    return [dict(ROW), bad, dict(ROW)]


def all_rows(*bad: Any, **given: Any) -> list[dict[str, Any]]:
    """Three rows with more keys, of which number 1 has other values: all_rows(values=(good, bad))."""
    return [ROW | {name: pair[number == 1] for name, pair in given.items()} for number in range(3)]


def turns(*some: dict[str, Any]) -> list[dict[str, Any]]:
    return rows(response=list(some))


@dataclass
class Case:
    data: Any
    names: dict[str, Any]
    """What `where` must hold."""
    says: str
    advises: str
    error: type[Exception] = bw.SampleError
    settings: dict[str, Any] = field(default_factory=dict)
    only_rows: bool = False
    """Whether a table of Arrow cannot hold it."""


CASES = {
    "NaN reward": Case(rows(reward=NAN), {"row": 1, "column": "reward", "group": "g"}, "'reward' is nan", "finite"),
    "infinite reward": Case(rows(reward=math.inf), {"row": 1, "column": "reward"}, "'reward' is inf", "finite"),
    "NaN among rewards of tokens": Case(
        all_rows(reward=([0, 0, 1.0], [0, NAN, 1.0])),
        {"row": 1, "column": "reward"},
        "'reward' of token 1 is nan",
        "finite",
    ),
    "missing reward": Case(
        rows(reward=None), {"row": 1, "column": "reward"}, "this row has no 'reward', and 2 of 3 have one", "every row"
    ),
    "missing rewards, by their other name": Case(
        [{"prompt": [1], "response": [2], "rewards": reward} for reward in (1.0, None)],
        {"row": 1, "column": "rewards"},
        "this row has no 'rewards', and 1 of 2 have one",
        "'rewards' in every row",
    ),
    "reward is text": Case(
        rows(reward="high"), {"row": 1, "column": "reward"}, "it is 'high', not a number", "a number", only_rows=True
    ),
    "reward is a list in one row": Case(
        rows(reward=[1.0]), {"row": 1, "column": "reward"}, r"it is \[1.0\], not a number", "a number", only_rows=True
    ),
    "both reward and rewards": Case(
        all_rows(rewards=([1, 1, 1], [1, 1, 1])), {"column": "reward"}, "both 'reward' and 'rewards'", "columns="
    ),
    "an empty prompt": Case(
        rows(prompt=[]), {"row": 1, "column": "prompt"}, "nothing could predict the first token", "BOS token"
    ),
    "a reward for what a tool said": Case(
        all_rows(response_mask=([1, 0, 1], [1, 0, 1]), reward=([0, 0, 1.0], [0, 0.5, 1.0])),
        {"row": 1, "column": "reward"},
        "a reward of 0.5 at a token that the policy did not write",
        "last token that the policy wrote before",
    ),
    "missing response": Case(rows(response=None), {"row": 1, "column": "response"}, "no 'response'", "every row"),
    "group in some rows only": Case(rows(group=None), {"row": 1, "column": "group"}, "no 'group'", "or in none"),
    "values in some rows only": Case(
        rows(values=[1.0, 2.0, 3.0]), {"row": 0, "column": "values"}, "1 of 3 have one", "or in none"
    ),
    "too few log-probabilities": Case(
        all_rows(old_log_probs=([-1.0] * 3, [-1.0] * 2)),
        {"row": 1, "column": "old_log_probs", "group": "g"},
        "mismatched lengths: 2 of 'old_log_probs' for a response of 3 tokens",
        "for each token of the response",
    ),
    "log-probabilities neither of all nor of trained tokens": Case(
        all_rows(response_mask=([1, 0, 1], [1, 0, 1]), ref_log_probs=([-1.0] * 2, [-1.0])),
        {"row": 1, "column": "ref_log_probs"},
        "1 of 'ref_log_probs' for a response of 3 tokens, of which 2 are trained",
        "in all rows alike",
    ),
    "too many rewards": Case(
        all_rows(reward=([0, 0, 1.0], [0, 0, 0, 1.0])), {"row": 1, "column": "reward"}, "4 of 'reward'", "each token"
    ),
    "one value for a row": Case(
        all_rows(values=([1.0] * 3, 1.0)), {"row": 1, "column": "values"}, "a float, not a list", "", only_rows=True
    ),
    "NaN value": Case(
        all_rows(values=([1.0] * 3, [1.0, NAN, 1.0])), {"row": 1, "column": "values"}, "of token 1 is nan", "finite"
    ),
    "a value that 32 bits cannot hold": Case(
        all_rows(values=(np.ones(3), np.array([1.0, 1e300, 1.0]))),
        {"row": 1, "column": "values"},
        "of token 1 is inf",
        "finite",
    ),
    "null among values": Case(
        all_rows(values=([1.0] * 3, [1.0, None, 1.0])), {"row": 1, "column": "values"}, "number 1 of it is null", ""
    ),
    "values without rewards": Case(
        [{"prompt": [1], "response": [2], "values": [0.5]}],
        {"row": 0, "column": "reward"},
        "'values' are there, and no 'reward'",
        "'reward' in every row, or no 'values'",
    ),
    "values without rewards, which have another name": Case(
        [{"prompt": [1], "response": [2], "values": [0.5], "score": 1.0}],
        {"row": 0, "column": "reward"},
        "no 'reward'",
        "columns={'reward': 'score'}",
    ),
    "a mask of another length": Case(
        all_rows(response_mask=([1, 1, 1], [1, 1])),
        {"row": 1, "column": "response_mask"},
        "2 of 'response_mask' for a response of 3",
        "0 or 1 for each token",
    ),
    "a mask that is none": Case(
        all_rows(response_mask=([1, 1, 1], [1, 2, 1])),
        {"row": 1, "column": "response_mask"},
        "neither 0 nor 1",
        "1 for",
    ),
    "an id out of the vocabulary": Case(
        rows(response=[3, 100, 4]),
        {"row": 1, "column": "response"},
        "token 1 of 'response' is 100, outside a vocabulary of 100",
        "ids from 0 to 99",
        settings={"vocab_size": 100},
    ),
    "an id out of the tokenizer's vocabulary": Case(
        rows(prompt=[3, 300]),
        {"row": 1, "column": "prompt"},
        "is 300, outside",
        "vocab_size=",
        settings={"tokenizer": "bytes"},
    ),
    "a negative id": Case(rows(response=[3, -100]), {"row": 1, "column": "response"}, "token 1 .* is -100", "padding"),
    "an id that no array can hold": Case(
        rows(response=[3, 2**31]), {"row": 1, "column": "response"}, str(2**31), "", only_rows=True
    ),
    "an id that is no whole number": Case(
        rows(response=[3, 1.5]), {"row": 1, "column": "response"}, "number 1 of it is 1.5", "", only_rows=True
    ),
    "ids that are floats in all rows": Case(
        [ROW | {"response": [3.0]}], {"row": 0, "column": "response"}, "whole numbers|not whole", ""
    ),
    "an array of two dimensions": Case(
        [ROW | {"response": np.array([[1, 2]])}],
        {"row": 0, "column": "response"},
        "it has 2 dimensions",
        "reshape",
        only_rows=True,
    ),
    "an empty response": Case(rows(response=[]), {"row": 1, "column": "response"}, "an empty response", "EOS token"),
    "a response that is a number": Case(
        rows(response=7), {"row": 1, "column": "response"}, "it is a int", "text, or token ids", only_rows=True
    ),
    "text without a tokenizer": Case(
        rows(response="four"),
        {"parameter": "tokenizer", "row": 1, "column": "response"},
        "text needs a tokenizer",
        "'bytes'",
        bw.SpecError,
        only_rows=True,
    ),
    "text in all rows, and no tokenizer": Case(
        [ROW | {"question": "one and one?"}] * 2,
        {"parameter": "tokenizer", "row": 0, "column": "question"},
        "text needs a tokenizer",
        "token ids in place of text",
        bw.SpecError,
        {"columns": {"prompt": "question"}},
    ),
    "messages without a tokenizer": Case(
        rows(prompt=[{"role": "user", "content": "hi"}]),
        {"parameter": "tokenizer", "row": 1, "column": "prompt"},
        "a prompt is messages, and they need a tokenizer",
        "token ids in place of messages",
        bw.SpecError,
        only_rows=True,
    ),
    "turns of text without a tokenizer": Case(
        [
            ROW | {"response": [{"role": "assistant", "token_ids": [1]}]},
            ROW | {"response": [{"role": "assistant", "token_ids": [1]}, {"role": "tool", "content": "four"}]},
        ],
        {"parameter": "tokenizer", "row": 1, "column": "response"},
        "text needs a tokenizer",
        "token ids in place of text",
        bw.SpecError,
    ),
    "text of several kinds, and no tokenizer": Case(
        [
            ROW | {"response": [{"role": "assistant", "token_ids": [1]}]},
            ROW | {"response": "four"},
            ROW | {"prompt": "two", "response": [{"role": "assistant", "content": "four"}]},
        ],
        {"parameter": "tokenizer", "row": 1, "column": "response"},
        "text needs a tokenizer",
        "token ids",
        bw.SpecError,
        only_rows=True,
    ),
    "half a character": Case(
        rows(response="\ud800"),
        {"row": 1, "column": "response"},
        "half a surrogate pair at character 0",
        "replace",
        settings={"tokenizer": "bytes"},
        only_rows=True,
    ),
    "a turn without content": Case(
        turns({"role": "assistant", "token_ids": [1]}, {"role": "tool"}),
        {"row": 1, "column": "response"},
        "turn 1 has no token_ids, and its content is null",
        "token_ids",
        only_rows=True,
    ),
    "a turn whose ids are none": Case(
        [ROW | {"response": [{"role": "tool", "token_ids": ids} for ids in some]} for some in ([[1], [2]], [[1, "b"]])],
        {"row": 1, "column": "response"},
        "number 1 of it is 'b'",
        "",
        only_rows=True,
    ),
    "a turn of an unknown role": Case(
        turns({"role": "gpt", "token_ids": [1]}),
        {"row": 1, "column": "response"},
        "turn 0 has the role 'gpt'",
        "'assistant'",
        only_rows=True,
    ),
    "a mask beside turns": Case(
        [ROW | {"response": [{"role": "assistant", "token_ids": [1]}], "response_mask": [1]}],
        {"row": 0, "column": "response_mask"},
        "beside turns",
        "'train'",
    ),
    "messages without a template": Case(
        [ROW | {"prompt": [{"role": "user", "content": "hi"}]}],
        {"parameter": "chat_template"},
        "has no chat template",
        "chatml",
        bw.TokenizerError,
        {"tokenizer": "bytes"},
    ),
    "a message of an unknown role": Case(
        [ROW | {"prompt": [{"role": "usr", "content": "hi"}], "response": "yes"}],
        {"row": 0, "column": "prompt"},
        "unknown role: .*'usr'",
        "a role that is known",
        settings={"tokenizer": "bytes", "chat_template": "chatml"},
    ),
    "a template that nothing needs": Case(
        rows(),
        {"parameter": "chat_template"},
        "none is",
        "no chat_template",
        bw.SpecError,
        {"tokenizer": "bytes", "chat_template": "chatml"},
    ),
    "a group that never completes": Case(
        [ROW | {"group": group} for group in ("g", "h", "g", "h", "h")],
        {"row": 0, "column": "group", "group": "g", "rows": "0, 2"},
        "group 'g' has 2 of 3 rows",
        "all 3 rows of every group, or leave the group out",
        settings={"group_size": 3},
    ),
    "a group with too many rows": Case(
        [ROW, ROW, ROW], {"group": "g"}, "group 'g' has 3 of 2 rows", "another name", settings={"group_size": 2}
    ),
    "a size of groups, and no group": Case(
        [{"prompt": [1], "response": [2], "group_id": 3}],
        {"parameter": "group_size"},
        "no row has a 'group'",
        "columns={'group': 'group_id'}",
        bw.SpecError,
        {"group_size": 2},
    ),
    "a group that is NaN": Case(
        rows(group=NAN), {"row": 1, "column": "group"}, "'group' is NaN", "a name", only_rows=True
    ),
    "values that are an object": Case(
        all_rows(values=([1.0] * 3, {"a": 1})), {"row": 1, "column": "values"}, "it is a dict", "a list", only_rows=True
    ),
    "a group that is a list": Case(
        rows(group=["g"]), {"row": 1, "column": "group"}, "is a list", "a name", only_rows=True
    ),
    "a policy version that is no number": Case(
        all_rows(policy_version=(1, 1.5)),
        {"row": 1, "column": "policy_version"},
        "not a whole number",
        "whole",
        only_rows=True,
    ),
    "a key that others call otherwise": Case(
        [{"prompt": [1], "completion": [2]}],
        {"row": 0, "column": "response"},
        "no row has a 'response'",
        "columns={'response': 'completion'}",
    ),
    "a misspelt key": Case(
        [{"promt": [1], "response": [2]}],
        {"row": 0, "column": "prompt"},
        "no row has a 'prompt'",
        "columns={'prompt': 'promt'}",
    ),
    "an unknown key to rename": Case(
        rows(),
        {"parameter": "columns"},
        "no key 'respones'",
        "'response'",
        bw.SpecError,
        {"columns": {"respones": "x"}},
    ),
    "a column to rename that is not there": Case(
        rows(),
        {"parameter": "columns"},
        "which no row has",
        "'reward'",
        bw.SpecError,
        {"columns": {"reward": "rewards"}},
    ),
    "no rows": Case([], {"parameter": "rollout_data"}, "no rollouts|without rows", "row", bw.SpecError),
}


def as_rows(data: Any) -> Any:
    return data


def as_table(data: Any) -> Any:
    names = {name for row in data for name in row}
    return pa.Table.from_pylist([dict.fromkeys(sorted(names)) | row for row in data])


@pytest.mark.parametrize(
    ("name", "held"),
    [(name, held) for name in CASES for held in (as_rows, as_table)[: 1 + (not CASES[name].only_rows)]],
)
def test_bad_input_is_one_clear_error_and_changes_nothing(name: str, held: Callable[[Any], Any]) -> None:
    case = CASES[name]
    data = held(case.data)
    before = copy.deepcopy(data)

    with refused(case.error, remedy=case.advises, **case.names) as caught:
        read_rollouts(data, **case.settings)

    assert re.search(case.says, str(caught.value))
    assert repr(data) == repr(before)


def test_a_bad_row_of_a_file_is_named_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text((json.dumps(ROW) + "\n") * 5)
    (tmp_path / "b.jsonl").write_text("\n".join(["", json.dumps(ROW), json.dumps(ROW | {"response": [-1]}), ""]))
    with refused(bw.SampleError, -1, file=tmp_path / "b.jsonl", row=2, line=3):
        read_rollouts(tmp_path / "*.jsonl")


def test_a_bad_row_of_a_table_in_pieces_is_named_by_its_number_among_all() -> None:
    table = pa.concat_tables([as_table([ROW, ROW]), as_table([ROW, ROW | {"response": [1, None]}])])
    with refused(bw.SampleError, "number 1", "null", row=3, column="response"):
        read_rollouts(table)


def test_a_line_that_is_not_json_is_named_and_cannot_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps(ROW) + "\n{\n")
    with refused(bw.SourceError, file=tmp_path / "r.jsonl", line=2) as caught:
        read_rollouts(tmp_path / "r.jsonl")

    assert "skip" not in caught.value.remedy


def test_a_damaged_arrow_file_is_named(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([ROW] * 100)
    with pa.ipc.new_file(tmp_path / "r.arrow", table.schema) as writer:
        writer.write_table(table)
    whole = (tmp_path / "r.arrow").read_bytes()
    (tmp_path / "r.arrow").write_bytes(whole[: len(whole) // 2])
    with refused(bw.SourceError, "Arrow", file=tmp_path / "r.arrow"):
        read_rollouts(tmp_path / "r.arrow")


@pytest.mark.parametrize(
    ("data", "says", "where"),
    [
        (ROW, "one dict", {"parameter": "rollout_data"}),
        (7, "one int", {"parameter": "rollout_data"}),
        ([ROW, "a response"], "a str", {"row": 1}),
        ([dict, dict], "a type", {"row": 0}),
    ],
    ids=["one rollout", "a number", "text among rows", "classes"],
)
def test_what_is_no_rollout_at_all_is_a_type_error(data: Any, says: str, where: dict[str, Any]) -> None:
    with refused(bw.SampleTypeError, says, **where) as caught:
        read_rollouts(data)

    assert isinstance(caught.value, TypeError)


def test_a_dict_of_columns_is_told_how_it_becomes_a_table() -> None:
    with refused(bw.SampleTypeError, "one dict") as caught:
        read_rollouts({name: [value] for name, value in ROW.items()})
    assert "pyarrow.table(columns)" in str(caught.value.remedy)
