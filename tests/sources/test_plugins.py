"""Formats of installed packages: found when they are needed, never before, and named when they cannot be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import batchwright as bw

SHOUT = """
import batchwright as bw

@bw.register_format("shout", extensions=(".shout",), by_line=True)
def read_shout(line, *, ending="!"):
    return {"text": line.decode().upper() + ending}

@bw.register_format("murmur", by_line=True)
def read_murmur(line):
    return {"text": line.decode().lower()}

@bw.register_format("jsonl", extensions=(".jsonl",), by_line=True)
def read_jsonl(line):
    return {"text": "never"}
"""


def install(site: Path, package: str, code: str, entry_points: str, version: str = "1.0") -> None:
    """What an installer leaves: a package, and beside it what it says of itself."""
    (site / package).mkdir(parents=True)
    (site / package / "__init__.py").write_text(code)
    about = site / f"{package}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(f"[batchwright.formats]\n{entry_points}\n")


def run(site: Path, code: str) -> str:
    """What a new process prints that finds packages in `site`."""
    path = os.pathsep.join([str(site), str(Path(bw.__file__).parents[1])])
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=site,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path / "site", "shouting", SHOUT, "shout = shouting")
    return tmp_path / "site"


def test_a_format_is_found_by_name_or_extension_and_loaded_only_then(site):
    code = """
import sys, batchwright as bw
from batchwright.sources import format_for
from batchwright.sources import formats
formats.known_extensions(), format_for("a.jsonl"), format_for("", "text")
assert "shouting" not in sys.modules and "shout" not in formats._formats._known
print({}.name, "shouting" in sys.modules)
"""
    for lookup in ('format_for("a.shout.gz")', 'format_for("", "shout")', 'format_for("", "murmur")'):
        name = "murmur" if "murmur" in lookup else "shout"
        assert run(site, code.replace("{}", lookup)) == f"{name} True"


def test_a_package_never_takes_over_what_is_known(site):
    code = """
from batchwright.sources import format_for
format_for("a.shout")
print(format_for("a.jsonl").read.__module__, format_for("", "jsonl").read.__module__)
"""
    assert run(site, code) == "batchwright.sources.formats batchwright.sources.formats"


def test_a_module_that_the_program_imports_itself_does(site):
    code = "import shouting; from batchwright.sources import format_for; print(format_for('a.jsonl').read.__module__)"
    assert run(site, code) == "shouting"


def test_workers_read_the_format_of_a_package_with_its_options(site):
    for number in range(3):
        (site / f"{number}.shout").write_text("".join(f"line {number} {n}\n" for n in range(20)))
    code = """
import batchwright as bw
from batchwright.sources import units
units.UNIT_BYTES = 100
recipe = bw.DatasetRecipe().add_ingredient("*.shout", options={"ending": "?"}).prepare_step(bw.tokenize("bytes"))
store = bw.bake(recipe, "a.store", workers=2, show_progress=False)
print(store.num_rows, sorted(store.decode(row.tokens) for row in store.rows())[0])
"""
    assert run(site, code) == "60 LINE 0 0?"


BROKEN = "import a_package_that_is_not_there"


def test_a_package_that_cannot_be_loaded_is_named_when_it_is_needed(site):
    install(site, "broken", BROKEN, "whisper = broken:read")
    code = """
import batchwright as bw
from batchwright.sources import format_for
for _ in range(2):
    try:
        format_for("", "whisper")
    except bw.SpecError as error:
        print(error, end="|")
"""
    first, second, _ = run(site, code).split("|")
    assert first == second
    assert first.startswith("the format 'whisper' of an installed package cannot be loaded: ModuleNotFoundError: ")
    assert "entry point whisper = broken:read, of broken 1.0" in first
    assert "try        mend the package, or uninstall it" in first


def test_a_package_that_cannot_be_loaded_harms_nobody_else_and_an_unknown_name_mentions_it(site):
    install(site, "broken", BROKEN, "whisper = broken:read")
    code = """
import batchwright as bw
from batchwright.sources import format_for
print(format_for("a.shout").name)
for call in (lambda: format_for("a.whisper"), lambda: format_for("", "wisper")):
    try:
        call()
    except bw.BatchwrightError as error:
        print(type(error).__name__, "|", error.headline, "|", error.where["failed"])
"""
    shout, by_extension, by_name = run(site, code).splitlines()
    failed = "whisper = broken:read, of broken 1.0 (ModuleNotFoundError: No module named 'a_package_that_is_not_there')"
    assert shout == "shout"
    assert by_extension == f"SourceError | cannot tell the format of a file from its extension '.whisper' | {failed}"
    assert by_name == f"SpecError | no format named 'wisper' | {failed}"


def test_a_list_of_formats_has_those_of_packages_and_warns_of_what_cannot_be_loaded(site):
    install(site, "broken", BROKEN, "whisper = broken:read")
    install(site, "silent", "", "silence = silent")
    code = """
import warnings
from batchwright.sources.formats import known_formats
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    names = [kind.name for kind in known_formats()]
print("shout" in names, "jsonl" in names)
print(*sorted(str(warning.message) for warning in said), sep="\\n")
"""
    names, *warned = run(site, code).splitlines()
    assert names == "True True"
    assert len(warned) == 2
    assert "silence = silent, of silent 1.0 (LookupError: it registers no format named 'silence')" in warned[0]
    assert "whisper = broken:read, of broken 1.0" in warned[1]


def test_two_packages_that_offer_one_extension_ask_for_a_name(site):
    install(site, "yelling", SHOUT.replace('"shout"', '"yell"').replace('"murmur"', '"whine"'), "yell = yelling")
    code = """
import batchwright as bw
from batchwright.sources import format_for
print(format_for("", "yell").name)
try:
    format_for("a.shout")
except bw.SourceError as error:
    print(error.headline, "|", error.where["known"], "|", error.remedy)
"""
    assert run(site, code).splitlines() == [
        "yell",
        "several installed packages offer a format for the extension '.shout' | shout, yell | "
        "add_ingredient(..., format='shout')",
    ]


def test_another_version_of_the_package_is_another_format(site, tmp_path):
    install(tmp_path / "newer", "shouting", SHOUT, "shout = shouting", version="2.0")
    code = "from batchwright.sources import format_for; print(format_for('a.shout').fingerprint)"
    older = run(site, code)
    assert run(site, code) == older
    assert run(tmp_path / "newer", code) != older
