"""Teach a Llama to answer, with Hugging Face's Trainer, and go on from a checkpoint inside an epoch, in a new process.

    python train_sft_hf.py                     700 sums as conversations, 40 steps
    python train_sft_hf.py my_chats.jsonl      your conversations

Only what the assistant says is learned. Several conversations share a row and do not see each other. The losses after
the checkpoint must be those of the run that was not interrupted, bit for bit.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

import batchwright as bw
from batchwright.adapters.hf import feed

FILE = sys.argv[1] if len(sys.argv) > 1 else "sums.jsonl"
STEPS = 40
SAVED_AT = 15


def write_sums() -> None:
    """700 conversations, each a question and its answer."""
    pairs = [(f"What is {n} plus {n % 7}?", f"{n} plus {n % 7} is {n + n % 7}.") for n in range(700)]
    chats = [[{"role": "user", "content": ask}, {"role": "assistant", "content": say}] for ask, say in pairs]
    Path("sums.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def train_tokenizer() -> None:
    """A small one of our own, in which each marker of the template is one token."""
    tokenizer = ByteLevelBPETokenizer()
    markers = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer.train(FILE, vocab_size=400, special_tokens=markers, show_progress=False)
    tokenizer.save("tokenizer.json")


def train(checkpoint: str | None = None) -> dict[int, float]:
    """The loss of each step, from the beginning or after a checkpoint."""
    arguments = TrainingArguments(
        output_dir="run",
        max_steps=STEPS,
        save_steps=SAVED_AT,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
    )
    loader = bw.ConversationDataLoader(
        FILE,
        tokenizer="tokenizer.json",
        max_length=256,
        chat_template="chatml",
        packing="best_fit",
        batch_size=arguments.per_device_train_batch_size * arguments.world_size,  # counts rows over all ranks
        seed=7,
        epochs=None,
    )
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=400, max_position_embeddings=256, **sizes))
    trainer = Trainer(model=model, args=arguments)
    trainer.remove_callback(PrinterCallback)
    feed(trainer, loader)  # batches from here, this rank's share; checkpoints hold the loader's state
    trainer.train(resume_from_checkpoint=checkpoint)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {entry["step"]: entry["loss"] for entry in steps if not checkpoint or entry["step"] > SAVED_AT}


if __name__ == "__main__":
    if FILE == "sums.jsonl":
        write_sums()
    train_tokenizer()
    whole = train()  # leaves run/checkpoint-15
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new_process:
        rest = new_process.submit(train, f"run/checkpoint-{SAVED_AT}").result()
    expected = {step: loss for step, loss in whole.items() if step > SAVED_AT}
    if rest != expected:
        sys.exit(f"the losses differ after the checkpoint: {expected} and {rest}")
    print(f"steps {SAVED_AT + 1} to {STEPS}: exact; the loss went from {whole[1]:.4f} to {rest[STEPS]:.4f}")
