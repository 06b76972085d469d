"""`batchwright demo chat`: a bad set of conversations is caught, fault by fault; a good one is trained on.

The faults are planted, and the demo checks that each is found, with its line. What a mask leaves out is shown not to be
trained: by the losses of what users say and what assistants say, and by a gradient that does not see it at all.
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

__all__ = ["main"]

BATCH_ROWS = 4
ROW_TOKENS = 192
LEARNING_RATE = 0.005
VOCAB_SIZE = 512
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")

FORGETFUL = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
"""A template without an end of turn."""
SYSTEMLESS = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
)
"""A template that drops system messages."""


def _tell(folder: Path, steps: int) -> None:
    folder = folder / "chat"
    folder.mkdir(exist_ok=True)
    good = list(_conversations())
    tokenizer = _train_tokenizer(folder, good)
    _catch_bad_rows(folder, good, tokenizer)
    _catch_bad_templates(folder, good, tokenizer)
    _train_on_answers(folder, tokenizer, steps)


DEMO = Demo(
    name="chat",
    title="conversations that would teach the wrong thing, seen before a run.",
    description="Plant faults in a set of conversations and see each of them caught before a run; then train a tiny "
    "model on a good set, packed, on what assistants say and nothing else.",
    tell=_tell,
    steps=300,
    fewest_steps=40,
    too_few="are too few to see what the model was taught",
)
main = DEMO.main


# What is said


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


# 1. Rows that cannot be meant


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


def _doctor(path: Path, tokenizer: Path, template: str, shown: str, *more: str) -> tuple[int, str]:
    """Run `batchwright doctor chat`: its exit code and its output. `shown` is the template's name on the screen."""
    say(f"$ batchwright doctor chat {near(path)} --tokenizer tokenizer.json --template {shown}")
    command: list[str | Path] = [
        "doctor",
        "chat",
        path,
        "--tokenizer",
        tokenizer,
        "--template",
        template,
        "--show",
        "0",
        *more,
    ]
    return printed_by(command)


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
    limit = ("--max-length", str(ROW_TOKENS))
    code, printed = _doctor(bad, tokenizer, "chatml", "chatml", *limit)
    for line in printed.splitlines():
        _say_finding(line)
    with contextlib.redirect_stdout(io.StringIO()):
        _, report = _doctor(bad, tokenizer, "chatml", "chatml", *limit, "--json")
    found = {finding["kind"]: finding["examples"] for finding in json.loads(report)["findings"]}
    say()
    for kind, line_number in planted.items():
        is_found = line_number in [place.get("line") for place in found.get(kind, ())]
        expect(is_found, f"not found: {kind}, planted in line {line_number}")
    expect(code == 1, f"the exit code is {code}")
    say(f"All {len(planted)} were found, each at its line; the exit code is {code}.")


# 2. Templates that cannot be meant


def _catch_bad_templates(folder: Path, good: list[dict[str, Any]], tokenizer: Path) -> None:
    head(2, "The conversations are good now, and the template is not")
    path = _write(folder / "good.jsonl", [json.dumps(row) for row in good])
    for template, name, kind in (
        ("llama-3", "llama-3", "marker is not a token"),
        (FORGETFUL, "forgets.jinja", "end of turn"),
        (SYSTEMLESS, "systemless.jinja", "dropped by the template"),
    ):
        if name.endswith(".jinja"):
            template = str(_write(folder / name, [template]))
        code, printed = _doctor(path, tokenizer, template, name)
        _, mark, rest = printed.partition(f"FAILED  {kind}")
        expect(code == 1 and bool(mark), f"{kind!r} was not found")
        headline, *details = (mark + rest).splitlines()
        _say_finding(headline)
        for line in itertools.takewhile(lambda line: line.startswith(" "), details[:2]):
            _say_finding(line)
    say()
    say("A loader refuses the same, before its first batch:")
    recipe = _recipe(path, tokenizer, FORGETFUL)
    try:
        _open(_baked(recipe, folder / "forgets.store"), "assistant")
    except SpecError as error:
        for line in str(error).splitlines():
            say(f"  {line}")
        expect("end of turn" in error.where, "it was refused for another reason")
    else:
        expect(False, "it was opened")


# 3. The good set, trained


def _recipe(path: Path, tokenizer: Path, template: str) -> bw.DatasetRecipe:
    recipe = bw.DatasetRecipe(seed=0).add_ingredient(str(path), name="python")
    return recipe.prepare_step(bw.chat(tokenizer, template))


