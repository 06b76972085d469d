"""The two queue examples: what their providers make, and that their commands run as they are written down."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from batchwright.queue.provider_file import open_provider
from refusals import refused

EXAMPLES = Path(__file__).parent.parent / "examples"
DIFFUSION = EXAMPLES / "char_diffusion"
NOT_CHOSEN = -100
ONE_STAGE = {"type": "random", "min_ratio": 0.5, "max_ratio": 0.5}


def diffusion(**settings):
    """The example's provider, and the module that it is from."""
    given = [f"--{name}={value!r}" for name, value in settings.items()]
    provider = open_provider(
        bw.load_config(DIFFUSION / "config" / "train_char_diffusion.py", given, data=DIFFUSION / "data")
    )
    return provider, sys.modules[type(provider).__module__]


def drawn(provider, split="train", seed=0):
    batch = provider.sample_batch(split, np.random.default_rng(seed))
    return batch["x"], batch["y"]


# Corruption


def test_of_the_chosen_positions_80_percent_are_masked_10_another_character_and_10_as_they_were():
    provider, _ = diffusion(batch_size=2000, unmasking_stages=[ONE_STAGE])
    x, y = drawn(provider)
    x, y = x[y != NOT_CHOSEN], y[y != NOT_CHOSEN]
    is_mask, is_same = x == provider.mask_token_id, x == y
    assert len(x) == 64000
    assert is_mask.mean() == pytest.approx(0.8, abs=0.01)
    assert is_same.mean() == pytest.approx(0.1, abs=0.01)
    others = x[~is_mask & ~is_same]
    assert set(others.tolist()) == set(range(provider.mask_token_id))


def test_targets_are_the_text_where_chosen_and_ignore_index_where_the_text_is_shown():
    provider, _ = diffusion(ignore_index=-7)
    x, y = drawn(provider)
    assert ((y == -7) | (y >= 0)).all()
    for row in np.where(y == -7, x, y):
        assert "".join(provider.characters[i] for i in row) in provider.text


def test_validation_rows_are_from_the_end_of_the_text_and_training_rows_are_not():
    provider, _ = diffusion(batch_size=300)
    at = len(provider.splits["train"])
    for split, part in {"train": provider.text[:at], "val": provider.text[at:]}.items():
        x, y = drawn(provider, split)
        rows = np.where(y == NOT_CHOSEN, x, y)
        assert all("".join(provider.characters[i] for i in row) in part for row in rows)


def test_the_meta_tells_a_trainer_what_the_batches_mean():
    provider, _ = diffusion()
    meta = provider.build_meta()
    assert meta["vocab_size"] == len(set(provider.text)) + 1
    assert meta["mask_token_id"] == len(meta["characters"])
    assert [field["name"] for field in meta["batch_schema"]] == ["x", "y"]


def test_a_file_of_batches_is_the_same_whoever_makes_it_and_another_for_another_seed():
    def first(split, number, **settings):
        return [array.tobytes() for array in next(diffusion(**settings)[0].batches(split, number))]

    assert first("train", 3) == first("train", 3)
    several = [first("train", 3), first("train", 4), first("val", 3), first("train", 3, seed=8)]
    assert len({x for x, _ in several}) == 4


# Stages


def chosen_by(stage, shape=(400, 64), mask_probability=0.15):
    _, module = diffusion()
    return module.choose(stage, shape, np.random.default_rng(0), mask_probability)


def test_a_random_stage_draws_a_ratio_for_each_row_between_its_two():
    ratios = chosen_by({"type": "random", "min_ratio": 0.2, "max_ratio": 0.6}).mean(axis=1)
    assert 0.2 - 1 / 64 < ratios.min() < 0.25
    assert 0.55 < ratios.max() < 0.6 + 1 / 64
    assert ratios.mean() == pytest.approx(0.4, abs=0.02)


def test_a_stage_without_a_ratio_has_mask_probability():
    chosen = chosen_by({"type": "random"})
    assert chosen.mean() == pytest.approx(0.15, abs=0.001)
    assert set(chosen.sum(axis=1)) == {9, 10}  # 9.6 of 64
    assert chosen_by({"type": "sticky", "p_start": 0.1, "p_grow": 0.5}).mean() == pytest.approx(0.15, abs=0.001)


def test_each_row_has_a_target_however_small_the_ratio():
    assert (chosen_by({"type": "random"}, mask_probability=0.0001).sum(axis=1) == 1).all()


def mean_span(chosen):
    begins = chosen & ~np.pad(chosen, ((0, 0), (1, 0)))[:, :-1]
    return chosen.sum() / begins.sum()


