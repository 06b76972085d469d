"""Rows as people have them become one normal form of a conversation, or an error that says what is wrong, and where."""

from __future__ import annotations

import datetime
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchwright.base.errors import SpecError
from batchwright.base.fingerprint import fingerprint
from batchwright.prepare.chat.formats import FORMATS, Layout, detect, layout_of
from batchwright.prepare.chat.messages import ChatError
from batchwright.sources.formats import Malformed, format_for, parse_json
from batchwright.sources.units import Span, Unit, error_of, read_unit
from refusals import refused

USER, ASSISTANT = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED_AND_ANSWERED = [USER, ASSISTANT]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def messages_of(row: dict[str, Any], layout: Layout | None = None) -> list[dict[str, Any]]:
    found = (layout or detect(row)).normalise(row)
    assert isinstance(found, dict)
    return found["messages"]


def read(row: dict[str, Any]) -> Any:
    return detect(row).normalise(row)


# Formats

ROWS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "messages": ("messages", {"messages": [SYSTEM, *ASKED_AND_ANSWERED]}, [SYSTEM, USER, ASSISTANT]),
    "messages in conversation": ("messages", {"conversation": ASKED_AND_ANSWERED}, ASKED_AND_ANSWERED),
    "messages in conversations": ("messages", {"conversations": ASKED_AND_ANSWERED}, ASKED_AND_ANSWERED),
    "messages beside a prompt": ("messages", {"prompt": "2 + 2?", "messages": ASKED_AND_ANSWERED}, ASKED_AND_ANSWERED),
    "messages with a system column": (
        "messages",
        {"system": "Be brief.", "messages": ASKED_AND_ANSWERED},
        [SYSTEM, USER, ASSISTANT],
    ),
    "messages whose system column says the same": (
        "messages",
        {"system": "Be brief.", "messages": [SYSTEM, *ASKED_AND_ANSWERED]},
        [SYSTEM, USER, ASSISTANT],
    ),
    "sharegpt": (
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "2 + 2?"},
                {"from": "gpt", "value": "4"},
            ]
        },
        [SYSTEM, USER, ASSISTANT],
    ),
    "sharegpt in messages": (
        "sharegpt",
        {"messages": [{"from": "user", "value": "2 + 2?"}, {"from": "assistant", "value": "4"}], "system": "Be brief."},
        [SYSTEM, USER, ASSISTANT],
    ),
    "alpaca": ("alpaca", {"instruction": "2 + 2?", "input": "", "output": "4"}, ASKED_AND_ANSWERED),
    "alpaca without input": ("alpaca", {"instruction": "2 + 2?", "output": "4"}, ASKED_AND_ANSWERED),
    "alpaca with input": (
        "alpaca",
        {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        [{"role": "user", "content": "Add.\n2 and 2"}, ASSISTANT],
    ),
    "alpaca with system and history": (
        "alpaca",
        {"system": "Be brief.", "history": [["Hi", "Hello"]], "instruction": "2 + 2?", "input": None, "output": "4"},
        [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, USER, ASSISTANT],
    ),
    "prompt and completion": ("prompt_completion", {"prompt": "2 + 2?", "completion": "4"}, ASKED_AND_ANSWERED),
    "prompt and completion as messages": (
        "prompt_completion",
        {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
        [SYSTEM, USER, ASSISTANT],
    ),
}


@pytest.mark.parametrize(("format", "row", "messages"), ROWS.values(), ids=ROWS.keys())
def test_every_format_is_detected_and_gives_the_same_messages(format, row, messages):
    assert detect(row).format == format
    assert messages_of(row) == messages


@pytest.mark.parametrize(("format", "row", "messages"), ROWS.values(), ids=ROWS.keys())
def test_a_row_is_not_changed(format, row, messages):
    before = json.dumps(row)
    messages_of(row)
    assert json.dumps(row) == before


def test_the_examples_of_the_docs_are_what_their_headings_say():
    page = (Path(__file__).parents[2] / "docs" / "conversations.md").read_text()
    examples = re.findall(r"^\*\*`(\w+)`\*\*.*?^```json\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert [format for format, _ in examples] == list(FORMATS)
    for format, example in examples:
        row = json.loads(example)
        assert detect(row).format == format
        detect(row).normalise(row)


REJECTED = {"role": "assistant", "content": "5"}
PREFERENCES = {
    "whole": {"chosen": [USER, ASSISTANT], "rejected": [USER, REJECTED]},
    "after a prompt of messages": {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [REJECTED]},
    "after a prompt of text": {"prompt": "2 + 2?", "chosen": [ASSISTANT], "rejected": [REJECTED]},
    "one message each": {"prompt": "2 + 2?", "chosen": ASSISTANT, "rejected": REJECTED},
    "text": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    "whole, with the prompt again": {"prompt": "2 + 2?", "chosen": [USER, ASSISTANT], "rejected": [USER, REJECTED]},
    "whole, with the prompt again as messages": {
        "prompt": [USER],
        "chosen": [USER, ASSISTANT],
        "rejected": [USER, REJECTED],
    },
}


@pytest.mark.parametrize("row", PREFERENCES.values(), ids=PREFERENCES.keys())
def test_a_preference_gives_two_whole_conversations(row):
    assert detect(row).format == "preference"
    assert read(row) == ({"messages": [USER, ASSISTANT], "tools": []}, {"messages": [USER, REJECTED], "tools": []})


def test_both_sides_of_a_preference_have_the_system_message_and_the_tools():
    chosen, rejected = read({**PREFERENCES["text"], "system": "Be brief.", "tools": [TOOL]})
    assert chosen == {"messages": [SYSTEM, USER, ASSISTANT], "tools": [TOOL]}
    assert rejected == {"messages": [SYSTEM, USER, REJECTED], "tools": [TOOL]}


@pytest.mark.parametrize("prompt", ["2 + 2?", [USER], [SYSTEM, USER]])
def test_the_prompt_of_a_preference_may_follow_a_system_message(prompt):
    row = {"prompt": prompt, "chosen": [SYSTEM, USER, ASSISTANT], "rejected": [SYSTEM, USER, REJECTED]}
    assert read(row)[0]["messages"] == [SYSTEM, USER, ASSISTANT]


def test_the_prompt_of_a_preference_may_be_its_last_question():
    before = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    row = {"prompt": "2 + 2?", "chosen": [*before, USER, ASSISTANT], "rejected": [*before, USER, REJECTED]}
    assert read(row)[1]["messages"] == [*before, USER, REJECTED]


def test_a_system_column_may_say_what_both_sides_of_a_preference_say():
    row = {"system": "Be brief.", "chosen": [SYSTEM, USER, ASSISTANT], "rejected": [SYSTEM, USER, REJECTED]}
    assert [side["messages"] for side in read(row)] == [[SYSTEM, USER, ASSISTANT], [SYSTEM, USER, REJECTED]]


# Messages


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"content": "ab"}),
        ({"content": "a", "name": None, "tool_calls": None}, {"content": "a"}),
        ({"content": "a", "tool_calls": []}, {"content": "a"}),
        ({"content": ""}, {"content": ""}),
        ({"content": "a", "weight": 2}, {"content": "a", "weight": 2.0}),
        ({"content": "a", "weight": 0}, {"content": "a", "weight": 0.0}),
        ({"content": "a", "train": True}, {"content": "a", "weight": 1.0}),
        ({"content": "a", "train": False, "weight": None}, {"content": "a", "weight": 0.0}),
        ({"content": "a", "reasoning_content": "hm"}, {"content": "a", "reasoning_content": "hm"}),
        ({"content": "a", "name": "Ann", "meta": {"n": [1]}}, {"content": "a", "name": "Ann", "meta": {"n": [1]}}),
        ({"content": "a", "at": datetime.date(2026, 1, 1), "raw": b"x"}, {"content": "a"}),
        ({"content": None, "tool_calls": [call(a=2)]}, {"content": "", "tool_calls": [call(a=2)]}),
        ({"tool_calls": [call()["function"]]}, {"content": "", "tool_calls": [call()]}),
        ({"tool_calls": [{"function": {"name": "add"}}]}, {"content": "", "tool_calls": [call()]}),
        (
            {"tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 2, "b": null}'}}]},
            {"content": "", "tool_calls": [{**call(a=2, b=None), "id": "c1"}]},
        ),
        (
            {"tool_calls": [{"id": None, "function": {"name": "add", "arguments": {"a": 2, "b": None}}}]},
            {"content": "", "tool_calls": [call(a=2)]},
        ),
        (
            {"content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}},
            {"content": "", "tool_calls": [call(a=2)]},
        ),
    ],
)
def test_an_assistant_message_in_the_normal_form(given, normal):
    assert messages_of({"messages": [USER, {"role": "assistant", **given}]})[1] == {"role": "assistant", **normal}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [{**TOOL, "strict": None}]])
