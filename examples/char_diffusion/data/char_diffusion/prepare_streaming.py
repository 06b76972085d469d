"""Rows of characters with some of them hidden: x is what the model sees, y is what it must say of the hidden ones."""

from functools import cached_property

import numpy as np

import batchwright as bw

MASKED, REPLACED = 0.8, 0.1
"""Of the positions chosen: these shares become the mask token and another character; the rest stays as it is."""


class CharDiffusionProvider(bw.DataProviderBase):
    def build_meta(self):
        return {
            "training_type": "MLM",
            "vocab_size": self.mask_token_id + 1,
            "mask_token_id": self.mask_token_id,
            "ignore_index": self.ignore_index,
            "characters": self.characters,
            "batch_schema": [
                {"name": "x", "dtype": "int64", "shape": [self.block_size], "role": "input"},
                {"name": "y", "dtype": "int64", "shape": [self.block_size], "role": "target"},
            ],
        }

    def sample_batch(self, split, rng):
        text = self.splits[split]
        begins = rng.integers(0, len(text) - self.block_size + 1, self.batch_size)
        rows = text[begins[:, None] + np.arange(self.block_size)]
        stages = self.unmasking_stages if split == "train" else self.validation_stages
        chosen = choose_mixed(stages, rows.shape, rng, self.mask_probability)
        return {
            "x": corrupt(rows, chosen, self.mask_token_id, rng),
            "y": np.where(chosen, rows, self.ignore_index),
        }

    @cached_property
    def text(self):
        return "".join(file.read_text(encoding="utf-8") for file in self.input_files())

    @cached_property
    def characters(self):
        """The vocabulary: a character's id is its place in here."""
        return "".join(sorted(set(self.text)))

    @property
    def mask_token_id(self):
        return len(self.characters)

    @cached_property
    def splits(self):
        points = np.array([ord(character) for character in self.characters])
        ids = np.searchsorted(points, np.frombuffer(self.text.encode("utf-32-le"), np.uint32))
        num_train = round(len(ids) * (1 - self.val_fraction))
        splits = {"train": ids[:num_train], "val": ids[num_train:]}
        for name, part in splits.items():
            if len(part) < self.block_size:
                raise bw.SpecError(
                    f"the {name} split has {len(part):,} characters, and a row needs block_size={self.block_size}",
                    parameter="block_size",
                    file=", ".join(map(str, self.input_files())),
                    remedy="more text, a smaller block_size, or another val_fraction",
                )
        return splits


def corrupt(rows, chosen, mask_token_id, rng):
    """Rows as the model sees them: of the chosen positions 80 % masked, 10 % another character, 10 % unchanged."""
    draw = rng.random(rows.shape)
    others = (rows + rng.integers(1, mask_token_id, rows.shape)) % mask_token_id  # never the character itself
    seen = np.where(draw < MASKED, mask_token_id, np.where(draw < MASKED + REPLACED, others, rows))
    return np.where(chosen, seen, rows)


def choose_mixed(stages, shape, rng, mask_probability):
    """Which positions are chosen, as booleans; each row by a stage of its own, drawn by weight."""
    weights = np.array([stage.get("weight", 1) for stage in stages], float)
    stage_of_row = rng.choice(len(stages), size=shape[0], p=weights / weights.sum())
    chosen = np.zeros(shape, bool)
    for number, stage in enumerate(stages):
        mine = np.flatnonzero(stage_of_row == number)
        chosen[mine] = choose(stage, (len(mine), shape[1]), rng, mask_probability)
    return chosen


def choose(stage, shape, rng, mask_probability):
    """Which positions one stage chooses: in each row at least one, and the ratio on average exactly."""
    if stage["type"] == "sticky":
        ratios = np.full(shape[0], stage.get("ratio", mask_probability))
        return sticky(shape, how_many(ratios, shape[1], rng), stage["p_start"], stage["p_grow"], rng)
    low = stage.get("min_ratio", mask_probability)
    ratios = rng.uniform(low, stage.get("max_ratio", low), shape[0])
    return smallest(rng.random(shape), how_many(ratios, shape[1], rng))


def how_many(ratios, length, rng):
    """Positions of each row, rounded up or down at random, so that the mean is not rounded."""
    return np.clip(np.floor(ratios * length + rng.random(len(ratios))).astype(int), 1, length)


def smallest(keys, counts):
    """Where in each row its `counts` smallest keys are."""
    return keys.argsort(axis=1).argsort(axis=1) < counts[:, None]


def sticky(shape, counts, p_start, p_grow, rng):
    """`counts` positions of each row, in spans: in rounds, and next to a chosen one sooner than elsewhere."""
    chosen = np.zeros(shape, bool)
    while (missing := counts - chosen.sum(axis=1)).any():
        beside = np.zeros(shape, bool)
        beside[:, 1:] |= chosen[:, :-1]
        beside[:, :-1] |= chosen[:, 1:]
        draw = rng.random(shape)
        wanted = ~chosen & (draw < np.where(beside, p_grow, p_start))
        # The last round of a row would choose too many: it takes some of them, whichever.
        chosen |= wanted & smallest(np.where(wanted, rng.random(shape), 2.0), missing)
    return chosen
