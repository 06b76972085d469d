"""Train a GPT-2 with Hugging Face's Trainer, and go on from its checkpoint in the middle of an epoch, in a new process.

    python train_hf_trainer.py                     Python's own json package, 40 steps
    python train_hf_trainer.py 'my_texts/*.txt'    your files

The losses after the checkpoint must be those of the run that was not interrupted, bit for bit, dropout included.
"""

import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed

import batchwright as bw
from batchwright.adapters.hf import feed

FILES = sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("stdlib") + "/json/*.py"
STEPS = 40
SAVED_AT = 15


def train(checkpoint: str | None = None) -> dict[int, float]:
    """The loss of each step, from the beginning or after a checkpoint."""
    recipe = bw.DatasetRecipe(seed=0)
    recipe.add_ingredient(FILES, format="text", name="text")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    store = bw.bake(recipe, to="train.store", on_error="skip", show_progress=False)

    set_seed(0)
    sizes = {"n_positions": 128, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, bos_token_id=256, eos_token_id=256, **sizes))
    arguments = TrainingArguments(
        output_dir="run",
        max_steps=STEPS,
        save_steps=SAVED_AT,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
    )
    # A loader's batch_size counts rows over all ranks.
    batch_size = arguments.per_device_train_batch_size * arguments.world_size
    loader = bw.PretrainDataLoader(store, chunk_size=128, batch_size=batch_size, seed=7, epochs=None)
    trainer = Trainer(model=model, args=arguments)
    trainer.remove_callback(PrinterCallback)
    feed(trainer, loader)  # batches from here, this rank's share; checkpoints hold the loader's state
    trainer.train(resume_from_checkpoint=checkpoint)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {entry["step"]: entry["loss"] for entry in steps if not checkpoint or entry["step"] > SAVED_AT}


if __name__ == "__main__":
    whole = train()  # leaves run/checkpoint-15
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new_process:
        rest = new_process.submit(train, f"run/checkpoint-{SAVED_AT}").result()
    expected = {step: loss for step, loss in whole.items() if step > SAVED_AT}
    if rest != expected:
        sys.exit(f"the losses differ after the checkpoint: {expected} and {rest}")
    print(f"steps {SAVED_AT + 1} to {STEPS}: exact; the loss went from {whole[1]:.4f} to {rest[STEPS]:.4f}")