def test_tools_are_a_list_of_objects_or_that_as_json(tools):
    assert read({"messages": ASKED_AND_ANSWERED, "tools": tools})["tools"] == [TOOL]


@pytest.mark.parametrize("row", [{}, {"tools": None}, {"tools": ""}, {"tools": []}])
def test_no_tools_are_an_empty_list(row):
    assert read({"messages": ASKED_AND_ANSWERED, **row})["tools"] == []


def test_a_tool_message_keeps_its_name_and_the_call_that_it_answers():
    result = {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "4"}
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [{**call(), "id": "c1"}]}, result, ASSISTANT]}
    assert messages_of(row)[2] == result


def test_several_tool_messages_answer_one_message():
    calls = {"role": "assistant", "content": "", "tool_calls": [call(a=1), call(a=2)]}
    result = {"role": "tool", "content": "3"}
    assert len(messages_of({"messages": [USER, calls, result, result, ASSISTANT]})) == 5


def test_a_call_may_be_written_in_the_text():
    written = {"role": "assistant", "content": '<tool_call>{"name": "add"}</tool_call>'}
    assert messages_of({"messages": [USER, written, {"role": "tool", "content": "4"}]})[1] == written


def test_sharegpt_calls_are_json_and_observations_are_tool_messages():
    turns = [("human", "2 + 2?"), ("function_call", '{"name": "add", "arguments": {"a": 2}}'), ("observation", "4")]
    row = {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": json.dumps([TOOL])}
    assert read(row) == {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call(a=2)]},
            {"role": "tool", "content": "4"},
        ],
        "tools": [TOOL],
    }


