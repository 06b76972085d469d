"""Tiny tokenizers, made here: nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import batchwright as bw

WORDS = ["a", "b", "c", "the", "cat", "[UNK]"]


@pytest.fixture
def make_tokenizer() -> Callable[..., Tokenizer]:
    """A word-level tokenizer with ids 0 to 5 and these special tokens after them."""

    def make(*special: str) -> Tokenizer:
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.WordPiece(prefix="##")
        tokenizer.add_special_tokens(list(special))
        if special:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{special[0]} $A", special_tokens=[(special[0], tokenizer.token_to_id(special[0]))]
            )
        return tokenizer

    return make


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """A tokenizer as a folder with tokenizer.json, and tokenizer_config.json if a config is given."""

    def write(tokenizer: Tokenizer, config: object = None, folder: str = "tiny") -> Path:
        (tmp_path / folder).mkdir(exist_ok=True)
        tokenizer.save(str(tmp_path / folder / "tokenizer.json"))
        if config is not None:
            (tmp_path / folder / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path / folder / "tokenizer.json"

    return write


@pytest.fixture
def bake_texts(tmp_path: Path) -> Callable[..., bw.Store]:
    """A store of these texts, in their order."""

    def bake(texts: object, step: object, **settings: object) -> bw.Store:
        recipe = bw.DatasetRecipe().add_ingredient(texts, name="texts").prepare_step(step)  # type: ignore[arg-type]
        settings = {"shuffle": False, "workers": 0, "show_progress": False} | settings
        return bw.bake(recipe, tmp_path / "texts.store", **settings)  # type: ignore[arg-type]

    return bake
