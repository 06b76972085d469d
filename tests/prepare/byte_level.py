"""Byte-level BPE tokenizers, trained here on a few lines: nothing is fetched."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
O200K_PATTERN = "|".join(
    [
        *(
            r"[^\r\n\p{L}\p{N}]?" + letters + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            for letters in (
                r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
                r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            )
        ),
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
SEEN = [
    "The cat didn't see what they've done; we'll say it's 12345 things, and I'M sure you'd agree.",
    "def function_1(self, value):\n    return [value] * 10  # comment\n\n\n        deeper = {'a': 1}\n",
    "Der Käse ist größer. L'été à Paris, naïve café. Привет мир. 今天天气很好，我们去公园散步吧。",
    "हिन्दी 한국어 👍🏽 👨‍👩‍👧",
    "=" * 40 + "\t\t" + " " * 30 + "aaaa aaaaaaaa aaaaaaaaaaaaa 1000000 ------ \r\n\r\n" + "e\u0301 A\u030a",
]


@cache
def trained_json(
    pattern: str | None = None, *, nfc: bool = False, added: tuple[str, ...] = ("<|end|>",), space: bool = False
) -> str:
    """The JSON of a tokenizer of at most 700 tokens that cuts as GPT-2 does, or by a pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SEEN * 3, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())