def test_sharegpt_turns_have_weights_too():
    row = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4", "weight": 0}]}
    assert messages_of(row) == [USER, {**ASSISTANT, "weight": 0.0}]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_two_messages_of_one_role_are_left_to_the_template(role):
    message = {"role": role, "content": "a"}
    assert messages_of({"messages": [message, message]}) == [message, message]


# Tables


def read_rows(path: Any) -> list[Any]:
    kind = format_for(str(path))
    unit = Unit((Span(0, str(path), kind.name),), 0)
    return [row for _, _, row in read_unit(unit, {kind.name: kind}) if isinstance(row, dict)]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_of_a_table_give_what_lines_of_json_give(tmp_path, kind):
    rows = [
        {"messages": [USER, ASSISTANT]},
        {"messages": [USER, {**ASSISTANT, "weight": 0.5}], "tools": [TOOL]},
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{**call(a=2), "id": "c1"}]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                {"role": "assistant", "content": "so", "tool_calls": [call(b="x")], "reasoning_content": "hm"},
            ]
        },
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.Table.from_pylist(rows, schema=_schema_of(rows))
    if kind == "parquet":
        pq.write_table(table, tmp_path / "rows.parquet")
    else:
        with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as writer:
            writer.write_table(table)
    from_table, from_lines = read_rows(tmp_path / f"rows.{kind}"), read_rows(tmp_path / "rows.jsonl")
    assert from_table[0]["messages"][0]["tool_calls"] is None  # a table has every field in every row
    assert [read(row) for row in from_table] == [read(row) for row in from_lines]


def _schema_of(rows: list[dict[str, Any]]) -> pa.Schema:
    message = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("weight", pa.float64()),
            ("tool_call_id", pa.string()),
            ("reasoning_content", pa.string()),
            (
                "tool_calls",
                pa.list_(
                    pa.struct(
                        [
                            ("type", pa.string()),
                            ("id", pa.string()),
                            (
                                "function",
                                pa.struct(
                                    [
                                        ("name", pa.string()),
                                        ("arguments", pa.struct([("a", pa.int64()), ("b", pa.string())])),
                                    ]
                                ),
                            ),
                        ]
                    )
                ),
            ),
        ]
    )
    tools = pa.Table.from_pylist([{"tools": rows[1]["tools"]}]).schema.field("tools")
    return pa.schema([("messages", pa.list_(message)), tools])


def test_a_table_of_two_formats_is_told_by_what_is_not_null():
    row = {"messages": None, "conversations": [{"from": "human", "value": "Hi"}], "instruction": None, "output": None}
    assert str(detect(row)) == "sharegpt: turns in 'conversations' (from, value)"


# What a user says


