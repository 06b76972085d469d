"""How fast do conversations become tokens with loss masks? batchwright, transformers, TRL and torchtune, on two cores.

    .venv-peers/bin/python -m benchmarks.conversations                what `make bench-peers` builds has all of them
    python -m benchmarks.conversations --rounds 1 --num 2000          quicker, noisier

All get the same conversations, as dicts in memory, the same tokenizer and the same template (llama-3), and give the
ids and which of them are trained: the answers with their end-of-turn tokens. Each runs in a process of its own, loads
what it needs, encodes 200 conversations, and only then the clock starts. Rounds go over all in turn; a ratio is between
two of one round. CPU time is of all threads, and is given for what runs in one process. All ids must be equal, and all
masks: but torchtune trains the headers of answers too, and adds one token at the end, which is taken off here.
`tokenizers` in transformers has threads for both cores; TRL is asked for `dataset_num_proc=2`; torchtune's recipes
encode in one process, and a torch DataLoader with two workers is shown too.

Not shown: what follows (packing, padding, and writing a store). TRL's time is that of its own preparation of a dataset,
which writes Arrow files. The conversations are plain questions and answers, all of one template that prints messages as
they are: tools, or templates that look into messages, take batchwright longer.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.source import bench_home, version_of
from benchmarks.peers.table import spread

SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
WORKERS, WARM_CONVERSATIONS, BATCH = 2, 200, 1000
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HEADER = "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
WITH_MARKS = (
    "{{ bos_token }}{% for message in messages %}{{ " + HEADER + " }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
)
"""llama-3 for the libraries that need to be told which text is trained. batchwright has the template without marks."""

Answer = tuple[list[Any], list[Any]]
"""(ids, whether each is trained) of every conversation."""


# What all encode


def make_conversations(num: int) -> list[dict[str, Any]]:
    """Questions about functions of the standard library; the answers are their docstrings. The same on every run."""
    found = list(_documented())
    order = np.random.default_rng(7)
    conversations = []
    for number in range(num):
        messages = []
        if number % 3 == 0:
            messages.append({"role": "system", "content": "You explain Python, in few words and with care."})
        for _ in range(1 + int(order.integers(4))):
            name, code, answer = found[int(order.integers(len(found)))]
            question = f"What does {name} do?\n\n```python\n{code}\n```" if order.random() < 0.6 else f"And {name}?"
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        conversations.append({"messages": messages})
    return conversations


def _documented() -> Iterator[tuple[str, str, str]]:
    """(name, code, docstring) of functions and classes."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (said := ast.get_docstring(node)) and said.strip():
                code = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno][:30]).strip()
                yield f"{path.stem}.{node.name}", code, said.strip()


