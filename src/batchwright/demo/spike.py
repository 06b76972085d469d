"""`batchwright demo spike`: the loss jumps; find the document behind it, go back, skip it, and go on.

The demo plants the document, and then finds it without that knowledge: the jump in the losses, the file by `trace`.
"""

from __future__ import annotations

import random
import statistics
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.batches.settings import Asked
from batchwright.batches.types import TraceRecord
from batchwright.demo.harness import Demo, expect, head, near, say, show_pieces, show_verb
from batchwright.demo.model import CHECKPOINT, read_checkpoint, write_checkpoint
from batchwright.demo.train import TrainingRun, bake_library, expect_equal, kept_checkpoint
from batchwright.loaders.pretrain import make_plan
from batchwright.order.plan import Plan

BATCH_ROWS = 2
ROW_TOKENS = 512
"""Few and long rows: one row of noise is then half of a step, and its loss stands out from that of odd real text."""
JUMP_NATS = 1.8
"""Over seeds, in runs of 400 steps, real text rose by at most 1.61 and the first row of noise by at least 2.82; in runs
of 160 steps by 1.76 and 1.92."""
WINDOW_STEPS = 20
HEAD_LINES = 12
NOISE_LINES = 40
NOISE_COLUMNS = 64


def _tell(folder: Path, steps: int) -> None:
    head(1, "Bake Python's own standard library and one more file, most of it noise")
    planted = _plant(folder / "planted" / "mangled.py")
    store = bake_library(folder / "spike.store", planted.file)
    seed = _seed_for_late_noise(store, planted, steps)
    say(f"Seed {seed} is the first whose shuffle has the noise in the third quarter of the run.")
    say("From here on, the demo does not use what it knows of that file.")

    head(2, f"Train a tiny neural language model: plain NumPy, {steps} steps of {BATCH_ROWS} x {ROW_TOKENS} bytes")
    settings = {"batch_size": BATCH_ROWS, "chunk_size": ROW_TOKENS, "seed": seed, "keep_all": True}
    first = TrainingRun(store, folder / "runs" / "first", steps, steps // 16, settings)
    first.watch(note=_jump_just_now)
    say(f"Done: {first.summary()}")
    jump = _first_jump(first)

    uses = _trace_the_jump(store, first, jump, planted)
    plan, amended = _go_back_and_skip(store, first, jump, uses)
    _compare(store, first, amended, plan, uses)


main = Demo(
    name="spike",
    title="the loss jumps. Which text caused it, and how does the run go on without it?",
    description="Plant a file of noise among Python's own sources, train a tiny model on them, see the loss jump, "
    "trace the jump to file and lines, go back to the checkpoint before it, skip the file, go on.",
    tell=_tell,
    steps=400,
    fewest_steps=160,
).main


# 1. The store, with the noise in it


@dataclass(frozen=True, slots=True)
class _Planted:
    file: Path
    lines: tuple[int, int]
    """First and last line of the noise, counted from 1."""

    def holds(self, lines: tuple[int, int] | None) -> bool:
        return lines is not None and self.lines[0] <= lines[0] and lines[1] <= self.lines[1]


def _plant(path: Path) -> _Planted:
    """Write a file that begins like a real one and goes on as noise: the same random Unicode every time."""
    model = Path(sysconfig.get_path("stdlib"), "textwrap.py")
    draw = random.Random(0)
    noise = ["".join(_any_character(draw) for _ in range(NOISE_COLUMNS)) for _ in range(NOISE_LINES)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([*model.read_text("utf-8").split("\n")[:HEAD_LINES], *noise, ""]), "utf-8")
    say(f"{path}: lines 1-{HEAD_LINES} are those of {model.name},")
    say(f"lines {HEAD_LINES + 1}-{HEAD_LINES + NOISE_LINES} are {NOISE_LINES * NOISE_COLUMNS:,} characters of noise.")
    return _Planted(path, (HEAD_LINES + 1, HEAD_LINES + NOISE_LINES))


def _any_character(draw: random.Random) -> str:
    """One that takes 2, 3 or 4 bytes, each as often."""
    return chr(draw.randrange(*draw.choice([(0xA1, 0x800), (0x800, 0xD800), (0x10000, 0x110000)])))


def _seed_for_late_noise(store: Path, planted: _Planted, num_steps: int) -> int:
    """The first seed for which the first use of the planted file is a row of noise in the third quarter of the run."""
    opened = bw.open_store(store)
    wanted = range(num_steps // 2, 3 * num_steps // 4)
    for seed in range(1000):
        plan = make_plan(opened, Asked(chunk_size=ROW_TOKENS, seed=seed))
        most_steps = (plan.epoch_rows or 0) // BATCH_ROWS
        if num_steps > most_steps:
            what = f"--steps {num_steps} is more than one epoch of this corpus"
            raise SpecError(what, parameter="steps", remedy=f"--steps {most_steps} or less")
        use = bw.find(opened, plan, file=planted.file, batch_size=BATCH_ROWS)[0]
        fills_row = use.window_span == (0, ROW_TOKENS + 1)
        if use.step in wanted and fills_row and planted.holds(use.lines):
            return seed
    raise SpecError("no seed brings the noise late in the run", parameter="steps", remedy="more --steps")


# 2. The jump


def find_jumps(losses: Sequence[float]) -> list[int]:
    """Steps whose loss is far above the median of the steps before.

    >>> find_jumps([2.5] * 30 + [5.0, 2.5, 2.4])
    [30]
    """
    return [step for step in range(WINDOW_STEPS, len(losses)) if _rise(losses, step) > JUMP_NATS]


def _rise(losses: Sequence[float], step: int) -> float:
    return losses[step] - statistics.median(losses[step - WINDOW_STEPS : step])


def _numbers(losses: dict[int, str]) -> list[float]:
    return [float.fromhex(losses[step]) for step in sorted(losses)]


def _jump_just_now(run: TrainingRun) -> str | None:
    """The note on the screen when the last step of a run was a jump."""
    losses = _numbers(run.losses)
    step = len(losses) - 1
    if step < WINDOW_STEPS or _rise(losses, step) <= JUMP_NATS:
        return None
    above = f"{_rise(losses, step):.2f} above the median of the {WINDOW_STEPS} steps before"
    return f"step {step:>4}       loss {losses[step]:.3f}   A JUMP: {above}"


def _first_jump(run: TrainingRun) -> int:
    """The first jump, drawn together with the steps around it."""
    losses = _numbers(run.losses)
    jumps = find_jumps(losses)
    expect(bool(jumps), f"no step's loss is {JUMP_NATS} above the median of the {WINDOW_STEPS} before it")
    for step in range(jumps[0] - 4, min(jumps[0] + 5, len(losses))):
        say(f"  step {step:>4}  {losses[step]:6.3f}  {'#' * round(8 * losses[step])}")
    return jumps[0]


# 3. From the jump to the text


def _trace_the_jump(store: Path, run: TrainingRun, jump: int, planted: _Planted) -> list[TraceRecord]:
    """Show the text of the step, blame a file by the loss of its row, and return every use of that file."""
    head(3, f"What was in step {jump}? bw.trace(store, state, step={jump})")
    state = run.checkpoint().loader
    records = list(bw.trace(store, state, step=jump))
    losses = run.row_losses[jump]
    show_pieces(records, sysconfig.get_path("stdlib"), losses)
    worst = max(range(len(losses)), key=losses.__getitem__)
    blamed = max((r for r in records if r.row_in_batch == worst), key=lambda r: r.window_span[1] - r.window_span[0])
    assert blamed.lines is not None
    lines = f"lines {blamed.lines[0]}-{blamed.lines[1]}"
    say(f"Row {worst} has the largest loss. Most of it is {near(blamed.file)}, {lines}.")
    noise = f"lines {planted.lines[0]}-{planted.lines[1]}"
    is_planted = Path(blamed.file).resolve() == planted.file.resolve() and planted.holds(blamed.lines)
    expect(is_planted, f"the noise is in {planted.file}, {noise}")
    say(f"That is right: the noise was planted there, in {noise}.")

    uses: list[TraceRecord] = bw.find(store, state, file=blamed.file)
    positions = {use.position for use in uses}
    steps = sorted({use.step for use in uses if use.step is not None and use.step < run.num_steps})
    say()
    say("Where else? bw.find(store, state, file=...), without a scan of the data:")
    say(f"{len(positions)} rows of the epoch hold a part of it. In this run: steps {', '.join(map(str, steps))}.")
    return uses


# 4. Back, and past it


def _go_back_and_skip(store: Path, first: TrainingRun, jump: int, uses: list[TraceRecord]) -> tuple[Plan, TrainingRun]:
    """(the amended plan, the run under it from the checkpoint before the jump)."""
    resumed_from = (jump - 1) // first.checkpoint_steps * first.checkpoint_steps
    head(4, f"Go back to the checkpoint after {resumed_from} steps, skip that file, and go on")
    checkpoint = read_checkpoint(kept_checkpoint(first.folder, resumed_from))
    loader = bw.PretrainDataLoader(store, plan=checkpoint.loader, epochs=None, framework="numpy", rank=0, world_size=1)
    loader.load_state_dict(checkpoint.loader)
    ahead = sorted({use.position for use in uses if use.position >= loader.position})
    plan = loader.amend(skip=ahead)
    say(
        f"  loader.load_state_dict(state)       # position {loader.position}: {resumed_from} steps of {BATCH_ROWS} rows"
    )
    say(f"  {f'loader.amend(skip=[{ahead[0]}, ...])':<34}  # {len(ahead)} positions, from find")
    say(f"Plan {checkpoint.loader['plan']} became {plan.fingerprint}.")

    settings = {"plan": plan.fingerprint, "batch_size": BATCH_ROWS}
    amended = TrainingRun(store, first.folder.with_name("amended"), first.num_steps, first.checkpoint_steps, settings)
    amended.folder.mkdir()
    write_checkpoint(amended.folder / CHECKPOINT, replace(checkpoint, loader=loader.state_dict()))
    pid = amended.watch()
    went_on_from = min(amended.losses)
    say(f"Process {pid} went on from step {went_on_from} to step {max(amended.losses)}, in {amended.seconds:.1f} s.")
    expect(went_on_from == resumed_from, f"the checkpoint was one after {resumed_from} steps")
    return plan, amended


# 5. Before and after


def _compare(store: Path, first: TrainingRun, amended: TrainingRun, plan: Plan, uses: list[TraceRecord]) -> None:
    """Before the skipped rows nothing changed, and from there on they are gone."""
    skipped = {position for begin, end in plan.skips for position in range(begin, end + 1)}
    parted_at = min(use.step for use in uses if use.position in skipped and use.step is not None)
    expect(parted_at < first.num_steps, "no row that was skipped is in this run")
    head(5, f"Before step {parted_at} nothing changed, and from there on the file is gone")
    _show_side_by_side(first, amended, parted_at)
    expect_equal("amended run", amended.losses, "first run", first.losses, range(min(amended.losses), parted_at))
    _expect_no_jump(first, amended)
    _show_history(store, plan)


def _expect_no_jump(first: TrainingRun, amended: TrainingRun) -> None:
    jumps = find_jumps(_numbers({**first.losses, **amended.losses}))
    expect(not jumps, f"the loss jumps again, at steps {jumps}")
    say("The amended run does not jump at all.")


def _show_history(store: Path, plan: Plan) -> None:
    say()
    printed = show_verb("plan", store, plan.fingerprint[:8])
    (_, amendment) = str(plan.amendments[-1]).split(": ", 1)
    is_shown = all(text in printed for text in (*plan.lineage, amendment))
    expect(is_shown, "`batchwright plan` does not show the amendment")


def _show_side_by_side(first: TrainingRun, amended: TrainingRun, parted_at: int) -> None:
    say("           first run   amended run")
    for step in range(max(parted_at - 3, min(amended.losses)), min(parted_at + 4, first.num_steps)):
        was, now = first.losses[step], amended.losses[step]
        note = "equal in every bit" if now == was else "other rows"
        say(f"step {step:>4}  {float.fromhex(was):10.3f}  {float.fromhex(now):12.3f}   {note}")