@pytest.mark.parametrize(
    ("given", "row", "words"),
    [
        (
            {"format": "messages", "columns": {"messages": "dialog"}},
            {"dialog": ASKED_AND_ANSWERED},
            "messages: messages in 'dialog' (role, content)",
        ),
        (
            {"columns": {"messages": "dialog", "role": "speaker", "content": "text"}, "roles": {"bot": "assistant"}},
            {"dialog": [{"speaker": "user", "text": "2 + 2?"}, {"speaker": "bot", "text": "4"}]},
            "messages: messages in 'dialog' (speaker, text); role 'bot' is assistant",
        ),
        (
            {"columns": {"conversations": "turns", "from": "who", "value": "said"}},
            {"turns": [{"who": "human", "said": "2 + 2?"}, {"who": "gpt", "said": "4"}]},
            "sharegpt: turns in 'turns' (who, said)",
        ),
        (
            {"columns": {"prompt": "question", "completion": "answer"}},
            {"question": "2 + 2?", "answer": "4"},
            "prompt_completion: 'question' and 'answer'",
        ),
        (
            {"columns": {"instruction": "task", "input": None}},
            {"task": "2 + 2?", "input": "not this", "output": "4"},
            "alpaca: 'task' and 'output'; no input",
        ),
        (
            {"format": "messages"},
            {"messages": ASKED_AND_ANSWERED, "chosen": "a", "rejected": "b"},
            "messages: messages in 'messages' (role, content)",
        ),
    ],
)
def test_a_mapping_says_what_the_rows_call_it(given, row, words):
    layout = layout_of(**given)
    assert str(layout) == words
    assert messages_of(row, layout) == ASKED_AND_ANSWERED


def test_a_preference_can_be_told_to_pass_over_the_prompt():
    layout = layout_of("preference", {"prompt": None, "chosen": "good"})
    row = {"prompt": "another", "good": [USER, ASSISTANT], "rejected": [USER, REJECTED]}
    assert str(layout) == "preference: 'good' over 'rejected'; no prompt"
    assert layout.normalise(row)[0]["messages"] == [USER, ASSISTANT]


def test_without_a_format_and_a_mapping_the_layout_is_to_be_detected():
    assert layout_of() is None
    assert layout_of(None, {}, {}) is None


@pytest.mark.parametrize(
    ("given", "parameter", "what", "remedy"),
    [
        ({"format": "sharegtp"}, "format", "format='sharegtp' is not one of 'messages', 'sharegpt'", "sharegpt"),
        ({"columns": {"mesages": "dialog"}}, "columns", "names 'mesages', which no format has", "'messages'"),
        (
            {"format": "alpaca", "columns": {"messages": "dialog"}},
            "columns",
            "names 'messages', which format 'alpaca' does not have",
            "first what the format calls it",
        ),
        ({"columns": {"dialog": "messages"}}, "columns", "'dialog'", "first what the format calls it"),
        ({"columns": {"messages": None}}, "columns", "{'messages': None} names no column", "'its name in your rows'"),
        ({"columns": {"messages": "a", "role": None}}, "columns", "{'role': None}", "'its name in your rows'"),
        ({"columns": {"messages": 3}}, "columns", "{'messages': 3} names no column", "'its name in your rows'"),
        ({"columns": {"prompt": "q"}}, "format", "fits prompt_completion and preference", "format='prompt_completion'"),
        ({"columns": {"messages": "a", "output": "b"}}, "format", "names of several formats", "format="),
        ({"columns": {"chosen": "a", "rejected": "a"}}, "columns", "from one column, 'a'", "a column for each"),
        ({"format": "messages", "roles": {"bot": "asistant"}}, "roles", "'asistant' is not", "{'bot': 'assistant'}"),
        ({"format": "messages", "roles": {"x": "human"}}, "roles", "'human' is not a role", "{'x': 'user'}"),
        ({"columns": "dialog"}, "columns", "columns='dialog' is not a mapping", "{'messages': 'dialog'}"),
        ({"format": "messages", "roles": ["bot"]}, "roles", "is not a mapping", "{'bot': 'assistant'}"),
        ({"roles": {"bot": "assistant"}}, "format", "roles= without format=", "format='messages'"),
    ],
)
def test_a_wrong_mapping_is_named(given, parameter, what, remedy):
    with refused(SpecError, what, parameter=parameter, remedy=remedy):
        layout_of(**given)


# What is refused


