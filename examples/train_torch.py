"""Train a model on a folder of text, in a plain torch loop, and go on after any interruption. Stop it, run it again.

    python train_torch.py                          Python's own sources, 300 steps
    python train_torch.py 'my_texts/*.txt' 1000    your files, 1,000 steps

The model is a small convolution over bytes. Put yours in its place, and a tokenizer.json in place of "bytes".
"""

import os
import sys
import sysconfig

import torch
from torch import nn
from torch.nn import functional as F

import batchwright as bw

FILES = sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("stdlib") + "/*.py"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 300
CHECKPOINT = "checkpoint.pt"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    """The last 8 bytes, one hidden layer, the next byte."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 32)
        self.hidden = nn.Conv1d(32, 128, kernel_size=8)
        self.output = nn.Linear(128, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = F.pad(self.embedding(input_ids).mT, (7, 0))  # pad before a row, so that no byte sees a later one
        return self.output(F.relu(self.hidden(embedded)).mT)


# Files become a store: once. Run again over unchanged files, this takes a few milliseconds.
recipe = bw.DatasetRecipe(seed=0)
recipe.add_ingredient(FILES, format="text", name="text")
recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
store = bw.bake(recipe, to="train.store", on_error="skip")

# batch_size counts rows over all ranks: on two of them, each would get 8 of these 16.
loader = bw.PretrainDataLoader(store, chunk_size=128, batch_size=16, seed=7, epochs=None, framework="torch")
torch.manual_seed(0)
model = Model(vocab_size=257).to(DEVICE)  # 256 bytes, and the end of a document
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

if os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT, map_location=DEVICE, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    print(f"going on at step {loader.step}")

while loader.step < STEPS:
    batch = loader.get_batch().to(DEVICE)
    # targets[t] is what position t must predict, and -100 where there is nothing to learn.
    loss = F.cross_entropy(model(batch.input_ids).flatten(0, 1), batch.targets.view(-1), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    step = loader.step
    if step % 20 == 0 or step == STEPS:
        stats = loader.stats()
        print(f"step {step}  loss {loss.item():.4f}  data wait {stats['data_wait_percent']:.1f} %", flush=True)
        # The data's part of a checkpoint is one small JSON value. Rename last: a kill never leaves half a file.
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(saved, "new.pt")
        os.replace("new.pt", CHECKPOINT)
