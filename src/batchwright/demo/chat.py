"""`batchwright demo chat`: a bad set of conversations is caught, fault by fault; a good one is trained on.

The faults are planted, and the demo checks that each is found, with its line. The losses of what users say and what
assistants say show that only answers were trained.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import json
import math
import os.path
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.demo.harness import COLUMNS, Demo, LiveLine, expect, head, near, printed_by, say
from batchwright.demo.model import Adam, Weights, new_weights, token_losses_and_gradients

BATCH_ROWS = 4
ROW_TOKENS = 192
LEARNING_RATE = 0.005
VOCAB_SIZE = 512
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")

FORGETFUL = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
"""A template without an end of turn."""


def _tell(folder: Path, steps: int) -> None:
    folder = folder / "chat"
    folder.mkdir(exist_ok=True)
    good = list(_conversations())
    tokenizer = _train_tokenizer(folder, good)
    _catch_bad_rows(folder, good, tokenizer)
    _catch_bad_template(folder, good, tokenizer)
    _train_on_answers(folder, tokenizer, steps)


main = Demo(
    name="chat",
    title="conversations that would teach the wrong thing, seen before a run.",
    description="Plant faults in a set of conversations and see each of them caught before a run; then train a tiny "
    "model on a good set, packed, on what assistants say and nothing else.",
    tell=_tell,
    steps=300,
    fewest_steps=40,
).main


# The conversations


def _conversations() -> Iterator[dict[str, Any]]:
    """Questions about Python's own functions, and what their documentation answers."""
    places = [str, bytes, list, dict, set, float, int, math, os.path, itertools, random, statistics, builtins]
    for number, (name, text) in enumerate(_documented(places)):
        asked = ("What does {} do?", "Tell me about {}.", "When do I need {}?")[number % 3].format(name)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
        if number % 4 == 0:
            messages.insert(0, {"role": "system", "content": "You know Python."})
        yield {"messages": messages}


def _documented(places: list[Any]) -> Iterator[tuple[str, str]]:
    for place in places:
        for name in sorted(vars(place)):
            text = getattr(getattr(place, name), "__doc__", None)
            if not name.startswith("_") and callable(getattr(place, name)) and isinstance(text, str) and text.strip():
                first = " ".join(text.strip().split("\n\n")[0].split())
                if len(first) <= 200:
                    yield f"{place.__name__}.{name}", first


def _write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def _train_tokenizer(folder: Path, good: list[dict[str, Any]]) -> Path:
    words = [message["content"] for row in good for message in row["messages"]]
    text = _write(folder / "words.txt", [*words, *("system", "user", "assistant") * 3])
    path = folder / "tokenizer.json"
    with contextlib.redirect_stderr(io.StringIO()):
        bw.train_tokenizer(
            str(text), VOCAB_SIZE, out=path, special_tokens=SPECIAL, force=True, show_progress=False, format="text"
        )
    return path


# 1. Bad rows


class _Fault(NamedTuple):
    kind: str
    what: str
    spoil: Callable[[dict[str, Any]], str]
    """Makes the line out of a good row."""


def _said(row: dict[str, Any], by: str, **other: Any) -> str:
    """A row in which the last message of a role is another."""
    messages = list(row["messages"])
    at = max(number for number, message in enumerate(messages) if message["role"] == by)
    messages[at] = {**messages[at], **other}
    return json.dumps({"messages": messages})


FAULTS = (
    _Fault("unknown role", "a role with a typo", lambda row: _said(row, "assistant", role="asistant")),
    _Fault("missing content", "an answer that is null", lambda row: _said(row, "assistant", content=None)),
    _Fault("content is not text", "an answer that is a number", lambda row: _said(row, "assistant", content=42)),
    _Fault("empty answer", "an answer without a word", lambda row: _said(row, "assistant", content="")),
    _Fault("empty mask", "a question without an answer", lambda row: json.dumps({"messages": row["messages"][:-1]})),
    _Fault("empty conversation", "no messages at all", lambda row: json.dumps({"messages": []})),
    _Fault(
        "another format", "a row of another format", lambda row: json.dumps({"prompt": "2 + 2?", "completion": "4"})
    ),
    _Fault("over length", "an answer that never ends", lambda row: _said(row, "assistant", content="and so on " * 200)),
    _Fault(
        "marker in a message",
        "a special token's name in a question",
        lambda row: _said(row, "user", content="What is <|im_end|>?"),
    ),
    _Fault("malformed row", "a line that was cut off", lambda row: _said(row, "user")[:-20]),
)


def _doctor(path: Path, tokenizer: Path, template: str | Path, *more: str) -> tuple[int, str]:
    """Run `batchwright doctor chat`: its exit code and its output."""
    say(f"$ batchwright doctor chat {near(path)} --tokenizer tokenizer.json --template {Path(template).name}")
    settings = ("--tokenizer", tokenizer, "--template", template, "--max-length", str(ROW_TOKENS), "--show", "0")
    return printed_by("doctor", "chat", path, *settings, *more)


def _say_finding(line: str) -> None:
    """Print a line of the doctor. A finding goes on below its text, not below its mark."""
    say(line, hang=8 if line.startswith(("FAILED ", "note ")) else 4)