def tool(**more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": "4", **more}


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": [USER, *messages]}


def called(**function: Any) -> dict[str, Any]:
    return said({"role": "assistant", "tool_calls": [{"function": function}]})


REFUSED: dict[str, tuple[dict[str, Any], str, int | None, str, str]] = {
    # row, kind, turn, words of the reason, words of the remedy
    "a role nobody has": (said({"role": "bot", "content": "4"}), "unknown role", 1, "'bot'; known are system", ""),
    "the remedy for a role": (
        {"conversation": [{"role": "Human", "content": "4"}]},
        "unknown role",
        0,
        "'Human'",
        "format='messages', columns={'messages': 'conversation'}, roles={'Human': 'user'}",
    ),
    "a role that is a number": (said({"role": 3, "content": "4"}), "unknown role", 1, "'role' is int, not text", ""),
    "a role that is an object": (said({"role": {}, "content": "4"}), "unknown role", 1, "'role' is dict, not text", ""),
    "no role": (
        said({"content": "4"}),
        "missing role",
        1,
        "no 'role': this message has 'content'",
        "columns={'role': 'FIELD'}",
    ),
    "no content": (said({"role": "assistant"}), "missing content", 1, "no 'content': this message has 'role'", ""),
    "content by another name": (
        said({"role": "assistant", "text": "4"}),
        "missing content",
        1,
        "has 'role', 'text'",
        "format='messages', columns={'content': 'text'}, if that is it",
    ),
    "null": (said({"role": "assistant", "content": None}), "missing content", 1, "'content' is null", ""),
    "no calls either": (
        said({"role": "assistant", "content": None, "tool_calls": []}),
        "missing content",
        1,
        "'content' is null",
        "",
    ),
    "a number": (said({"role": "assistant", "content": 4}), "content is not text", 1, "is int", ""),
    "an object": (said({"role": "tool", "content": {"a": 4}}), "content is not text", 1, "is dict", ""),
    "a picture": (
        said({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}]}),
        "content is not text",
        1,
        "a part of type 'image_url'",
        "",
    ),
    "a part without text": (
        said({"role": "user", "content": [{"type": "text", "text": None}]}),
        "content is not text",
        1,
        "text is null",
        "",
    ),
    "a part that is text itself": (said({"role": "user", "content": ["a"]}), "content is not text", 1, "is str", ""),
    "reasoning": (
        said({"role": "assistant", "content": "4", "reasoning_content": ["a"]}),
        "content is not text",
        1,
        "'reasoning_content' is list",
        "",
    ),
    "a late system message": (said(SYSTEM), "role order", 1, "system message that is not the first", "as the first"),
    "two system messages": (
        {"messages": [SYSTEM, SYSTEM, USER]},
        "role order",
        1,
        "a second system message",
        "one system message",
    ),
    "a developer after a system": (
        {"messages": [SYSTEM, {"role": "developer", "content": "a"}]},
        "role order",
        1,
        "a second system message (developer)",
        "one system message",
    ),
    "two different system messages": (
        {"system": "Be long.", "messages": [SYSTEM, *ASKED_AND_ANSWERED]},
        "role order",
        1,
        "a second system message",
        "one system message",
    ),
    "a result first": ({"messages": [tool(), USER]}, "role order", 0, "is the first message", "with tool_calls"),
    "a result after a question": (said(tool()), "role order", 1, "after a user message", "with tool_calls"),
    "a result that nobody asked for": (said(ASSISTANT, tool()), "role order", 2, "calls no tool", "with tool_calls"),
    "a result of no call": (
        said({"role": "assistant", "content": "<tool>"}, tool(tool_call_id="c1")),
        "role order",
        2,
        "calls no tool",
        "with tool_calls",
    ),
    "a result of another call": (
        said({"role": "assistant", "tool_calls": [{**call(), "id": "c1"}]}, tool(tool_call_id="c2")),
        "role order",
        2,
        "tool_call_id 'c2' is none of those before it ('c1')",
        "the id of the call",
    ),
    "no messages": ({"messages": []}, "empty conversation", None, "'messages' has no messages", ""),
    "an empty completion": (
        {"prompt": "a", "completion": []},
        "empty conversation",
        None,
        "'completion' has no messages",
        "",
    ),
    "more messages than turns have numbers": (
        {"messages": [{"role": "user", "content": "a"}] * 2**15},
        "too many messages",
        None,
        "32,768 of them; a conversation has 32,767 at most",
        "cut it into several",
    ),
    "a string among messages": (said("4"), "not a message", 1, "it is str, not an object", ""),
    "a null among messages": (said(None), "not a message", 1, "it is null, not an object", ""),
    "arguments that are not JSON": (
        called(name="add", arguments="{'a': 2}"),
        "bad tool call",
        1,
        "the arguments of 'add': a string that is not JSON",
        "",
    ),
    "arguments that are NaN": (called(name="add", arguments='{"a": NaN}'), "bad tool call", 1, "is not JSON", ""),
    "arguments that are no text": (
        called(name="add", arguments='{"a": "\\ud800"}'),
        "bad tool call",
        1,
        "is not JSON",
        "",
    ),
    "a list of arguments": (called(name="add", arguments="[1]"), "bad tool call", 1, "are list, not an object", ""),
    "a number of arguments": (called(name="add", arguments=3), "bad tool call", 1, "are int, not an object", ""),
    "a call of nothing": (called(arguments="{}"), "bad tool call", 1, "no 'name' of the function", ""),
    "calls that are a number": (said({"role": "assistant", "tool_calls": 3}), "bad tool call", 1, "are int", ""),
    "calls of a user": (said({**USER, "tool_calls": [call()]}), "bad tool call", 1, "a user message has", ""),
    "tools that are not JSON": ({**said(), "tools": "add"}, "bad tools", None, "a string that is not JSON", ""),
    "tools that are an object": ({**said(), "tools": {"a": 1}}, "bad tools", None, "they are dict", ""),
    "tools that are names": ({**said(), "tools": ["add"]}, "bad tools", None, "one is str", ""),
    "a negative weight": (
        said({**ASSISTANT, "weight": -1}),
        "bad weight",
        1,
        "weight=-1 is not a number from 0 on",
        "",
    ),
    "an endless weight": (said({**ASSISTANT, "weight": float("inf")}), "bad weight", 1, "weight=inf", ""),
    "a weight that is none": (said({**ASSISTANT, "weight": float("nan")}), "bad weight", 1, "weight=nan", ""),
    "a weight beyond floats": (
        said({**ASSISTANT, "weight": 10**400}),
        "bad weight",
        1,
        "is not a number from 0 on",
        "",
    ),
    "a weight in words": (said({**ASSISTANT, "weight": "1"}), "bad weight", 1, "weight='1' is not a number", ""),
    "a weight that is true": (said({**ASSISTANT, "weight": True}), "bad weight", 1, "weight=True is not a number", ""),
    "train as a number": (said({**ASSISTANT, "train": 1}), "bad weight", 1, "train=1 is not true or false", ""),
    "weight and train": (said({**ASSISTANT, "weight": 1, "train": True}), "bad weight", 1, "both", "one of them"),
    "a call in sharegpt that is not JSON": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "add(2)"}]},
        "bad tool call",
        1,
        "a string that is not JSON",
        "",
    ),
    "content in sharegpt": (
        {"conversations": [{"from": "human", "text": "a"}]},
        "missing content",
        0,
        "no 'value': this message has 'from', 'text'",
        "format='sharegpt', columns={'value': 'text'}",
    ),
    "a role in sharegpt": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "bard", "value": "b"}]},
        "unknown role",
        1,
        "'bard'; known are system",
        "format='sharegpt', roles={'bard': 'assistant'}",
    ),
    "an output that is a list": (
        {"instruction": "a", "output": 4},
        "content is not text",
        1,
        "column 'output' is int",
        "",
    ),
    "an empty instruction": ({"instruction": "", "output": "4"}, "missing content", 0, "'instruction' is empty", ""),
    "a history of texts": (
        {"instruction": "a", "output": "4", "history": ["b"]},
        "not a message",
        0,
        "an item of 'history' is str, not [instruction, output]",
        "",
    ),
    "a completion that is a number": (
        {"prompt": "a", "completion": 4},
        "content is not text",
        1,
        "'completion' is int, not text or a list of messages",
        "",
    ),
    "preferences without a prompt": (
        {"chosen": "4", "rejected": "5"},
        "no prompt",
        None,
        "'chosen' is text",
        "format='preference', columns={'prompt': 'COLUMN'}",
    ),
    "a prompt of another conversation": (
        {"prompt": "3 + 3?", "chosen": [USER, ASSISTANT], "rejected": [USER, REJECTED]},
        "prompt does not fit",
        None,
        "'chosen' begins with a user message, and not with the prompt",
        "format='preference', columns={'prompt': None}",
    ),
    "two system messages in a preference": (
        {"chosen": [SYSTEM, SYSTEM, USER, ASSISTANT], "rejected": [USER, REJECTED]},
        "role order",
        1,
        "a second system message",
        "one system message",
    ),
    "the side of a preference": (
        {"prompt": "a", "chosen": [ASSISTANT], "rejected": [{"role": "bot", "content": "5"}]},
        "unknown role",
        0,
        "in 'rejected': 'bot'",
        "roles={'bot': 'assistant'}",
    ),
    "another kind of row": (
        {"title": "a", "body": "b"},
        "unknown format",
        None,
        "this row has 'title', 'body'; looked for messages, conversation or conversations; instruction and output",
        "columns={'messages': 'COLUMN'}",
    ),
    "names that are only likely": (
        {"question": "2 + 2?", "answer": "4"},
        "unknown format",
        None,
        "this row has 'question', 'answer'",
        "columns={'prompt': 'question', 'completion': 'answer'}",
    ),
    "turns of other fields": (
        {"messages": [{"speaker": "a", "text": "b"}]},
        "unknown format",
        None,
        "the first item of 'messages' is an object with 'speaker', 'text'",
        "columns={'messages': 'messages', 'role': 'FIELD', 'content': 'FIELD'}",
    ),
    "a list of texts": ({"messages": ["a"]}, "unknown format", None, "first item of 'messages' is str", "columns="),
    "messages as text": (
        {"messages": "[]"},
        "unknown format",
        None,
        "'messages' is str, not a list of messages",
        "decode it in a step before",
    ),
    "judged completions": (
        {"prompt": "a", "completion": "b", "label": False},
        "unknown format",
        None,
        "prompt, completion and label",
        "where=",
    ),
    "two formats": (
        {"messages": ASKED_AND_ANSWERED, "chosen": "a", "rejected": "b"},
        "several formats",
        None,
        "preference ('chosen', 'rejected') or messages ('messages')",
        "format='preference' or format='messages'",
    ),
    "two columns": (
        {"messages": ASKED_AND_ANSWERED, "conversation": ASKED_AND_ANSWERED},
        "several formats",
        None,
        "messages ('messages') or messages ('conversation')",
        "columns={'messages': 'messages'}, or the other",
    ),
}