def test_spans_of_a_sticky_stage_are_longer_than_random_ones_of_the_same_ratio():
    sticky = chosen_by({"type": "sticky", "ratio": 0.25, "p_start": 0.01, "p_grow": 0.3})
    random = chosen_by({"type": "random", "min_ratio": 0.25, "max_ratio": 0.25})
    assert (sticky.sum(axis=1) == 16).all()
    assert (random.sum(axis=1) == 16).all()
    assert mean_span(random) == pytest.approx(1 / 0.75, abs=0.05)
    assert mean_span(sticky) > 2 * mean_span(random)


def test_rows_of_one_batch_are_from_several_stages_in_proportion_to_their_weights():
    stages = [
        {"type": "random", "min_ratio": 1.0, "max_ratio": 1.0, "weight": 3},
        {**ONE_STAGE, "weight": 0},
        {"type": "random", "min_ratio": 0.25, "max_ratio": 0.25},
    ]
    provider, _ = diffusion(batch_size=2000, unmasking_stages=stages)
    counts = (drawn(provider)[1] != NOT_CHOSEN).sum(axis=1)
    assert set(counts) == {16, 64}
    assert (counts == 64).mean() == pytest.approx(0.75, abs=0.03)


def test_training_and_validation_have_stages_of_their_own():
    provider, _ = diffusion(unmasking_stages=[ONE_STAGE], validation_stages=[{**ONE_STAGE, "max_ratio": 1.0}])
    assert set((drawn(provider)[1] != NOT_CHOSEN).sum(axis=1)) == {32}
    assert (drawn(provider, "val")[1] != NOT_CHOSEN).mean() > 0.6


# The validator


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("unmasking_stages=[]", r"unmasking_stages must be a list of at least one stage, got \[\]"),
        ("validation_stages=[3]", r"validation_stages\[0\]: a stage must be a dict, got 3"),
        ("unmasking_stages=[{}]", r"unmasking_stages\[0\]: type must be one of random, sticky, got None"),
        ("unmasking_stages=[{'type': 'stiky'}]", r"type must be one of random, sticky, got 'stiky'"),
        ("unmasking_stages=[{'type': 'random', 'ratio': 0.5}]", r"a random stage has no ratio; it has max_ratio, "),
        ("unmasking_stages=[{'type': 'random', 'min_ratio': 0}]", r"min_ratio must be above 0 and at most 1, got 0"),
        ("unmasking_stages=[{'type': 'random', 'max_ratio': 1}]", r"with max_ratio must have min_ratio too"),
        (
            "unmasking_stages=[{'type': 'random', 'min_ratio': 0.5, 'max_ratio': 0.4}]",
            r"unmasking_stages\[0\]: min_ratio 0.5 is above max_ratio 0.4",
        ),
        ("unmasking_stages=[{'type': 'sticky', 'p_grow': 1}]", r"p_start must be above 0.001 and at most 1, got None"),
        ("unmasking_stages=[{'type': 'random', 'weight': -1}]", r"weight must be a number, 0 or above, got -1"),
        ("unmasking_stages=[{'type': 'random', 'weight': 0}]", r"unmasking_stages: every weight is 0"),
        ("mask_probability=1.0", r"mask_probability must be a number above 0 and below 1, got 1.0"),
        ("ignore_index=0", r"ignore_index must be below 0, where no character is, got 0"),
        ("n_head=3", r"n_embd=128 does not divide by n_head=3"),
        ("max_iters=0", r"max_iters must be a whole number of at least 1, got 0"),
    ],
)
def test_a_bad_setting_is_refused_by_name(setting, said):
    config = DIFFUSION / "config" / "train_char_diffusion.py"
    with pytest.raises(bw.SpecError, match=said):
        bw.load_config(config, [f"--{setting}"], data=DIFFUSION / "data")


def test_all_bad_settings_are_said_at_once():
    config = DIFFUSION / "config" / "train_char_diffusion.py"
    with pytest.raises(bw.SpecError) as caught:
        bw.load_config(config, ["--mask_probability=2.0", "--n_layer=0"], data=DIFFUSION / "data")
    assert "mask_probability must be" in str(caught.value)
    assert "n_layer must be" in str(caught.value)


def test_a_text_shorter_than_a_row_is_refused(tmp_path):
    shutil.copytree(DIFFUSION, tmp_path / "project", ignore=shutil.ignore_patterns("queue", "out"))
    data = tmp_path / "project" / "data"
    (data / "char_diffusion" / "input.txt").write_text("Call me Ishmael. " * 10)
    provider = open_provider(bw.load_config(DIFFUSION / "config" / "train_char_diffusion.py", data=data))
    with refused(bw.SpecError, "17 characters", "block_size=64") as caught:
        provider.sample_batch("val", np.random.default_rng(0))
    assert "input.txt" in caught.value.where["file"]


# The commands


def _start(folder, *words):
    source = Path(bw.__file__).parent.parent
    search = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def _project(name, tmp_path):
    return shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("queue", "out"))


