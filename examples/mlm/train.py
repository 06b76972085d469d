"""Train a small BERT on batches that are dicts: `batchwright run config/train_mlm.py` starts this and the provider."""

import os
import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM

import batchwright as bw

QUESTIONS = ["three plus four is [MASK] .", "nine minus [MASK] is two .", "eight [MASK] eight is sixteen ."]


def main(config):
    torch.set_num_threads(1)  # how a sum is split decides its last bit
    torch.manual_seed(0)
    consumer = bw.DatasetConsumer(config.data_dir, config.batch_size, config.block_size, framework="torch")
    words = consumer.meta["words"]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    no_dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}  # nothing random to keep in a checkpoint
    model = BertForMaskedLM(
        BertConfig(
            **sizes,
            **no_dropout,
            vocab_size=len(words),
            max_position_embeddings=config.block_size,
            pad_token_id=consumer.meta["pad_token_id"],
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    checkpoint, first = Path(config.out_dir, "checkpoint.pt"), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        consumer.load_state_dict(saved["consumer"])
        first = saved["iter"]
        print(f"going on at iter {first}", flush=True)
    for iteration in range(first + 1, config.max_iters + 1):
        loss = model(**consumer.get_batch("train")).loss  # input_ids, attention_mask and labels
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration % config.eval_interval == 0 or iteration == config.max_iters:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            parts = {"model": model, "optimizer": optimizer, "consumer": consumer}
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "iter": iteration}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
            with torch.no_grad():
                losses = [model(**consumer.get_batch("val")).loss for _ in range(config.val_batches)]
            print(f"iter {iteration:5}  val loss {torch.stack(losses).mean():.4f}", flush=True)
    asked = torch.tensor([[words.index(word) for word in question.split()] for question in QUESTIONS])
    with torch.no_grad():
        answers = model(input_ids=asked).logits.argmax(dim=-1)[asked == consumer.meta["mask_token_id"]]
    for question, answer in zip(QUESTIONS, answers.tolist(), strict=True):
        print(question.replace("[MASK]", f"[{words[answer]}]"))
    consumer.close()


if __name__ == "__main__":
    main(bw.load_config(sys.argv[1], sys.argv[2:]))
