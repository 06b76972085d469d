"""`make bench-peers`: its tables leave no peer out, and a peer that failed says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import buffer as buffer_program  # noqa: E402
from benchmarks import rl as rl_program  # noqa: E402
from benchmarks.peers import __main__ as program  # noqa: E402
from benchmarks.peers import baking, loading  # noqa: E402
from benchmarks.peers.buffer_numpy import Growable  # noqa: E402
from benchmarks.peers.buffers import measure_buffer  # noqa: E402
from benchmarks.peers.documents import document_hashes  # noqa: E402
from benchmarks.peers.karmarkar_karp import karmarkar_karp  # noqa: E402
from benchmarks.peers.processes import run_child  # noqa: E402
from benchmarks.peers.rollouts import measure_rollouts  # noqa: E402
from benchmarks.peers.table import Row, markdown, missing, spread  # noqa: E402


def rounds_of(name: str, *rates: float, **more: object) -> Row:
    """A row as the loading rounds leave it."""
    row = Row(name)
    for rate in rates:
        row.add(
            {
                "mtok_s": rate,
                "ours_mtok_s": 90.0,
                "first_s": 0.5,
                "peak_mb": 9.0,
                "anonymous_mb": 1.0,
                "version": "1",
                **more,
            }
        )
    return row


def test_a_peer_without_a_row_is_missing():
    assert missing(["grain", "lance"], [rounds_of("grain", 5.0)], "mtok_s") == ["lance"]


def test_a_row_with_neither_numbers_nor_a_reason_is_missing():
    assert missing(["grain"], [Row("grain")], "mtok_s") == ["grain"]


def test_a_peer_that_failed_is_not_missing_and_its_row_says_why():
    row = Row("lance")
    row.add({"error": "ImportError: no module named lance"})
    assert missing(["lance"], [row], "mtok_s") == []
    assert "| lance | ImportError: no module named lance |" in loading.show_loading(
        [rounds_of("batchwright", 9.0), row]
    )


def test_a_peer_that_fails_in_a_later_round_has_no_numbers_in_the_table():
    row = rounds_of("lance", 123.0)
    row.add({"error": "OSError: disk full"})
    shown = loading.show_loading([row])
    assert "OSError: disk full" in shown
    assert "123" not in shown


def test_ratios_are_taken_between_neighbours():
    row = rounds_of("grain", 5.0, 9.0)
    row.measured["ours_mtok_s"] = [10.0, 90.0]
    assert loading.ratios(row) == [2.0, 10.0]


def test_a_ratio_is_left_out_where_ours_failed():
    row = rounds_of("grain", 5.0, 9.0)
    row.measured["ours_mtok_s"] = [None, 90.0]
    assert loading.ratios(row) == [10.0]


def test_the_claim_names_the_fastest_library_that_resumed_exactly():
    exact, other = {"seconds": 1.0, "is_exact": True}, {"seconds": 1.0, "is_exact": False}
    rows = [rounds_of("batchwright", 90.0)]
    for name, rate, resume in (("slow", 1.0, exact), ("good", 10.0, exact), ("inexact", 50.0, other)):
        rows.append(rounds_of(name, rate, resumes_by="state_dict()"))
        rows[-1].measured["resume"] = [resume]
    assert "is good: batchwright is 9.00 times" in program.loading_claim(rows)


def test_a_median_is_shown_with_the_least_and_the_most():
    assert spread([3.0, 1.0, 2.0]) == "2.0 (1.0 - 3.0)"


def test_a_bar_in_an_error_does_not_break_the_table():
    assert markdown(["a"], [["x | y"]]).splitlines()[-1] == "| x \\| y |"


def test_documents_compare_equal_in_any_order_and_only_with_the_same_ids():
    first, second = np.array([1, 2, 0]), np.array([3, 0])
    assert document_hashes([first, second]) == document_hashes([second, first])
    assert document_hashes([first, second]) != document_hashes([first, np.array([3, 3, 0])])


def test_every_peer_of_a_table_has_a_file():
    modules = [peer.module for peer in loading.PEERS] + [baker.module for baker in baking.BAKERS]
    modules += [contender.module for contender in buffer_program.CONTENDERS]
    modules += [way.module for way in rl_program.WAYS]
    assert [name for name in modules if not (ROOT / "benchmarks" / "peers" / f"{name}.py").exists()] == []
    files = {path.stem for path in (ROOT / "benchmarks" / "peers").glob("load_*.py")}
    files |= {path.stem for path in (ROOT / "benchmarks" / "peers").glob("bake_*.py")}
    files |= {path.stem for path in (ROOT / "benchmarks" / "peers").glob("buffer_*.py")}
    files |= {path.stem for path in (ROOT / "benchmarks" / "peers").glob("rollouts_*.py")}
    assert files == set(modules)


def test_a_peer_that_cannot_be_imported_answers_with_the_exception():
    found = run_child({"peer": "load_nobody", "do": "speed"}, limit_seconds=60)
    assert found["error"].startswith("ModuleNotFoundError: No module named 'benchmarks.peers.load_nobody'")


def test_a_child_that_takes_too_long_is_ended_and_said():
    assert run_child({"peer": "load_numpy", "do": "speed"}, limit_seconds=0.01)["error"] == "not done after 0 s"


@pytest.mark.parametrize(
    ("reason", "code"), [(None, 1), ("ImportError: no module named lance", 0)], ids=["silent", "with a reason"]
)
def test_the_run_fails_exactly_where_a_peer_is_missing_without_a_reason(monkeypatch, capsys, tmp_path, reason, code):
    def measured(peers, **options):
        rows = [rounds_of(name, 9.0) for peer in peers for name, _ in peer.rows()]
        return [*rows[:-1], Row(rows[-1].name, why_not=reason)]

    monkeypatch.setattr(loading, "measure_loading", measured)
    monkeypatch.setattr(sys, "argv", ["peers", "--only", "load_lance", "--out", str(tmp_path / "tables.md")])
    assert program.main() == code
    assert ("Lance take" in capsys.readouterr().err) == (code == 1)
    assert (reason or "| Lance take |") in (tmp_path / "tables.md").read_text()


def test_the_run_fails_where_batchwright_itself_has_no_numbers(monkeypatch, capsys):
    def measured(peers, **options):
        return [Row(name, why_not="OSError: none") for peer in peers for name, _ in peer.rows()]

    monkeypatch.setattr(loading, "measure_loading", measured)
    monkeypatch.setattr(sys, "argv", ["peers", "--only", "load_lance"])
    assert program.main() == 1
    assert "batchwright" in capsys.readouterr().err


def test_a_bake_with_other_ids_has_no_numbers(monkeypatch, tmp_path):
    (tmp_path / "documents").mkdir()
    (tmp_path / "facts.json").write_text(json.dumps({"bpe_tokens": 2, "bytes": 2, "documents": 2}))
    (tmp_path / "bpe-ids.json").write_text(json.dumps(["a", "b"]))
    monkeypatch.setenv("BATCHWRIGHT_BENCH", str(tmp_path))
    (tmp_path / "peers").mkdir()
    monkeypatch.setattr(baking, "make_corpus", lambda num_bytes, say: baking.Corpus(tmp_path))
    answers = {"bake": {"seconds": 1.0}, "read_back": {"hashes": ["a", "c"]}}
    monkeypatch.setattr(baking, "run_child", lambda task, **options: answers[task["do"]])
    (row,), _ = baking.measure_baking(baking.BAKERS[:1], "bpe", num_bytes=2, rounds=1, say=lambda line: None)
    assert row.why_not == "other ids: 1 of 2 documents are identical"


class KeepsTheCallersArrays(Growable):
    """It seems to be as fast as nothing else is."""

    def extend(self, block):
        self.label, self.obs = block
        self.num_rows = len(self.label)


BUFFER_TASK = {"way": "blocks", "block_rows": 300, "num_rows": 300, "how": "", "folder": "unused", "clock": "wall"}
needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")


@needs_proc
def test_a_buffer_that_copies_rows_is_measured():
    found = measure_buffer(lambda *_: Growable(64), {**BUFFER_TASK, "limit_seconds": 9})
    assert found["rows"] == 300
    assert found["batches_s"] > 0


@needs_proc
def test_a_buffer_that_keeps_the_callers_arrays_has_no_numbers():
    with pytest.raises(AssertionError, match="other rows came back"):
        measure_buffer(lambda *_: KeepsTheCallersArrays(64), {**BUFFER_TASK, "limit_seconds": 9})


def test_goals_of_the_buffer_name_the_fastest_library():
    rates = {"batchwright": 6.0, "pyarrow, chunks combined": 4.0, "Polars, vstack": 3.0, "Python list of dicts": 9.0}
    rows = [Row(name, {"rows_s": [rate], "batches_s": [rate]}) for name, rate in rates.items()]
    shown = buffer_program.goals({"blocks_100": rows})
    assert "| Columns in blocks of 100 | rows/s | pyarrow, chunks combined | 1.50 | 1 |" in shown
    assert "list of dicts" not in shown


# Rollouts


def test_largest_differencing_gives_every_number_to_one_set_of_equal_count():
    numbers = [9, 1, 1, 8, 3, 3, 7, 6, 2]
    sets = karmarkar_karp(numbers, 3)
    assert sorted(place for places in sets for place in places) == list(range(9))
    assert [len(places) for places in sets] == [3, 3, 3]
    assert max(sum(numbers[place] for place in places) for places in sets) == 14  # of 40: no division has less


def test_zigzag_deals_sorted_rows_there_and_back():
    assert rl_program.zigzag(np.array([5, 9, 7, 1]), 2).tolist() == [1, 0, 1, 0]


@needs_proc
def test_the_dict_of_tensors_and_the_loader_learn_from_the_same_numbers():
    pytest.importorskip("torch")
    from benchmarks.peers import rollouts_batchwright, rollouts_tensors

    task = {"num_prompts": 2, "form": "lists", "clock": "wall"}
    theirs = measure_rollouts(rollouts_tensors.run, {**task, "how": ""})
    assert theirs["rows"] == 16
    for how in ("one rank", "one width", "by tokens"):
        ours = measure_rollouts(rollouts_batchwright.run, {**task, "how": how})
        assert ours["checked"] == pytest.approx(theirs["checked"], rel=1e-5)


def test_rows_of_gae_have_numbers_or_say_why_not():
    rows = rl_program.measure_gae(rounds=1, num_rows=3, num_steps=5)
    assert missing([row.name for row in rows], rows, "ms") == []
    assert "| batchwright, NumPy |" in rl_program.show_gae(rows)


def test_a_rollout_row_is_compared_with_the_tensors_of_its_round():
    def row(name, *seconds):
        facts = {"places": 9, "tokens": 6, "more_mb": 5.0, "read_s": 1.0, "advantages_s": 1.0, "batches_s": 1.0}
        return Row(name, {"all_s": list(seconds), **{key: [value] * len(seconds) for key, value in facts.items()}})

    shown = rl_program.show_rollouts([row("tensors", 6.0, 9.0), row("batchwright", 2.0, 1.0)], "lists")
    assert "| 6.0 (3.0 - 9.0) | 1.50 |" in shown


def test_a_log_is_measured():
    found = rl_program.measure_log(num_groups=2, ask=2, batch_rows=8)
    assert len(found) == 3
    assert min(found.values()) > 0