def test_the_two_commands_train_a_model_and_a_kill_leaves_no_trace(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    folder = _project("char_diffusion", tmp_path)
    short = ["--max_iters=12", "--eval_interval=4", "--warmup_iters=2", "--n_embd=32"]
    command = ["train.py", "config/train_char_diffusion.py"]
    with _start(folder, "prepare.py", "config/train_char_diffusion.py") as prepare:
        try:
            while not (folder / "data" / "char_diffusion" / "queue" / "meta.json").exists():
                assert prepare.poll() is None
                time.sleep(0.05)
            with _start(folder, *command, *short) as killed:
                for line in killed.stdout:
                    if line.startswith("iter     4"):
                        break
                killed.kill()
            with bw.DatasetConsumer(folder / "data" / "char_diffusion", framework="numpy") as consumer:
                for _ in range(60):  # as if it had come further before it died: the first file is read and deleted
                    consumer.get_batch("train")
            with _start(folder, *command, *short) as train:
                printed = train.communicate()[0]
            assert train.returncode == 0
            prepare.send_signal(signal.SIGTERM)
            assert prepare.wait(30) == 0
        finally:
            prepare.kill()
    assert re.match(r"going on at iter (4|8)\n", printed)
    (shown, *_) = re.findall(
        r"^hidden   (.+)\nfilled   (.+)\nreally   (.+)\n.* hidden characters are right$", printed, re.M
    )
    assert "_" in shown[0]
    assert "_" not in shown[1]
    assert len({len(text) for text in shown}) == 1

    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    config = bw.load_config("config/train_char_diffusion.py", [*short, "--out_dir=undisturbed"])
    _train_in_this_process(config, monkeypatch, torch)
    ours, undisturbed = (torch.load(f"{out}/checkpoint.pt") for out in ("out", "undisturbed"))
    assert ours["consumer"] == undisturbed["consumer"]
    assert ours["iter"] == undisturbed["iter"] == 12
    for name, weights in undisturbed["model"].items():
        assert torch.equal(ours["model"][name], weights), name


def _train_in_this_process(config, monkeypatch, torch):
    """train.py, with a provider in this process and no queue."""
    import runpy

    consumer = bw.DatasetConsumer(provider=open_provider(config), framework="torch")
    monkeypatch.setattr(bw, "DatasetConsumer", lambda *_, **__: consumer)
    threads = torch.get_num_threads()
    try:
        runpy.run_path("train.py")["main"](config)
    finally:
        torch.set_num_threads(threads)


# Batches that are dicts


def masked_words():
    return open_provider(bw.load_config(EXAMPLES / "mlm" / "config" / "train_mlm.py", data=EXAMPLES / "mlm" / "data"))


def test_the_words_under_the_masks_make_true_sentences():
    provider = masked_words()
    words = provider.build_meta()["words"]
    batch = provider.sample_batch("train", np.random.default_rng(0))
    rows = np.where(batch["labels"] == NOT_CHOSEN, batch["input_ids"], batch["labels"])
    signs = {"plus": 1, "minus": -1}
    for row, is_text in zip(rows, batch["attention_mask"], strict=True):
        text = [words[i] for i in row[is_text == 1]]
        assert len(text) in (6, 12, 18)
        for one, sign, two, verb, three, stop in zip(*[iter(text)] * 6, strict=True):
            one, two, three = (words.index(number) - words.index("zero") for number in (one, two, three))
            assert one + signs[sign] * two == three
            assert (verb, stop) == ("is", ".")


def test_padding_is_masked_from_attention_and_never_a_target():
    provider = masked_words()
    batch = provider.sample_batch("train", np.random.default_rng(0))
    is_padding = batch["input_ids"] == provider.build_meta()["pad_token_id"]
    assert is_padding.any()
    assert np.array_equal(is_padding, batch["attention_mask"] == 0)
    assert (batch["labels"][is_padding] == NOT_CHOSEN).all()
    assert (batch["labels"] != NOT_CHOSEN)[~is_padding].mean() == pytest.approx(0.15, abs=0.03)


@pytest.mark.slow
def test_batchwright_run_trains_on_dicts_and_goes_on_where_it_was(tmp_path):
    pytest.importorskip("transformers")
    folder, losses = _project("mlm", tmp_path), {}
    for last in (40, 80):
        short = [f"--max_iters={last}", "--eval_interval=20"]
        with _start(folder, "-m", "batchwright", "run", "config/train_mlm.py", *short) as run:
            printed = run.communicate()[0]
        assert run.returncode == 0
        losses |= {int(n): float(loss) for n, loss in re.findall(r"^iter +(\d+)  val loss (\S+)$", printed, re.M)}
    assert printed.startswith("going on at iter 40\n")
    assert losses[80] < losses[20] < 3.2  # log(25 words)
    assert re.search(r"^three plus four is \[\S+\] \.$", printed, re.M)