@pytest.mark.parametrize(("row", "kind", "turn", "reason", "remedy"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_used_is_refused_with_its_turn_and_a_reason(row, kind, turn, reason, remedy):
    before = json.dumps(row)
    with refused(ChatError, reason, kind=kind, turn=turn) as raised:
        read(row)
    assert remedy in raised.value.remedy
    assert json.dumps(row) == before


FIRST_ROWS = {
    "messages": {"conversations": ASKED_AND_ANSWERED},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}]},
    "alpaca": {"instruction": "a", "output": "b"},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "preference": {"prompt": "a", "chosen": "b", "rejected": "c"},
}


@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_a_row_of_another_format_than_the_first_is_refused_and_both_are_named(first, second):
    layout = detect(FIRST_ROWS[first])
    if first == second:
        layout.normalise(FIRST_ROWS[second])
        return
    with refused(ChatError, f"is {second}: ", f"expected {first}: ", kind="another format") as raised:
        layout.normalise(FIRST_ROWS[second])
    assert raised.value.remedy


def test_messages_in_another_column_are_another_format_too():
    with refused(ChatError, "'conversation'", "'messages'", kind="another format"):
        detect({"messages": ASKED_AND_ANSWERED}).normalise({"conversation": ASKED_AND_ANSWERED})


