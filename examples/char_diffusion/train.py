"""Train a small transformer to fill in hidden characters: `python train.py config/train_char_diffusion.py`.

    --max_iters=50    any name of the config can be set so
    Ctrl-C, kill -9   the same command goes on from the last checkpoint, exactly: the weights at the end are those of
                      a run that nobody stopped, in every bit. Delete the folder out/ to begin again.

Batches come from the queue that prepare.py fills; this process never sees the text.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import batchwright as bw


class Block(nn.Module):
    """Neighbours, then attention in both directions, then two layers; each is added to what came in.

    Without the convolution it takes some hundred iterations more until the model looks at neighbours at all.
    """

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.neighbours = nn.Conv1d(n_embd, n_embd, 5, padding=2, groups=n_embd)
        self.norm_1, self.norm_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.out = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape  # rows, positions, channels
        x = x + self.neighbours(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Denoiser(nn.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block(n_embd, n_head) for _ in range(n_layer)))
        self.head = nn.Sequential(nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size))
        for part in (self.tokens, self.places):
            nn.init.normal_(part.weight, std=0.02)

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]]))


def loss_of(model, x, y, ignore_index):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=ignore_index)


@torch.no_grad()
def evaluate(model, consumer, num_batches):
    """The mean loss of the validation batches: with val_batches in the config, the same ones every time."""
    losses = [loss_of(model, *consumer.get_batch("val"), consumer.meta["ignore_index"]) for _ in range(num_batches)]
    return torch.stack(losses).mean().item()


@torch.no_grad()
def denoise(model, x, mask_token_id, num_steps=24, temperature=0.7):
    """Fill the masks of rows in steps: each keeps those of its guesses that are surest, and hides the rest again."""
    random = torch.Generator().manual_seed(0)
    x, hidden = x.clone(), x == mask_token_id
    for step in range(num_steps):
        logits = model(x)
        logits[..., mask_token_id] = -torch.inf  # never a guess
        shares = (logits / temperature).softmax(dim=-1)
        guesses = torch.multinomial(shares.flatten(0, 1), 1, generator=random).view_as(x)
        sureness = shares.gather(-1, guesses[..., None])[..., 0].masked_fill(~hidden, -1)
        keep = (hidden.sum(dim=1) / (num_steps - step)).ceil().long()
        kept = hidden & (sureness.argsort(dim=1, descending=True).argsort(dim=1) < keep[:, None])
        x = torch.where(kept, guesses, x)
        hidden &= ~kept
    return x


def show_samples(model, consumer):
    """A row of validation text as the model got it, as it filled it in, and as it was; then text from nothing."""
    mask, characters = consumer.meta["mask_token_id"], consumer.meta["characters"] + "_"

    def text(row):
        return "".join(characters[i] for i in row.tolist()).replace("\n", " ")

    x, y = consumer.get_batch("val")
    filled = denoise(model, x, mask)
    hidden = x == mask
    right = (filled == y)[hidden].float().mean().item()
    print(f"hidden   {text(x[0])}\nfilled   {text(filled[0])}\nreally   {text(torch.where(y[0] < 0, x[0], y[0]))}")
    print(f"{100 * right:.1f} % of {int(hidden.sum())} hidden characters are right")
    print(f"from nothing   {text(denoise(model, torch.full_like(x[:1], mask), mask, num_steps=x.shape[1])[0])}")


def main(config):
    torch.set_num_threads(config.num_threads)  # how a sum is split decides its last bit
    torch.manual_seed(config.seed)
    consumer = bw.DatasetConsumer(config.data_dir, config.batch_size, config.block_size, framework="torch")
    model = Denoiser(consumer.meta["vocab_size"], config.block_size, config.n_layer, config.n_head, config.n_embd)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    checkpoint, first = Path(config.out_dir, "checkpoint.pt"), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        consumer.load_state_dict(saved["consumer"])
        first = saved["iter"]
        print(f"going on at iter {first}", flush=True)

    def save(num_iters):
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "consumer": consumer.state_dict()}
        torch.save({**parts, "iter": num_iters}, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)  # a kill in the middle of writing leaves the one before

    began = time.monotonic()
    for iteration in range(first, config.max_iters):
        if iteration == 0:
            print(f"iter     0  val loss {evaluate(model, consumer, config.val_batches):.4f}", flush=True)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(
                (iteration + 1) / config.warmup_iters, 1 - 0.95 * iteration / config.max_iters
            )
        loss = loss_of(model, *consumer.get_batch("train"), consumer.meta["ignore_index"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (iteration + 1) % config.eval_interval == 0 or iteration + 1 == config.max_iters:
            save(iteration + 1)
            line = f"iter {iteration + 1:5}  val loss {evaluate(model, consumer, config.val_batches):.4f}"
            print(f"{line}  train loss {loss.item():.4f}  {time.monotonic() - began:4.0f} s", flush=True)
    show_samples(model, consumer)
    consumer.close()


if __name__ == "__main__":
    main(bw.load_config(sys.argv[1], sys.argv[2:]))
