"""The frame of the demos: exit codes, the live line, folded text, and processes that end as they should."""

from __future__ import annotations

import pytest

from batchwright.demo.harness import COLUMNS, Demo, LiveLine, expect, say


def _demo(tell):
    return Demo(name="toy", title="a story.", description="A story.", tell=tell)


def test_a_promise_that_does_not_hold_ends_the_demo_with_exit_code_1(tmp_path, capsys):
    assert _demo(lambda folder: expect(False, "the sky fell")).main(["--folder", str(tmp_path / "new")]) == 1
    printed = capsys.readouterr().out
    assert "NOT AS EXPECTED: the sky fell" in printed
    assert printed.endswith("NOT everything was as promised: see above.\n")


def test_promises_that_hold_end_it_with_exit_code_0(tmp_path, capsys):
    assert _demo(lambda folder: expect(True, "")).main(["--folder", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.endswith("Everything was as promised.\n")


def test_the_runs_of_an_earlier_demo_are_removed_and_its_stores_are_not(tmp_path):
    folder = tmp_path / "new"
    assert _demo(lambda folder: None).main(["--folder", str(folder)]) == 0
    for name in ("runs/old.txt", "some.store"):
        (folder / name).write_text("x")
    assert _demo(lambda folder: None).main(["--folder", str(folder)]) == 0
    assert (folder / "some.store").exists()
    assert list((folder / "runs").iterdir()) == []


def test_a_long_line_is_folded_below_its_own_indent(capsys):
    say("  " + "word " * 40)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("  word")
    assert all(line.startswith("      word") and len(line) <= COLUMNS for line in others)


class _Stream:
    def __init__(self, is_terminal: bool) -> None:
        self.written, self.is_terminal = "", is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("is_terminal", "written"),
    [(True, "\rstep 1\x1b[K\ra jump\x1b[K\n\rstep 2\x1b[K\n"), (False, "step 1\na jump\nstep 2\n")],
    ids=["terminal", "file"],
)
def test_a_note_stays_and_the_line_goes_on_below(is_terminal, written):
    stream = _Stream(is_terminal)
    with LiveLine(stream) as line:
        line.show("step 1")
        line.note("a jump")
        line.keep("step 2")
    assert stream.written == written
