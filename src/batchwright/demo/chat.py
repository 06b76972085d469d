"""`batchwright demo chat`: a bad set of conversations is caught, fault by fault; a good one is trained on.

The faults are planted, and the demo checks that each is found, with its line. What a mask leaves out is shown not to be
trained: by the losses of what users say and what assistants say, and by a gradient that does not see it at all.
"""

from __future__ import annotations

import argparse
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
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.cli.main import main as batchwright
from batchwright.demo.model import Adam, Weights, new_weights, token_losses_and_gradients
from batchwright.demo.runs import perform
from batchwright.demo.screen import COLUMNS, LiveLine, exit_code_of, head, near, say

__all__ = ["main"]

BATCH_ROWS = 4
ROW_TOKENS = 192
LEARNING_RATE = 0.005
VOCAB_SIZE = 512
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
MIN_STEPS = 40

FORGETFUL = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
"""A template that does not say when an answer ends."""
DEAF = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
)
"""A template that leaves out system messages."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo. 0: everything it promises held; 1: something did not; 2: not done; 130: Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="batchwright demo chat",
        description="Plant faults in a set of conversations and see each of them caught before a run; then train a "
        "tiny model on a good set, packed, on what assistants say and nothing else. No network, no torch, under a "
        "minute.",
    )
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where everything goes (default: .demo)")
    parser.add_argument("--steps", type=int, default=300, help="steps to train (default: 300)")
    asked = parser.parse_args(argv)
    return exit_code_of(lambda: _demo(asked.folder, asked.steps))


def _demo(folder: Path, num_steps: int) -> int:
    if num_steps < MIN_STEPS:
        raise SpecError(
            f"in --steps {num_steps} the model learns too little to see what it was taught",
            parameter="steps",
            remedy=f"--steps {MIN_STEPS}",
        )
    title = "batchwright demo chat: conversations that would teach the wrong thing, seen before a run."
    return perform(title, folder, lambda: _tell(folder / "chat", num_steps))


def _tell(folder: Path, num_steps: int) -> bool:
    folder.mkdir(exist_ok=True)
    good = list(_conversations())
    tokenizer = _train_tokenizer(folder, good)
    held = [_catch_bad_rows(folder, good, tokenizer), _catch_bad_templates(folder, good, tokenizer)]
    held.append(_train_on_answers(folder, tokenizer, num_steps))
    return all(held)


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


def _catch_bad_rows(folder: Path, good: list[dict[str, Any]], tokenizer: Path) -> bool:
    head(1, f"{len(FAULTS)} faults are planted among {len(good)} conversations")
    lines = [json.dumps(row) for row in good]
    planted: dict[str, int] = {}
    for number, fault in enumerate(FAULTS):
        at = 3 + 5 * number
        lines[at] = fault.spoil(good[at])
        planted[fault.kind] = at + 1
        say(f"  line {at + 1:>3}  {fault.what}")
    bad = _write(folder / "bad.jsonl", lines)
    command = ["doctor", "chat", str(bad), "--tokenizer", str(tokenizer), "--template", "chatml"]
    command += ["--max-length", str(ROW_TOKENS), "--show", "0"]
    say()
    say(f"$ batchwright doctor chat {near(bad)} --tokenizer tokenizer.json --template chatml")
    code, printed = _run(command)
    for line in printed.splitlines():
        _say_folded(line)
    found = {finding["kind"]: finding["examples"] for finding in json.loads(_run([*command, "--json"])[1])["findings"]}
    missed = [
        kind for kind, line in planted.items() if line not in [place.get("line") for place in found.get(kind, ())]
    ]
    say()
    if missed or code != 1:
        say(f"NOT AS EXPECTED: not found: {', '.join(missed) or 'nothing, and the exit code is ' + str(code)}")
        return False
    say(f"All {len(planted)} were found, each at its line; the exit code is {code}.")
    return True


def _run(command: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = batchwright(command)
    return code, printed.getvalue()


# 2. Templates that cannot be meant


def _catch_bad_templates(folder: Path, good: list[dict[str, Any]], tokenizer: Path) -> bool:
    head(2, "The conversations are good now, and the template is not")
    path = _write(folder / "good.jsonl", [json.dumps(row) for row in good])
    held = []
    for template, name, expected in (
        ("llama-3", "llama-3", "marker is not a token"),
        (FORGETFUL, "forgets.jinja", "end of turn"),
        (DEAF, "deaf.jinja", "dropped by the template"),
    ):
        if name.endswith(".jinja"):
            template = str(_write(folder / name, [template]))
        say(f"$ batchwright doctor chat {near(path)} --tokenizer tokenizer.json --template {name}")
        command = ["doctor", "chat", str(path), "--tokenizer", str(tokenizer), "--template", template, "--show", "0"]
        code, printed = _run(command)
        lines = printed.splitlines()
        first = next((n for n, line in enumerate(lines) if line.startswith(f"FAILED  {expected}")), None)
        held.append(code == 1 and first is not None)
        if not held[-1]:
            say(f"NOT AS EXPECTED: {expected!r} was not found")
            continue
        assert first is not None
        _say_folded(lines[first])
        for line in itertools.takewhile(lambda line: line.startswith(" "), lines[first + 1 : first + 3]):
            _say_folded(line)
    say()
    say("A loader refuses the same, before its first batch:")
    try:
        recipe = _recipe(path, tokenizer, FORGETFUL)
        short = bw.Batching(epoch_end="short")
        bw.ConversationDataLoader(_baked(recipe, folder / "forgets.store"), max_length=ROW_TOKENS, batch_size=short)
    except SpecError as error:
        for line in str(error).splitlines():
            _say_folded(f"  {line}")
        held.append("end of turn" in error.where)
    else:
        say("NOT AS EXPECTED: it was opened")
        held.append(False)
    return all(held)


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


def _train_on_answers(folder: Path, tokenizer: Path, num_steps: int) -> bool:
    head(3, "A good template: packed, and trained on what assistants say and on nothing else")
    store = _baked(_recipe(folder / "good.jsonl", tokenizer, "chatml"), folder / "good.store")
    loader = _open(store, "assistant")
    print(bw.look(loader.get_batch(), rows=1, color=False, width=COLUMNS))
    say()
    vocab_size = loader.store.vocab_size + 1  # one more, for what lies before a conversation
    before = _losses(store, new_weights(vocab_size))
    say(f'loss="assistant", {num_steps} steps of {BATCH_ROWS} x {ROW_TOKENS} tokens:')
    answers, blind = _train(_open(store, "assistant"), vocab_size, num_steps)
    say('The same store under another mask, loss="all":')
    everything, _ = _train(_open(store, "all"), vocab_size, num_steps)
    after, after_all = _losses(store, answers), _losses(store, everything)
    say()
    say('loss of                before   loss="assistant"   loss="all"')
    for role, name in (("user", "what users say"), ("assistant", "what assistants say")):
        say(f"{name:<20}  {before[role]:7.2f}  {after[role]:17.2f}  {after_all[role]:11.2f}")
    say()
    held = [after["assistant"] < 0.85 * before["assistant"], after["user"] > 1.5 * after_all["user"], blind]
    say(
        "Answers were learned, and questions were not: only the run on everything learned those."
        if all(held[:2])
        else "NOT AS EXPECTED: the losses do not show what was trained"
    )
    say(
        "In the first step all targets outside of the mask were replaced: the same gradient, bit for bit."
        if blind
        else "NOT AS EXPECTED: the gradient depends on targets that the mask leaves out"
    )
    return all(held)


def _train(loader: bw.ConversationDataLoader, vocab_size: int, num_steps: int) -> tuple[Weights, bool]:
    """(the trained weights, whether the first gradient was blind to all that the mask leaves out)."""
    weights, adam = new_weights(vocab_size), Adam()
    blind = False
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
                blind = all(np.array_equal(gradients[name], again[name]) for name in gradients)
            adam.update(weights, gradients, rate=LEARNING_RATE * (1 - 0.9 * step / num_steps))
            mean = float((losses * mask).sum() / mask.sum())
            full = 100 * float((segments > 0).mean())
            text = f"step {step:>4}/{num_steps - 1}   loss {mean:.3f}   rows {full:.1f} % full"
            line.show(text)
        line.keep(text)
    return weights, blind


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


def _say_folded(text: str) -> None:
    indent = 8 if text.startswith(("FAILED ", "note ")) else len(text) - len(text.lstrip()) + 4
    say(textwrap.fill(text, COLUMNS, subsequent_indent=" " * indent) if text else "")


if __name__ == "__main__":
    sys.exit(main())