def _catch_bad_rows(folder: Path, good: list[dict[str, Any]], tokenizer: Path) -> None:
    head(1, f"{len(FAULTS)} faults are planted among {len(good)} conversations")
    lines = [json.dumps(row) for row in good]
    planted: dict[str, int] = {}
    for number, fault in enumerate(FAULTS):
        at = 3 + 5 * number
        lines[at] = fault.spoil(good[at])
        planted[fault.kind] = at + 1
        say(f"  line {at + 1:>3}  {fault.what}")
    bad = _write(folder / "bad.jsonl", lines)
    say()
    code, printed = _doctor(bad, tokenizer, "chatml")
    for line in printed.splitlines():
        _say_finding(line)
    with contextlib.redirect_stdout(io.StringIO()):
        _, as_json = _doctor(bad, tokenizer, "chatml", "--json")
    found = {finding["kind"]: finding["examples"] for finding in json.loads(as_json)["findings"]}
    say()
    for kind, line_number in planted.items():
        is_found = line_number in [place.get("line") for place in found.get(kind, ())]
        expect(is_found, f"not found: {kind}, planted in line {line_number}")
    expect(code == 1, f"the exit code is {code}")
    say(f"All {len(planted)} were found, each at its line; the exit code is {code}.")


# 2. A bad template


def _catch_bad_template(folder: Path, good: list[dict[str, Any]], tokenizer: Path) -> None:
    head(2, "The conversations are good now, and the template is not")
    path = _write(folder / "good.jsonl", [json.dumps(row) for row in good])
    code, printed = _doctor(path, tokenizer, _write(folder / "forgets.jinja", [FORGETFUL]))
    _, mark, rest = printed.partition("FAILED  end of turn")
    expect(code == 1 and bool(mark), "'end of turn' was not found")
    headline, *details = (mark + rest).splitlines()
    _say_finding(headline)
    for line in itertools.takewhile(lambda line: line.startswith(" "), details[:2]):
        _say_finding(line)
    say()
    say("A loader refuses the same, before its first batch:")
    try:
        _open(_bake(path, tokenizer, FORGETFUL, folder / "forgets.store"), "assistant")
    except SpecError as error:
        for line in str(error).splitlines():
            say(f"  {line}")
        expect("end of turn" in error.where, "it was refused for another reason")
    else:
        expect(False, "it was opened")


# 3. The good set, trained


def _bake(path: Path, tokenizer: Path, template: str, to: Path) -> Path:
    recipe = bw.DatasetRecipe(seed=0).add_ingredient(str(path), name="python")
    bw.bake(recipe.prepare_step(bw.chat(tokenizer, template)), to=to, show_progress=False)
    return to


def _open(store: Path, loss: str, **more: Any) -> bw.ConversationDataLoader:
    settings: dict[str, Any] = {
        "max_length": ROW_TOKENS,
        "packing": "best_fit",
        "seed": 7,
        "epochs": None,
        "framework": "numpy",
    }
    batching = bw.Batching(BATCH_ROWS, epoch_end="short")
    return bw.ConversationDataLoader(store, loss=loss, batch_size=batching, rank=0, world_size=1, **settings, **more)


def _train_on_answers(folder: Path, tokenizer: Path, num_steps: int) -> None:
    head(3, "A good template: packed, and trained on what assistants say and on nothing else")
    store = _bake(folder / "good.jsonl", tokenizer, "chatml", folder / "good.store")
    loader = _open(store, "assistant")
    print(bw.look(loader.get_batch(), rows=1, width=COLUMNS))
    say()
    vocab_size = loader.store.vocab_size + 1  # one more, for the context before a conversation
    before = _losses(store, new_weights(vocab_size))
    say(f'loss="assistant", {num_steps} steps of {BATCH_ROWS} x {ROW_TOKENS} tokens:')
    after = _losses(store, _train(_open(store, "assistant"), vocab_size, num_steps))
    say('The same store under another mask, loss="all":')
    after_all = _losses(store, _train(_open(store, "all"), vocab_size, num_steps))
    say()
    say('loss of                before   loss="assistant"   loss="all"')
    for role, name in (("user", "what users say"), ("assistant", "what assistants say")):
        say(f"{name:<20}  {before[role]:7.2f}  {after[role]:17.2f}  {after_all[role]:11.2f}")
    say()
    learned = after["assistant"] < 0.85 * before["assistant"] and after["user"] > 1.5 * after_all["user"]
    expect(learned, "the losses do not show what was trained")
    say("Answers were learned, and questions were not: only the run on everything learned those.")


def _train(loader: bw.ConversationDataLoader, vocab_size: int, num_steps: int) -> Weights:
    weights, adam, text = new_weights(vocab_size), Adam(), ""
    with LiveLine(sys.stdout) as line:
        for step in range(num_steps):
            batch = loader.get_batch()
            losses, gradients = _step(weights, batch)
            adam.update(weights, gradients, rate=LEARNING_RATE * (1 - 0.9 * step / num_steps))
            mean = float((losses * batch.loss_mask).sum() / batch.loss_mask.sum())
            full = 100 * float((np.asarray(batch.segment_ids) > 0).mean())
            text = f"step {step:>4}/{num_steps - 1}   loss {mean:.3f}   rows {full:.1f} % full"
            line.show(text)
        line.keep(text)
    return weights


def _step(weights: Weights, batch: bw.TrainingBatch) -> tuple[Any, Weights]:
    return token_losses_and_gradients(
        weights, batch.input_ids, batch.targets, loss_mask=batch.loss_mask, segment_ids=batch.segment_ids
    )


def _losses(store: Path, weights: Weights) -> dict[str, float]:
    """The mean loss of what each role says, under some weights."""
    means = {}
    for role in ("user", "assistant"):
        total = count = 0.0
        loader = _open(store, role, shuffle=False, delivery=bw.Delivery(check=False))
        for _ in range(4):
            batch = loader.get_batch()
            losses, _ = _step(weights, batch)
            total += float((losses * batch.loss_mask).sum())
            count += float(batch.loss_mask.sum())
        means[role] = total / count
    return means
