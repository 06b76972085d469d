"""The command line as a whole: help, errors, exit codes, pipes and interrupts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

import batchwright as bw
from batchwright.cli.main import VERBS
from harness import descendants, wait_for

HEAVY = ("numpy", "pyarrow", "torch", "rich", "tokenizers", "cloudpickle", "transformers")


def heavy_modules_after(environment: dict[str, str], *arguments: str) -> list[str]:
    script = (
        "import sys, contextlib\n"
        "from batchwright.cli.main import main\n"
        f"with contextlib.suppress(SystemExit): main({list(arguments)!r})\n"
        f"print('loaded:', *sorted(sys.modules.keys() & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


def test_help_loads_nothing_heavy(environment):
    assert heavy_modules_after(environment, "--help") == []


def test_help_of_a_verb_loads_nothing_heavy(environment):
    assert heavy_modules_after(environment, "drill", "--help") == []


def test_the_check_for_heavy_modules_can_fail(store, environment):
    assert "numpy" in heavy_modules_after(environment, "info", str(store))


def test_help_names_every_verb_and_the_exit_codes(succeeds):
    text = succeeds("--help").out
    for verb in VERBS:
        assert re.search(rf"^    {verb}(\s|$)", text, re.MULTILINE)
    for code in ("0    done", "1    a check failed", "2    not done", "130  interrupted"):
        assert code in text


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "demo"])
def test_every_verb_explains_itself_with_an_example(verb, succeeds):
    text = succeeds(verb, "--help").out
    assert f"usage: batchwright {verb}" in text
    assert f"examples:\n  batchwright {verb}" in text


# (verb and arguments, what its text says, what its JSON says of the same)
REPORTS = [
    (["info", "STORE"], "tokenizer  bytes, 257 ids", lambda json: json["tokenizer"]["vocab_size"] == 257),
    (["look", "STORE", "--count", "1"], "document 0 (train): ", lambda json: len(json["documents"]) == 1),
    (
        ["look", "STORE", "PLAN", "--step", "1"],
        "row 11: web, position 23",
        lambda json: json["rows"][11]["position"] == 23,
    ),
    (["plan", "STORE"], "batch sizes", lambda json: json["plans"][0]["runs"] == [[[0, 0, 12]]]),
    (["plan", "STORE", "PLAN"], "12 rows, 192 tokens a step", lambda json: json["batch_rows"] == 12),
    (["trace", "STORE", "PLAN", "--step", "9"], "step 9, rank 0", lambda json: json["records"][0]["step"] == 9),
    (["verify", "STORE"], "whole", lambda json: json["ok"]),
    (["digest", "STORE", "PLAN", "--steps", "0-9"], "steps 0-9, 120 rows", lambda json: json["num_rows"] == 120),
    (["gc", "STORE"], "nothing", lambda json: json["removals"] == []),
]


@pytest.mark.parametrize(
    ("arguments", "said", "is_right"),
    REPORTS,
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_verb_reports_in_text_and_in_json(arguments, said, is_right, store, plan, process_succeeds):
    command = [{"STORE": store, "PLAN": plan}.get(argument, argument) for argument in arguments]
    text, as_json = process_succeeds(*command), process_succeeds(*command, "--json")
    assert said in text.out
    assert is_right(as_json.json)
    assert text.err == as_json.err == ""


def test_help_of_bake_says_that_a_recipe_is_code(succeeds):
    assert "trust" in succeeds("bake --help").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["info", "no.store"], "no.store"),
        (["trace", "STORE", "dead", "--step", "0"], "plan dead"),
        (["trace", "STORE", "PLAN", "--step", "-1"], "step -1"),
        (["plan", "STORE", "--chunk-size", "16", "--weights", "web=.7,cod=.3"], "'cod'"),
        (["plan", "STORE", "--chunk-size", "16", "--weights", "web"], "'web'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_ends_a_process_with_code_two_and_one_message(arguments, said, store, plan, process_refuses):
    names = {"STORE": store, "PLAN": plan}
    assert said in process_refuses(*(names.get(argument, argument) for argument in arguments))


def test_version_is_the_package_version(process_succeeds):
    assert process_succeeds("--version").out == f"batchwright {bw.__version__}\n"


def test_no_verb_is_bad_usage(refuses):
    text = refuses("")
    assert "VERB" in text
    assert "batchwright --help" in text


def test_an_unknown_verb_is_bad_usage(refuses):
    assert "'blend'" in refuses("blend")


def test_an_unknown_option_is_bad_usage(refuses, store):
    assert "--colour" in refuses(f"info {store} --colour")


@pytest.mark.parametrize(
    "arguments",
    [
        ("info",),
        ("look",),
        ("plan",),
        ("trace", "dead", "--step", "0"),
        ("verify",),
        ("digest", "dead", "--steps", "0-1"),
        ("gc",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_missing_store_is_named(arguments, refuses, tmp_path):
    verb, *rest = arguments
    assert str(tmp_path / "no.store") in refuses(verb, tmp_path / "no.store", *rest)


def test_a_folder_that_is_not_a_store_is_said_to_be_none(refuses, tmp_path):
    text = refuses(f"info {tmp_path}")
    assert str(tmp_path) in text
    assert "batchwright bake" in text


def test_what_the_system_refuses_is_named_without_a_traceback(refuses):
    name = "long" * 100
    assert name in refuses(f"info {name}")


def test_a_fault_in_batchwright_has_its_own_exit_code_and_keeps_the_traceback(store, environment):
    script = (
        "import sys, batchwright.cli.info as info\n"
        "from batchwright.cli.main import main\n"
        "info.run = lambda arguments: 1 // 0\n"
        f"sys.exit(main(['info', {str(store)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stderr
    assert "please report it" in done.stderr


def test_a_reader_that_goes_away_ends_it_quietly(store, plan, environment):
    command = ["digest", str(store), plan, "--steps", "0-9999", "--each"]
    with subprocess.Popen(
        [sys.executable, "-m", "batchwright", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "step 0" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_an_interrupt_ends_it_with_one_line(store, plan, environment):
    command = ["drill", plan, "--store", str(store), "--ranks", "1,3", "--workers", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "batchwright", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,  # as a shell does for a job, so that the interrupt reaches all of it and not us
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stdout.readline().startswith("  1 "):
            pass
        # The first leg is over, and the ranks of the second are starting.
        wait_for("ranks", lambda: descendants(process.pid) or sys.platform != "linux")
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr.read() == "batchwright: interrupted\n"
    assert process.returncode == 130


def test_text_that_the_terminal_cannot_show_comes_out_as_escapes(store, process_succeeds):
    text = process_succeeds(f"look {store} --source web --count 200", PYTHONIOENCODING="ascii").out
    assert "caf\\xe9" in text
