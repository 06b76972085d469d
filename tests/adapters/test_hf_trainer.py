"""Hugging Face's Trainer, fed by a loader: it trains on the loader's batches and resumes exactly where it was."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers  # its attributes are imported when they are used: the trainer takes seconds

from batchwright.adapters.hf import feed
from batchwright.base.errors import PlanError, SpecError
from refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch counts this machine's cores

BATCH_ROWS = 48  # 13 batches in an epoch: an odd number, so that two accumulated ones span its edge


class Model(torch.nn.Module):
    """Shifts labels as models of transformers do, drops out, and remembers what it was given."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.embedding = torch.nn.Embedding(257, 8)
        self.dropout = torch.nn.Dropout(dropout)
        self.output = torch.nn.Linear(8, 257)
        self.given = []

    def forward(self, input_ids, attention_mask, labels):
        self.given.append((input_ids.clone(), attention_mask, labels.clone()))
        logits = self.output(self.dropout(self.embedding(input_ids)))
        from transformers.loss.loss_utils import ForCausalLMLoss

        return {"loss": ForCausalLMLoss(logits=logits, labels=labels, vocab_size=257), "logits": logits}


@pytest.fixture(scope="module")
def opened(open_loader, small_store):
    return lambda **given: open_loader(small_store, **({"batch_size": BATCH_ROWS, "epochs": None} | given))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    def make(loader, dropout=0.2, **given):
        transformers.set_seed(0)
        fixed = {"logging_steps": 1, "disable_tqdm": True, "report_to": "none", "use_cpu": True}
        fixed |= {"max_steps": 12, "gradient_accumulation_steps": 2, "save_strategy": "no"}
        arguments = transformers.TrainingArguments(str(tmp_path_factory.mktemp("run")), **(fixed | given))
        trainer = transformers.Trainer(model=Model(dropout), args=arguments)
        trainer.remove_callback(transformers.PrinterCallback)
        feed(trainer, loader)
        return trainer

    return make


@pytest.fixture(scope="module")
def whole(opened, made):
    """A run that was not interrupted. It left a checkpoint after 5 steps, 10 batches."""
    trainer = made(opened(), save_strategy="steps", save_steps=5)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def checkpoint(whole):
    return Path(whole.args.output_dir) / "checkpoint-5"


def losses(trainer, after=0):
    return {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e and e["step"] > after}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_trainer_has_the_losses_of_one_that_was_not_interrupted(opened, made, whole, checkpoint, num_workers):
    resumed = made(opened(), dataloader_num_workers=num_workers)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed, after=5) == losses(whole, after=5)
    assert list(losses(resumed, after=5)) == list(range(6, 13))
    assert "epoch" in whole.state.log_history[0]
    assert [e["epoch"] for e in resumed.state.log_history] == [e["epoch"] for e in whole.state.log_history]


def test_a_resumed_trainer_reads_no_batch_that_was_seen(opened, made, checkpoint):
    loader = opened()
    resumed = made(loader)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    expected = opened(framework="torch")
    expected.seek(step=10)
    given = [ids.tolist() for ids, _, _ in resumed.model.given]
    assert given == [expected.get_batch().input_ids.tolist() for _ in range(14)]
    assert loader.step == 24


def test_the_loss_is_the_one_computed_by_hand_and_not_shifted_twice(opened, made):
    loader = opened()
    trainer = made(loader, dropout=0.0, max_steps=1, gradient_accumulation_steps=1)
    tokens = opened(framework="torch").get_batch().input_ids
    with torch.no_grad():
        network = torch.nn.Sequential(trainer.model.embedding, trainer.model.output)
        opinions = torch.log_softmax(network(tokens), -1)
        by_hand = -sum(
            float(opinions[row, place, tokens[row, place + 1]])
            for row in range(tokens.shape[0])
            for place in range(tokens.shape[1] - 1)
        ) / (tokens.shape[0] * (tokens.shape[1] - 1))
    trainer.train()
    assert losses(trainer)[1] == pytest.approx(by_hand, rel=1e-5)


def test_each_rank_trains_on_its_own_share(opened, made, monkeypatch):
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    trainer = made(opened(rank=1, world_size=2), max_steps=1)
    monkeypatch.undo()
    trainer.train()
    expected = opened(rank=1, world_size=2, framework="torch").get_batch().input_ids
    assert len(expected) == BATCH_ROWS // 2
    assert torch.equal(trainer.model.given[0][0], expected)


def test_the_trainer_stops_where_the_run_ends(opened, made):
    loader = opened(epochs=1)
    trainer = made(loader, gradient_accumulation_steps=1, max_steps=20)
    trainer.train()
    assert trainer.state.global_step == loader.step == 13


def test_the_state_is_in_the_trainers_own_file(opened, checkpoint):
    saved = json.loads((checkpoint / "trainer_state.json").read_text())
    expected = opened()
    expected.seek(step=10)
    assert saved["stateful_callbacks"]["batchwright.loader"] == expected.state_dict()


# What is refused


def test_a_trainer_without_a_number_of_steps_is_refused_and_told_one(opened, made):
    loader = opened()
    with refused(SpecError, parameter="max_steps", remedy="6 "):
        made(loader, max_steps=-1)
    assert loader.position == 0


def test_a_loader_of_more_ranks_than_the_trainer_has_is_refused(opened, made):
    loader = opened(rank=0, world_size=2)
    with refused(SpecError, parameter="world_size", remedy="torchrun"):
        made(loader)
    assert loader.position == 0


def test_a_checkpoint_without_a_loaders_state_is_refused_and_the_cursor_stays(opened, made, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    saved = json.loads((tmp_path / "trainer_state.json").read_text())
    del saved["stateful_callbacks"]["batchwright.loader"]
    (tmp_path / "trainer_state.json").write_text(json.dumps(saved))
    loader = opened()
    loader.seek(step=2)
    with refused(PlanError, step=5, remedy="seek(step=10)"):
        made(loader).train(resume_from_checkpoint=str(tmp_path))
    assert loader.step == 2


def test_a_checkpoint_of_another_plan_is_refused_and_the_cursor_stays(opened, made, checkpoint):
    loader = opened(seed=8)
    with refused(PlanError, differs="seed: 8 here, 7 there", remedy="plan="):
        made(loader).train(resume_from_checkpoint=str(checkpoint))
    assert loader.position == 0


def test_where_transformers_is_missing_the_error_is_the_command_that_installs_it():
    code = "import sys; sys.modules['transformers'] = sys.modules['torch'] = None; import batchwright.adapters.hf"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingExtraError" in ran.stderr
    assert "pip install 'batchwright[trainers]'" in ran.stderr