def _baked(recipe: bw.DatasetRecipe, to: Path) -> Path:
    bw.bake(recipe, to=to, show_progress=False)
    return to


def _open(store: Path, loss: str, **more: Any) -> bw.ConversationDataLoader:
    return bw.ConversationDataLoader(
        store,
        max_length=ROW_TOKENS,
        loss=loss,
        packing="best_fit",
        batch_size=bw.Batching(BATCH_ROWS, epoch_end="short"),
        epochs=None,
        seed=7,
        framework="numpy",
        rank=0,
        world_size=1,
        **more,
    )


def _train_on_answers(folder: Path, tokenizer: Path, num_steps: int) -> None:
    head(3, "A good template: packed, and trained on what assistants say and on nothing else")
    store = _baked(_recipe(folder / "good.jsonl", tokenizer, "chatml"), folder / "good.store")
    loader = _open(store, "assistant")
    print(bw.look(loader.get_batch(), rows=1, color=False, width=COLUMNS))
    say()
    vocab_size = loader.store.vocab_size + 1  # one more, for the context before a conversation
    before = _losses(store, new_weights(vocab_size))
    say(f'loss="assistant", {num_steps} steps of {BATCH_ROWS} x {ROW_TOKENS} tokens:')
    answers, ignores_the_rest = _train(_open(store, "assistant"), vocab_size, num_steps)
    say('The same store under another mask, loss="all":')
    everything, _ = _train(_open(store, "all"), vocab_size, num_steps)
    after, after_all = _losses(store, answers), _losses(store, everything)
    say()
    say('loss of                before   loss="assistant"   loss="all"')
    for role, name in (("user", "what users say"), ("assistant", "what assistants say")):
        say(f"{name:<20}  {before[role]:7.2f}  {after[role]:17.2f}  {after_all[role]:11.2f}")
    say()
    learned = after["assistant"] < 0.85 * before["assistant"] and after["user"] > 1.5 * after_all["user"]
    expect(learned, "the losses do not show what was trained")
    say("Answers were learned, and questions were not: only the run on everything learned those.")
    expect(ignores_the_rest, "the gradient depends on targets that the mask leaves out")
    say("In the first step all targets outside of the mask were replaced: the same gradient, bit for bit.")


def _train(loader: bw.ConversationDataLoader, vocab_size: int, num_steps: int) -> tuple[Weights, bool]:
    """(the trained weights, whether the first gradient ignored every target that the mask leaves out)."""
    weights, adam = new_weights(vocab_size), Adam()
    ignores_the_rest = False
    with LiveLine(sys.stdout) as line:
        for step in range(num_steps):
            batch = loader.get_batch()
            mask, segments = batch.loss_mask, np.asarray(batch.segment_ids)
            losses, gradients = _step(weights, batch, batch.targets)
            if not step:
                others = np.where(
                    mask > 0, batch.targets, np.random.default_rng(0).integers(vocab_size, size=mask.shape)
                )
                _, again = _step(weights, batch, others)
                ignores_the_rest = all(np.array_equal(gradients[name], again[name]) for name in gradients)
            adam.update(weights, gradients, rate=LEARNING_RATE * (1 - 0.9 * step / num_steps))
            mean = float((losses * mask).sum() / mask.sum())
            full = 100 * float((segments > 0).mean())
            text = f"step {step:>4}/{num_steps - 1}   loss {mean:.3f}   rows {full:.1f} % full"
            line.show(text)
        line.keep(text)
    return weights, ignores_the_rest


def _step(weights: Weights, batch: bw.TrainingBatch, targets: Any) -> tuple[Any, Weights]:
    return token_losses_and_gradients(
        weights, batch.input_ids, targets, loss_mask=batch.loss_mask, segment_ids=batch.segment_ids
    )


def _losses(store: Path, weights: Weights) -> dict[str, float]:
    """The mean loss of what each role says, under some weights."""
    means = {}
    for role in ("user", "assistant"):
        total = count = 0.0
        loader = _open(store, role, shuffle=False, delivery=bw.Delivery(check=False))
        for _ in range(4):
            batch = loader.get_batch()
            losses, _ = _step(weights, batch, batch.targets)
            total += float((losses * batch.loss_mask).sum())
            count += float(batch.loss_mask.sum())
        means[role] = total / count
    return means


if __name__ == "__main__":
    sys.exit(main())