@pytest.mark.parametrize(
    ("layout", "row", "kind", "reason"),
    [
        (layout_of("messages"), {"id": 1}, "no messages", "no column 'messages': this row has 'id'"),
        (layout_of("messages"), {"messages": None}, "no messages", "column 'messages' is null"),
        (layout_of("messages"), {"messages": {"a": 1}}, "no messages", "'messages' is dict, not a list of messages"),
        (layout_of("messages"), {"messages": "[]"}, "no messages", "'messages' is str, not a list of messages"),
        (layout_of("alpaca"), {"instruction": "a"}, "no output", "no column 'output': this row has 'instruction'"),
        (layout_of("preference"), {"chosen": "a", "rejected": None}, "no rejected", "column 'rejected' is null"),
    ],
)
def test_a_row_without_what_its_layout_needs_is_refused(layout, row, kind, reason):
    with refused(ChatError, reason, kind=kind):
        layout.normalise(row)


# Duplicate keys


@pytest.mark.parametrize(
    ("line", "reason", "turn"),
    [
        ('{"messages": [{"role": "user", "role": "assistant", "content": "a: b"}]}', "messages.0 has 'role' twice", 0),
        ('{"messages": [{"role" : "user", "role" : "user"}]}', "messages.0 has 'role' twice", 0),
        ('{"messages": [1, {"x": {"a": 1, "a": "\\u003a"}}]}', "messages.1.x has 'a' twice", 1),
        ('{"a\\\\": 1, "a\\\\": ":"}', "the row has 'a\\\\' twice", None),
        ('{"a": {"b": 1}, "a": 2, "c": "\\u003a\\u003A"}', "the row has 'a' twice", None),
    ],
)
def test_a_key_given_twice_is_a_fault_that_says_where(line, reason, turn):
    assert parse_json(line.encode(), unique_keys=True) == Malformed("duplicate keys", reason, turn=turn)


