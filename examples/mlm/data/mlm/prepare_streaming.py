"""Sentences such as "seven minus two is five .", some words hidden: three fields, so the trainer is given a dict."""

import numpy as np

import batchwright as bw

NUMBERS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
]
WORDS = ["[PAD]", "[MASK]", *NUMBERS, "plus", "minus", "is", "."]
PAD, MASK, ZERO, PLUS, MINUS, IS, STOP = map(WORDS.index, ("[PAD]", "[MASK]", "zero", "plus", "minus", "is", "."))
NOT_A_TARGET = -100
"""What loss functions leave out by default."""


class MaskedWordsProvider(bw.DataProviderBase):
    def build_meta(self):
        names = ("input_ids", "attention_mask", "labels")
        return {
            "training_type": "MLM",
            "words": WORDS,
            "vocab_size": len(WORDS),
            "mask_token_id": MASK,
            "pad_token_id": PAD,
            "batch_schema": [{"name": name, "dtype": "int64", "shape": [self.block_size]} for name in names],
        }

    def sample_batch(self, split, rng):
        rows = sentences(self.batch_size, self.block_size, rng)
        is_text = rows != PAD
        chosen = is_text & (rng.random(rows.shape) < self.mask_probability)
        draw = rng.random(rows.shape)
        others = rng.integers(ZERO, len(WORDS), rows.shape)
        seen = np.where(draw < 0.8, MASK, np.where(draw < 0.9, others, rows))
        return {
            "input_ids": np.where(chosen, seen, rows),
            "attention_mask": is_text.astype(np.int64),
            "labels": np.where(chosen, rows, NOT_A_TARGET),
        }


def sentences(num_rows, num_words, rng):
    """Rows of one sentence or more, true ones, and padding to their end."""
    shape = (num_rows, num_words // 6)
    one, two = rng.integers(0, 10, (2, *shape))
    is_sum = rng.random(shape) < 0.5
    first = np.where(is_sum, one, np.maximum(one, two))
    second = np.where(is_sum, two, np.minimum(one, two))
    answer = np.where(is_sum, one + two, first - second)
    columns = (ZERO + first, np.where(is_sum, PLUS, MINUS), ZERO + second, IS, ZERO + answer, STOP)
    words = np.stack(np.broadcast_arrays(*columns), axis=-1)
    words[np.arange(shape[1]) >= rng.integers(1, shape[1] + 1, num_rows)[:, None]] = PAD
    rows = np.full((num_rows, num_words), PAD)
    rows[:, : 6 * shape[1]] = words.reshape(num_rows, -1)
    return rows