def find_tokenizer() -> Path:
    """llama-3's own where the tests have fetched it; else 32,000 tokens trained on the standard library."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchwright-tests" / "tokenizers"
    for path in sorted(home.glob("llama3-*/tokenizer.json")):
        return path
    path = bench_home() / "conversations" / "tokenizer.json"
    if not path.exists():
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([split, byte_level]), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False)
        texts = (path.read_text("utf-8", "replace") for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.add_special_tokens(list(SPECIAL))
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path))
    return path


# Ours


def open_batchwright(path: Path) -> Callable[[list[dict[str, Any]]], Answer]:
    """In one process."""
    return _batchwright_encoder(path)


def _batchwright_encoder(path: Path) -> Callable[[list[dict[str, Any]]], Answer]:
    from batchwright.prepare.chat.encode import ConversationEncoder
    from batchwright.prepare.chat.render import find_template
    from batchwright.prepare.chat.spans import ROLES, TEMPLATE
    from batchwright.prepare.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(path)
    template, encoder = find_template("llama-3", tokenizer), ConversationEncoder(tokenizer)

    def run(conversations: list[dict[str, Any]]) -> Answer:
        ids, masks = [], []
        for start in range(0, len(conversations), BATCH):
            rendered = [template.rendered(one) for one in conversations[start : start + BATCH]]
            for tokens, spans in encoder.encode(rendered):
                is_trained = (spans["role"] == ROLES.index("assistant")) & (spans["part"] != TEMPLATE)
                ids.append(tokens)
                masks.append(np.repeat(is_trained, np.diff(spans["stop"], prepend=0)))
        return ids, masks

    return run


_worker: Any = None


def _open_worker(path: Path, all_ready: Any) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a bake: one process for each core
    _worker = _batchwright_encoder(path)
    _worker(make_conversations(WARM_CONVERSATIONS))
    all_ready.wait()


def _in_worker(conversations: list[dict[str, Any]]) -> Answer:
    return _worker(conversations)  # type: ignore[no-any-return]


def open_batchwright_processes(path: Path) -> Callable[[list[dict[str, Any]]], Answer]:
    """In two processes, to which conversations are sent, and from which arrays come back."""
    context = get_context("fork")
    all_ready = context.Barrier(WORKERS + 1)
    pool = context.Pool(WORKERS, _open_worker, (path, all_ready))
    all_ready.wait()

    def run(conversations: list[dict[str, Any]]) -> Answer:
        parts = [conversations[start : start + BATCH // 4] for start in range(0, len(conversations), BATCH // 4)]
        ids, masks = [], []
        for some_ids, some_masks in pool.imap(_in_worker, parts):
            ids += some_ids
            masks += some_masks
        return ids, masks

    return run


# The others


def _for_transformers(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path), bos_token=SPECIAL[0], eos_token=SPECIAL[4], pad_token=SPECIAL[1]
    )
    tokenizer.chat_template = WITH_MARKS
    return tokenizer


def open_transformers(path: Path) -> Callable[[list[dict[str, Any]]], Answer]:
    """apply_chat_template over many at once."""
    tokenizer = _for_transformers(path)

    def run(conversations: list[dict[str, Any]]) -> Answer:
        ids, masks = [], []
        for start in range(0, len(conversations), BATCH):
            found = tokenizer.apply_chat_template(
                [one["messages"] for one in conversations[start : start + BATCH]],
                return_assistant_tokens_mask=True,
                return_dict=True,
            )
            ids += found["input_ids"]
            masks += found["assistant_masks"]
        return ids, masks

    return run


def open_trl(path: Path) -> Callable[[list[dict[str, Any]]], Answer]:
    """SFTTrainer's own preparation of a dataset. The trainer is made once, over a model of next to nothing."""
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    tokenizer = _for_transformers(path)
    small = dict.fromkeys(("hidden_size", "intermediate_size"), 8) | dict.fromkeys(
        ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1
    )
    folder = tempfile.mkdtemp()
    args = SFTConfig(
        output_dir=folder,
        assistant_only_loss=True,
        max_length=None,
        dataset_num_proc=WORKERS,
        report_to=[],
        use_cpu=True,
    )
    first = datasets.Dataset.from_list([{"messages": [{"role": r, "content": "a"} for r in ("user", "assistant")]}] * 2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **small))
    trainer = SFTTrainer(model=model, args=args, train_dataset=first, processing_class=tokenizer)
    datasets.disable_caching()

    def run(conversations: list[dict[str, Any]]) -> Answer:
        dataset = datasets.Dataset.from_list(conversations)
        prepared: Any = trainer._prepare_dataset(
            dataset, tokenizer, args, packing=False, formatting_func=None, dataset_name="x"
        )
        return prepared["input_ids"], prepared["labels"]

    return run


def open_torchtune(path: Path, workers: int = 0) -> Callable[[list[dict[str, Any]]], Answer]:
    """Llama3Tokenizer over the same merges, in the transform of its SFT dataset: messages, then tokens and labels."""
    from torch.utils.data import DataLoader
    from torchtune.data import OpenAIToMessages
    from torchtune.datasets._sft import SFTTransform
    from torchtune.models.llama3 import Llama3Tokenizer
    from torchtune.models.llama3._tokenizer import LLAMA3_SPECIAL_TOKENS

    from batchwright.prepare.token_text import bytes_of_tokens

    body = json.loads(path.read_text())
    ranks = bytes_of_tokens(body["model"]["vocab"])
    file = Path(tempfile.mkdtemp()) / "tokenizer.model"
    file.write_bytes(b"".join(base64.b64encode(word) + b" %d\n" % number for word, number in ranks.items()))
    ids = {token["content"]: token["id"] for token in body["added_tokens"]}
    unused = max([*ids.values(), *ranks.values()]) + 1
    special = {name: unused + number for number, name in enumerate(LLAMA3_SPECIAL_TOKENS)}
    special |= {name: ids[name] for name in SPECIAL}
    transform = SFTTransform(OpenAIToMessages(train_on_input=False), Llama3Tokenizer(str(file), special_tokens=special))

    def several(conversations: list[dict[str, Any]]) -> Answer:
        found = [transform(one) for one in conversations]
        return [one["tokens"] for one in found], [one["labels"] for one in found]

    def run(conversations: list[dict[str, Any]]) -> Answer:
        tokens, labels = [], []
        # Workers give arrays: lists of numbers take longer to send than to make.
        collate = partial(_as_arrays, several) if workers else several
        for some_tokens, some_labels in DataLoader(conversations, 64, num_workers=workers, collate_fn=collate):
            tokens += some_tokens
            labels += some_labels
        return [one[:-1] for one in tokens], [one[:-1] for one in labels]

    return run


