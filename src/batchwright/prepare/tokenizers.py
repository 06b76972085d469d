"""Tokenizers of every kind behind one small interface: Hugging Face files and objects, callables, bytes, characters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import local_path
from batchwright.base.errors import TokenizerError
from batchwright.base.fingerprint import fingerprint, fingerprint_bytes, function_fingerprint
from batchwright.base.plugins import Tokenizer
from batchwright.base.words import suggest
from batchwright.prepare.special_tokens import SpecialTokenEncoder
from batchwright.prepare.tiktoken_encoder import FastEncoder, any_of, find_proof
from batchwright.prepare.tiktoken_proof import Proof

__all__ = ["CharsTokenizer", "JsonTokenizer", "load_tokenizer", "resolve_tokenizer"]

WELL_KNOWN_EOS = (
    *("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<|im_end|>", "<|end▁of▁sentence|>"),
    "[EOS]",
)


class BytesTokenizer:
    """UTF-8 bytes are the ids; 256 is the end of a document."""

    name = "bytes"
    kind = "bytes"
    eos_id = 256
    vocab_size = 256
    fingerprint = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint8]]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        array = np.asarray(ids)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def to_json(self) -> bytes:
        return _own_json("bytes")


class CharsTokenizer:
    """Every character of the corpus has an id, in code point order. One more id is the end of a document."""

    name = "chars"
    kind = "chars"

    def __init__(self, chars: str | None = None) -> None:
        self.chars = chars
        """None until a bake has seen the corpus."""
        if chars is not None:
            self._points = np.array([ord(c) for c in chars], np.uint32)

    def fitted(self, points: Iterable[int]) -> CharsTokenizer:
        return CharsTokenizer("".join(map(chr, sorted(points))))

    @property
    def eos_id(self) -> int:
        return len(self.chars or "")

    @property
    def vocab_size(self) -> int:
        return len(self.chars or "")

    @property
    def fingerprint(self) -> str:
        return fingerprint(["chars", self.chars])[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> NDArray[np.int64]:
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = np.searchsorted(self._points, points)
        unknown = self._points[np.minimum(ids, len(self._points) - 1)] != points
        if unknown.any():
            raise TokenizerError(
                f"character {chr(points[unknown][0])!r} is not in the vocabulary of {len(self._points)} characters",
                remedy="bake again over text that has it",
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        assert self.chars is not None
        return "".join(self.chars[i] for i in np.asarray(ids).tolist() if i < len(self.chars))

    def to_json(self) -> bytes:
        return _own_json("chars", chars=self.chars)


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`. Padding and truncation in it are turned off: documents stay whole."""

    kind = "tokenizer.json"

    def __init__(self, json: str, name: str, config: dict[str, Any] | None = None) -> None:
        self.json: str = json
        self.name: str = name
        self.config: dict[str, Any] = config or {}

    @cached_property
    def backend(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.json)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def __getstate__(self) -> dict[str, Any]:
        # A proof made here is not needed again in a worker.
        return {name: self.__dict__[name] for name in ("json", "name", "config", "proof") if name in self.__dict__}

    @cached_property
    def proof(self) -> Proof:
        """The proof that tiktoken gives the same ids, or the reason why there is none."""
        return find_proof(self.json, self.backend)

    @cached_property
    def fast(self) -> FastEncoder | None:
        return None if self.proof.reason else FastEncoder(self.backend, self.proof)

    @property
    def encoder(self) -> str:
        """The library that encodes, and the reason. The ids are the same with both."""
        reason = self.proof.reason or ("fast" in self.__dict__ and self.fast and self.fast.off)
        return f"tokenizers ({reason})" if reason else "tiktoken, proved identical"

    @cached_property
    def vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocab

    @cached_property
    def vocab_size(self) -> int:
        return max(self.vocab.values(), default=-1) + 1  # ids may have gaps

    @property
    def special(self) -> dict[str, int]:
        return {t.content: i for i, t in sorted(self.backend.get_added_tokens_decoder().items()) if t.special}

    @cached_property
    def special_names(self) -> re.Pattern[str]:
        """Finds the names of special tokens."""
        return any_of(self.special)

    @cached_property
    def special_encoder(self) -> SpecialTokenEncoder:
        return SpecialTokenEncoder(self.backend)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_bytes(self.backend.to_str().encode())[:16]

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Any]:
        if self.fast is not None:
            return self.fast.encode_batch(texts)
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_as_text(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of texts, with names of special tokens as plain text."""
        ids = [np.asarray(one, np.uint32) for one in self.encode_batch(texts)]
        together, special = np.concatenate([np.empty(0, np.uint32), *ids]), list(self.special.values())
        # Most tokenizers give special tokens the highest ids: then a test of the largest id is enough.
        if together.max(initial=0) < min(special) or not np.isin(together, special).any():
            return ids
        return self.special_encoder.as_text(texts, ids)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
        return text

    def to_json(self) -> bytes:
        return self.json.encode()


class CallableTokenizer:
    """A function from text to ids."""

    kind = "callable"

    def __init__(
        self,
        function: Callable[[str], Any],
        vocab_size: int,
        *,
        decode: Callable[[Any], str] | None = None,
        version: str | None = None,
        name: str | None = None,
        eos_id: int | None = None,
    ) -> None:
        self.function, self._decode, self._version = function, decode, version
        self.vocab_size: int = vocab_size
        self.eos_id: int | None = eos_id
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))
        _ = self.fingerprint  # raises now, not at the bake, if it needs a version

    @property
    def fingerprint(self) -> str:
        """Computed anew: globals that the function uses may have changed since."""
        does = function_fingerprint(self.function, name=f"the tokenizer {self.name!r}", version=self._version)
        return fingerprint([does, self.vocab_size])[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        return [self.function(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str | None:
        return None if self._decode is None else self._decode(np.asarray(ids).tolist())

    def to_json(self) -> bytes:
        return _own_json("callable", name=self.name)


class PluginTokenizer:
    """A user's object that implements `batchwright.base.plugins.Tokenizer`."""

    kind = "plugin"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.name: str = str(getattr(tokenizer, "name", type(tokenizer).__name__))
        self.vocab_size: int = int(tokenizer.vocab_size)
        self.fingerprint: str = str(tokenizer.fingerprint)
        self.eos_id: int | None = getattr(tokenizer, "eos_id", None)
        self.encode_batch, self.decode = tokenizer.encode_batch, tokenizer.decode

    def to_json(self) -> bytes:
        return _own_json("callable", name=self.name)


class _Undecodable(NamedTuple):
    """A placeholder for a callable in a store, which does not keep the function itself."""

    name: str
    kind: str = "callable"

    def decode(self, ids: Sequence[int]) -> str | None:
        return None


def _own_json(kind: str, **more: object) -> bytes:
    """A tokenizer of this package, as a store keeps it."""
    return msgspec.json.encode({"batchwright_tokenizer": kind, **more})


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a store, or a `tokenizer.json`."""
    if not path.exists():
        remedy = "the path of a tokenizer.json; for the name of a model, transformers' AutoTokenizer.from_pretrained"
        if near := suggest(str(path), _BY_NAME):
            remedy = repr(near)
        raise TokenizerError("no tokenizer file", file=path, remedy=remedy)
    config = _config_beside(path)
    try:
        data = path.read_bytes()
        body = msgspec.json.decode(data, type=dict)
        match body.get("batchwright_tokenizer"):
            case "bytes":
                return BytesTokenizer()
            case "chars":
                return CharsTokenizer(body["chars"])
            case "callable":
                return _Undecodable(body["name"])
        name = path.absolute().parent.name if path.name == "tokenizer.json" else path.stem
        tokenizer = JsonTokenizer(data.decode(), name, config)
        _ = tokenizer.backend
    except Exception as error:  # `tokenizers` raises bare Exception
        remedy = "the path of a tokenizer.json"
        raise TokenizerError("this is not a tokenizer.json", file=path, reason=error, remedy=remedy) from None
    return tokenizer


def _config_beside(path: Path) -> dict[str, Any]:
    """The content of `tokenizer_config.json`, with the chat template that newer transformers write beside it."""
    config_path, template_path = path.with_name("tokenizer_config.json"), path.with_name("chat_template.jinja")
    config: dict[str, Any] = {}
    if config_path.exists():
        try:
            config = msgspec.json.decode(config_path.read_bytes(), type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TokenizerError(
                "this is not a tokenizer_config.json", file=config_path, reason=error, remedy="save the tokenizer again"
            ) from None
    if not config.get("chat_template") and template_path.is_file():
        config["chat_template"] = template_path.read_text(encoding="utf-8")
    return config


def configured_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name (eos_token, ...). A config has each as a string, or as an object with its content."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _config_of(tokenizer: Any) -> dict[str, Any]:
    """The special tokens and chat templates of a transformers tokenizer, in the form of `tokenizer_config.json`."""
    tokens = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return {"eos_token": tokenizer.eos_token, **tokens, "chat_template": getattr(tokenizer, "chat_template", None)}


_BY_NAME = {"bytes": BytesTokenizer, "chars": CharsTokenizer}
_RESOLVED = (BytesTokenizer, CharsTokenizer, JsonTokenizer, CallableTokenizer, PluginTokenizer)


def resolve_tokenizer(
    tokenizer: Any,
    *,
    vocab_size: int | None = None,
    decode: Callable[[Any], str] | None = None,
    version: str | None = None,
) -> Any:
    """One of the classes here, from a path, a name, an object or a function."""
    if isinstance(tokenizer, _RESOLVED):
        return tokenizer
    if isinstance(tokenizer, str) and tokenizer in _BY_NAME:
        return _BY_NAME[tokenizer]()
    if isinstance(tokenizer, str | os.PathLike):
        return _of_path(local_path(tokenizer=tokenizer))
    if hasattr(tokenizer, "convert_tokens_to_ids"):
        return _of_transformers(tokenizer, version)
    if hasattr(tokenizer, "encode_batch_fast"):
        return JsonTokenizer(tokenizer.to_str(), "tokenizers")
    if isinstance(tokenizer, Tokenizer):
        return PluginTokenizer(tokenizer)
    if callable(tokenizer):
        return CallableTokenizer(tokenizer, _vocab_size_of(tokenizer, vocab_size), decode=decode, version=version)
    raise TokenizerError(
        f"a {type(tokenizer).__name__} is not a tokenizer",
        remedy="the path of a tokenizer.json, a tokenizers or transformers object, a function, 'bytes' or 'chars'",
    )


def _of_path(path: Path) -> Any:
    loaded = load_tokenizer(path / "tokenizer.json" if path.is_dir() else path)
    if isinstance(loaded, _Undecodable):
        remedy = "the function itself"
        raise TokenizerError("a store does not keep the function that tokenised it", file=path, remedy=remedy)
    return loaded


def _of_transformers(tokenizer: Any, version: str | None) -> JsonTokenizer | CallableTokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        name = str(getattr(tokenizer, "name_or_path", "") or "transformers")
        return JsonTokenizer(backend.to_str(), name, _config_of(tokenizer))
    return CallableTokenizer(  # a slow one, written in Python
        lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True),
        len(tokenizer),
        decode=tokenizer.decode,
        version=version or fingerprint(["special tokens are text", tokenizer.get_vocab()]),
        name=type(tokenizer).__name__,
        eos_id=tokenizer.eos_token_id,
    )


def _vocab_size_of(function: Any, vocab_size: int | None) -> int:
    encoder = getattr(function, "__self__", function)  # the object of a bound method
    size = vocab_size or getattr(encoder, "vocab_size", None) or getattr(encoder, "n_vocab", None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise TokenizerError(
            "a function as tokenizer needs vocab_size=: it decides how many bytes an id takes",
            parameter="vocab_size",
            remedy="tokenize(function, vocab_size=50257)",
        )
    return size
