"""`batchwright doctor chat`: each fault of a file is named with its line, and the exit code says that there was one."""

from __future__ import annotations

import json

import pytest

from batchwright.base.errors import TokenizerError
from batchwright.prepare.chat.step import Chat

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GOOD = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]}


def talk(*turns: tuple[str, object]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture
def sft(tmp_path):
    """sft(...): a file of good rows, with these in lines 3 and on."""

    def write(*bad: object, good: int = 4, name: str = "sft.jsonl") -> str:
        lines = [json.dumps(GOOD)] * 2 + [b if isinstance(b, str) else json.dumps(b) for b in bad]
        (tmp_path / name).write_text("\n".join(lines + [json.dumps(GOOD)] * (good - 2)) + "\n")
        return str(tmp_path / name)

    return write


def doctor(run, file, template="chatml", **options):
    more = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    return run("doctor", "chat", file, "--tokenizer", "bytes", "--template", template, *more)


FAULTS = {
    # what the row is: (the row, kind, where after the file, what to try)
    "typo": (talk(("user", "2?"), ("asistant", "4")), "unknown role", "line 3, message 1, 'asistant'", "roles={"),
    "null": (talk(("user", "2?"), ("assistant", None)), "missing content", "line 3, message 1", "mend"),
    "number": (talk(("user", "2?"), ("assistant", 4)), "content is not text", "line 3, message 1", "mend"),
    "nothing": ({"messages": []}, "empty conversation", "line 3", "mend"),
    "another format": ({"prompt": "2?", "completion": "4"}, "another format", "line 3", "files of their own"),
    "cut off": ('{"messages": [', "malformed row", "line 3", "mend"),
    "no answer": (talk(("user", "2?")), "empty mask", "line 3", "another loss="),
    "no words": (talk(("user", "2?"), ("assistant", "")), "empty answer", "line 3, message 1", '"train": false'),
    "too long": (talk(("user", "2?"), ("assistant", "4" * 900)), "over length", "line 3", "truncation="),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_line_and_the_exit_code_is_1(name, batchwright, sft):
    row, kind, place, remedy = FAULTS[name]
    file = sft(row)
    done = doctor(batchwright, file, max_length=512)
    assert (done.code, done.err) == (1, "")
    (block,) = [b for b in done.out.replace("\nnote", "\nFAILED").split("\nFAILED") if b.startswith(f"  {kind}: 1 of ")]
    assert f"{file}, {place}" in block
    assert f"try: {remedy}" in block or remedy in block
    assert "1 check failed" in done.out


def test_a_good_file_passes_and_its_masks_are_shown(succeeds, sft):
    done = doctor(succeeds, sft())
    assert "FAILED" not in done.out
    assert "messages: messages in 'messages' (role, content)" in done.out
    assert "⟦4.<|im_end|>⟧↵" in done.out
    assert "user      | <|im_start|>user↵" in done.out


TEMPLATES = {
    "drops": (
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}:{{ m.content }}</s>{% endif %}{% endfor %}",
        "dropped by the template: 1 of 5 rows",
    ),
    "reorders": (
        "{% for m in messages | reverse %}{{ m.role }}:{{ m.content }}</s>{% endfor %}",
        "reordered by the template: 5 of 5 rows",
    ),
    "forgets the end": ("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}", "end of turn: "),
    "refuses": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system!') }}{% endif %}" + CHATML,
        "refused by the template: 1 of 5 rows",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_does_not_do_its_work_fails(name, batchwright, sft):
    template, said = TEMPLATES[name]
    done = doctor(batchwright, sft(talk(("system", "Count."), ("user", "2?"), ("assistant", "4."))), template)
    assert done.code == 1
    assert f"FAILED  {said}" in done.out


def test_no_more_than_three_rows_of_a_kind_are_listed(batchwright, sft):
    done = doctor(batchwright, sft(*[talk(("usr", "2?"))] * 5))
    assert "unknown role: 5 of 9 rows" in done.out
    assert done.out.count("message 0, 'usr'") == 3


def test_a_name_of_a_special_token_in_a_message_is_a_note(succeeds, sft):
    done = doctor(succeeds, sft(talk(("user", "<|im_end|>?"), ("assistant", "4."))))
    assert "note    marker in a message: 1 of 5 rows" in done.out
    assert "line 3, message 0" in done.out


@pytest.mark.parametrize(("template", "is_noted"), [("chatml", True), ("qwen", False)])
def test_tools_that_a_template_does_not_write_are_a_note(template, is_noted, succeeds, sft):
    done = doctor(succeeds, sft({**GOOD, "tools": [{"type": "function", "function": {"name": "add"}}]}), template)
    assert ("note    tools are not written: 1 of 5 rows" in done.out) == is_noted
    assert ("sft.jsonl, line 3\n" in done.out) == is_noted


def test_columns_and_roles_can_have_other_names(succeeds, batchwright, sft):
    rows = [{"talk": [{"role": "user", "content": "2?"}, {"role": "bot", "content": "4."}]}] * 5
    file = sft()
    with open(file, "w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    assert doctor(batchwright, file).code == 1
    assert "⟦4.<|im_end|>⟧↵" in doctor(succeeds, file, columns="messages=talk", roles="bot=assistant").out


def test_a_pair_that_cannot_be_encoded_is_named_by_its_own_line(batchwright, tmp_path, monkeypatch):
    pairs = [{"prompt": f"{number}?", "chosen": "4.", "rejected": "5."} for number in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    right = Chat.encode

    def encode(self, prepared):
        for number, one in enumerate(prepared):
            if "2?" in one.text:
                raise TokenizerError("no id for this", number=number)
        return right(self, prepared)

    monkeypatch.setattr(Chat, "encode", encode)
    done = doctor(batchwright, tmp_path / "pairs.jsonl")
    assert done.code == 1
    assert "FAILED  cannot be encoded: 1 of 4 rows" in done.out
    assert "pairs.jsonl, line 3, no id for this" in done.out


def test_only_the_first_rows_are_read(succeeds, batchwright, sft):
    file = sft("not JSON")
    assert "the first 2 rows" in doctor(succeeds, file, rows=2).out
    assert doctor(batchwright, file, rows=3).code == 1


def test_pairs_are_learned_by_their_last_answer(succeeds, tmp_path):
    pair = {"prompt": "2 + 2?", "chosen": "4.", "rejected": "5."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    done = doctor(succeeds, tmp_path / "pairs.jsonl")
    assert "preference" in done.out
    assert "line 1, rejected" in done.out
    assert "⟦5.<|im_end|>⟧" in done.out


@pytest.mark.parametrize(
    ("truncation", "code", "said"),
    [
        ("drop", 1, "FAILED  over length: 1 of 5 rows (20.0 %)"),
        (
            "keep_start",
            0,
            "note    over length: 1 of 5 rows (20.0 %)",
        ),
        ("drop_oldest", 0, "ok"),
    ],
)
def test_rows_over_length_are_judged_by_what_becomes_of_them(truncation, code, said, batchwright, sft):
    twice = talk(("user", "2 + 2?"), ("assistant", "4." * 30), ("user", "2 + 3?"), ("assistant", "5."))
    done = doctor(batchwright, sft(twice), max_length=160, truncation=truncation)
    assert done.code == code
    assert said in done.out


def test_json_says_the_same(batchwright, sft):
    file = sft(talk(("usr", "2?")))
    done = batchwright(f"doctor chat {file} --tokenizer bytes --template chatml --json")
    assert done.code == 1
    assert (done.json["ok"], done.json["rows"], done.json["usable"], done.json["loss"]) == (False, 5, 4, "assistant")
    (failed,) = [finding for finding in done.json["findings"] if finding["is_failure"]]
    assert failed["kind"] == "unknown role"
    assert [(place["file"], place["line"], place["turn"]) for place in failed["examples"]] == [(file, 3, 0)]


def test_html_is_a_page_with_the_same_rows(succeeds, sft, tmp_path):
    doctor(succeeds, sft(), html=tmp_path / "masks.html")
    page = (tmp_path / "masks.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "2 + 2?" in page


@pytest.mark.parametrize(
    ("options", "said", "remedy"),
    [
        ({"template": "chatlm"}, "no chat template 'chatlm'", "'chatml'"),
        ({"template": "{% for m in %}"}, "template", "try"),
        ({"loss": "asistant"}, "loss='asistant' is no policy", "perhaps 'assistant'"),
        ({"format": "sharegtp"}, "sharegtp", "sharegpt"),
        ({"max_length": 1}, "max_length must be at least 2, got 1", "max_length=2"),
        ({"tokenizer": "no.json"}, "no tokenizer file", "tokenizer.json"),
    ],
)
def test_bad_settings_are_one_message(options, said, remedy, refuses, sft):
    message = doctor(refuses, sft(), **options)
    assert said in message
    assert remedy in message


def test_an_empty_file_fails(batchwright, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    done = doctor(batchwright, tmp_path / "empty.jsonl")
    assert done.code == 1
    assert "FAILED  empty file" in done.out


def test_a_file_without_rows_is_one_message(refuses, tmp_path):
    (tmp_path / "blank.jsonl").write_text("\n\n")
    assert "there are no rows to check" in doctor(refuses, tmp_path / "blank.jsonl")


def test_a_store_is_not_a_file(refuses, store):
    assert "is a store, and this looks at raw conversations" in doctor(refuses, store)


def test_a_subject_is_asked_for(batchwright):
    done = batchwright("doctor")
    assert done.code == 2
    assert "SUBJECT" in done.err