@pytest.mark.parametrize(
    "line",
    [
        '{"role": "a: \\"b\\": c", "content": {"role": ":"}}',
        '{"a" : "\\u003a", "b": [{"a": 1}, {"a": 1.5e3}], "c:": "\\u003c"}',
        '{"a\\\\": "\\":", "é": "\\ud83d\\ude00:"}',
    ],
)
def test_keys_that_are_given_once_are_none_of_it(line):
    assert parse_json(line.encode(), unique_keys=True) == json.loads(line)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_duplicate_keys_in_a_file_are_one_bad_row_with_its_place(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"messages": []}\n{"messages": [{"role": "user", "role": "tool"}]}\n{"messages": []}\n')
    kind = format_for(str(path)).with_unique_keys()
    unit, formats = Unit((Span(0, str(path), kind.name),), 0), {kind.name: kind}
    rows = [row for _, _, row in read_unit(unit, formats)][:3]
    assert [type(row) for row in rows] == [dict, Malformed, dict]
    error = error_of(rows[1], unit, 0, 1, formats)
    assert "duplicate keys" in error.headline
    assert "'role'" in error.headline
    assert error.where["turn"] == 0
    assert error.where["file"] == str(path)
    assert error.remedy


def test_unique_keys_are_asked_of_formats_that_know_them_and_the_user_has_the_last_word():
    assert format_for("a.parquet").with_unique_keys() == format_for("a.parquet")
    assert format_for("a.jsonl").with_unique_keys().options == {"unique_keys": True}
    said = format_for("a.json").with_options({"unique_keys": False, "max_row_bytes": 9})
    assert said.with_unique_keys().options == {"unique_keys": False, "max_row_bytes": 9}


def test_a_store_baked_before_keeps_its_name_while_duplicate_keys_are_not_asked_for():
    assert format_for("a.jsonl").options == {}
    assert format_for("a.jsonl").fingerprint != format_for("a.jsonl").with_options({"unique_keys": True}).fingerprint


# As a value


@pytest.mark.parametrize("row", FIRST_ROWS.values(), ids=FIRST_ROWS.keys())
def test_a_layout_travels_and_has_a_fingerprint(row):
    layout = detect(row)
    layout.normalise(row)
    other = pickle.loads(pickle.dumps(layout))
    assert other == layout
    assert fingerprint(other.spec()) == fingerprint(detect(row).spec())
    assert other.normalise(row) == layout.normalise(row)


def test_a_layout_that_travelled_still_knows_calls_of_sharegpt():
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "tool_call", "value": '{"name": "add"}'}]}
    layout = detect(row)
    layout.normalise(row)
    assert pickle.loads(pickle.dumps(layout)).normalise(row)["messages"][1]["tool_calls"] == [call()]


def test_layouts_differ_by_their_mapping():
    specs = [layout_of("messages").spec(), layout_of("messages", {"messages": "a"}).spec()]
    specs.append(layout_of("messages", roles={"a": "user"}).spec())
    assert len({fingerprint(spec) for spec in specs}) == 3


def test_the_fields_of_a_message_keep_their_order():
    message = {"name": "a", "weight": 1, "x": "y", "content": "b", "role": "assistant", "reasoning_content": "c"}
    found = messages_of({"messages": [USER, message]})[1]
    assert list(found) == ["role", "content", "weight", "name", "x", "reasoning_content"]
