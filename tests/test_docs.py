"""What README and docs show, runs: README's first block as a stranger pastes it, the pages over small real files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))

SMALLER = {  # the pages show sizes of real runs
    "chunk_size=2048": "chunk_size=64",
    "max_length=2048": "max_length=128",
    "vocab_size=32_000": "vocab_size=280",
    "10**9": "10**4",
    "step=41_200": "step=3",
    "row=40_117": "row=17",
    'web/part-17.jsonl"': 'web/part-17.jsonl.zst"',
    '"corpus/"': '"books/"',
    '"corpus/*.jsonl"': '"web/*.zst"',
}

NETWORK_OFF = """
import socket
def refuse(*args, **kwargs):
    raise OSError("the network is off in this test")
socket.socket.connect = refuse
socket.create_connection = refuse
"""


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def run_as_pasted(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a new process, from standard input, with workers by spawn and the network off."""
    site = folder / ".site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(NETWORK_OFF)
    spawn = "import multiprocessing; multiprocessing.set_start_method('spawn')\n"
    command = [sys.executable, "-"]
    if shutil.which("unshare") and subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0:
        command = ["unshare", "-rn", *command]  # no network at all, not only a refusing library
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        command, input=spawn + code, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )


def test_the_first_screen_of_the_readme_runs_twice_in_an_empty_folder(tmp_path):
    (code, *_) = python_blocks(ROOT / "README.md")
    first = run_as_pasted(code, tmp_path)
    second = run_as_pasted(code, tmp_path)
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert first.stdout == second.stdout
    assert len(first.stdout.splitlines()) >= 8
    assert "up to date" not in first.stderr
    assert "up to date" in second.stderr


def test_the_readme_shows_code_by_its_line_seven():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert "```python" in lines[:7]


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}"


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """The files that the pages name."""

    import msgspec
    import pyarrow as pa
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    monkeypatch.chdir(tmp_path)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "it", "rains"]
    texts = [" ".join(words[i % 5 : 5 + i % 7]) * 20 for i in range(400)]
    (tmp_path / "web").mkdir()
    rows = b"\n".join(msgspec.json.encode({"content": t, "score": i % 10 / 10}) for i, t in enumerate(texts))
    with pa.CompressedOutputStream(str(tmp_path / "web" / "part-17.jsonl.zst"), "zstd") as out:
        out.write(rows)
    (tmp_path / "books").mkdir()
    for i in range(50):
        (tmp_path / "books" / f"{i:03d}.txt").write_text(texts[i] * 3)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    said = [[{"role": "user", "content": text[:40]}, {"role": "assistant", "content": text[40:60]}] for text in texts]
    (tmp_path / "sft_data.jsonl").write_bytes(b"\n".join(msgspec.json.encode({"messages": m}) for m in said))
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, corpus, capsys):
    import batchwright as bw

    names: dict[str, object] = {}
    if page.name != "baking.md":
        recipe = bw.DatasetRecipe(seed=0)
        recipe.add_ingredient("web/*.zst", text="content", name="web").add_ingredient("books", name="code")
        recipe.prepare_step(bw.tokenize("tokenizer.json", append_eos=True)).holdout(0.05)
        bw.bake(recipe, to="corpus.store", show_progress=False)
        loader = bw.PretrainDataLoader("corpus.store", chunk_size=64, batch_size=4, seed=7, epochs=None)
        names |= {"model": lambda *inputs: 0.0, "loader": loader, "plan": loader.plan, "bw": bw}
    for code in python_blocks(page):
        for shown, small in SMALLER.items():
            code = code.replace(shown, small)
        exec(compile(code, page.name, "exec"), names)