def _as_arrays(several: Callable[[list[dict[str, Any]]], Answer], conversations: list[dict[str, Any]]) -> Answer:
    tokens, labels = several(conversations)
    return [np.array(one) for one in tokens], [np.array(one) for one in labels]


# One run, and the rounds

RIVALS: dict[str, tuple[str, Callable[[Path], Callable[[list[dict[str, Any]]], Answer]]]] = {
    "batchwright, 2 processes": ("batchwright", open_batchwright_processes),
    "batchwright, 1 process": ("batchwright", open_batchwright),
    "transformers": ("transformers", open_transformers),
    "TRL": ("trl", open_trl),
    "torchtune": ("torchtune", open_torchtune),
    "torchtune, 2 workers": ("torchtune", partial(open_torchtune, workers=WORKERS)),
}

IN_SEVERAL_PROCESSES = ("batchwright, 2 processes", "TRL", "torchtune, 2 workers")


def ids_and_masks(answer: Answer) -> list[tuple[list[int], list[bool]]]:
    """What came out, in one form: labels of -100, and masks of 0, are not trained."""
    found = []
    for ids, mask in zip(*answer, strict=True):
        trained = np.asarray(mask)
        trained = trained if trained.dtype == bool else trained == 1 if trained.max(initial=0) <= 1 else trained != -100
        found.append((np.asarray(ids).tolist(), trained.tolist()))
    return found


def run_one(name: str, num: int) -> dict[str, Any]:
    package, opened = RIVALS[name]
    run, conversations = opened(find_tokenizer()), make_conversations(num)
    run(conversations[:WARM_CONVERSATIONS])
    began, cpu_began = time.perf_counter(), time.process_time()
    answer = run(conversations)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    found = ids_and_masks(answer)
    return {
        "conversations_s": num / seconds,
        "cpu_ms": None if name in IN_SEVERAL_PROCESSES else cpu_seconds / num * 1000,
        "tokens": sum(len(ids) for ids, _ in found),
        "trained": sum(sum(mask) for _, mask in found),
        "ids": hashlib.sha256(json.dumps([ids for ids, _ in found]).encode()).hexdigest(),
        "masks": hashlib.sha256(json.dumps([mask for _, mask in found]).encode()).hexdigest(),
        "version": version_of(package),
    }


def in_a_process(name: str, num: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.conversations",
            "--child",
            name,
            "--num",
            str(num),
            "--out",
            str(out),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"error": (done.stderr.strip().splitlines() or ["no word"])[-1]}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num", type=int, default=8000)
    parser.add_argument("--only", nargs="*", default=list(RIVALS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        options.out.write_text(json.dumps(run_one(options.child, options.num)))
        return 0
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    rounds = [{name: in_a_process(name, options.num) for name in options.only} for _ in range(options.rounds)]
    ours = options.only[0]
    print(
        f"{'':<24}{'version':<10}{'conversations/s':<28}{ours + ' is faster by':<36}{'CPU ms each':<24}same ids, masks"
    )
    for name in options.only:
        if errors := [found[name]["error"] for found in rounds if "error" in found[name]]:
            print(f"{name:<24}{errors[0]}")
            continue
        rates = [found[name]["conversations_s"] for found in rounds]
        ratios = [found[ours].get("conversations_s", 0) / found[name]["conversations_s"] for found in rounds]
        same = [all(found[name][what] == found[ours].get(what) for found in rounds) for what in ("ids", "masks")]
        shown = ", ".join("yes" if one else "no" for one in same)
        cpu = spread([found[name]["cpu_ms"] for found in rounds if found[name]["cpu_ms"]], ".2f")
        speed = f"{spread(rates, ',.0f'):<28}{spread(ratios, '.2f'):<36}{cpu:<24}"
        print(f"{name:<24}{rounds[0][name]['version']:<10}{speed}{shown}", flush=True)
    facts = rounds[0][ours]
    if "tokens" in facts:
        print(f"{options.num:,} conversations, {facts['tokens']:,} tokens, {facts['trained']:,} trained")
    return 0


if __name__ == "__main__":
    sys.exit(main())
