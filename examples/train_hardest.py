"""Train on rows that change: write losses back, keep the hardest half, add fresh rows, undo a bad epoch.

    python train_hardest.py        6 epochs
    python train_hardest.py 30     stop after 30 steps, in mid-epoch; run it again without a number to resume there

The folder hardest.buffer holds the rows, which survive kill -9. The model is in last.pt and good.pt.
"""

import os
import sys

import numpy as np
import torch
from torch import nn

import batchwright as bw


def fresh(count: int, seed: int, mislabelled: bool = False) -> dict[str, np.ndarray]:
    """Points on two spirals, labelled by spiral. Their losses are not known yet, so they count as the hardest."""
    random = np.random.default_rng(seed)
    label, turn = random.integers(0, 2, count), random.uniform(0.5, 2, count)
    points = turn * np.exp(1j * np.pi * (turn + label))  # as complex numbers
    point = np.stack([points.real, points.imag], axis=1) + 0.1 * random.standard_normal((count, 2))
    return {"point": point.astype("f4"), "label": 1 - label if mislabelled else label, "loss": np.full(count, np.inf)}


def save(path: str, run: dict) -> None:
    torch.save({**run, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path + ".new")
    os.replace(path + ".new", path)


def load(path: str) -> dict:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved.pop("model"))
    optimizer.load_state_dict(saved.pop("optimizer"))
    return saved


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
test = {name: torch.from_numpy(column) for name, column in fresh(2000, seed=1_000_000).items()}
buffer = bw.DatasetBuffer(path="hardest.buffer")
steps_left = int(sys.argv[1]) if len(sys.argv) > 1 else -1
run = load("last.pt") if os.path.exists("last.pt") else {"epoch": 1, "good": None, "accuracy": 0.0, "loader": None}
while (epoch := run["epoch"]) <= 6:
    committed = [version.name for version in buffer.versions()]
    if f"epoch {epoch}" not in committed:
        if run["good"]:
            buffer.rollback(run["good"])  # removes the rows of a bad epoch, or of one that was killed here
        origin = "scrape-2" if epoch == 4 else f"fresh {epoch}"
        rows = fresh(1000 if epoch == 1 else 500, seed=epoch, mislabelled=origin == "scrape-2")
        buffer.extend(rows, retain_prior=0.5 if run["good"] else 0.0, retain_prior_by="-loss", origin=origin)
        buffer.commit(f"epoch {epoch}")
    # Losses change while the loader reads. A version does not, so the loader can be resumed.
    loader = buffer.at(f"epoch {epoch}").loader(batch_size=50, seed=epoch, framework="torch")
    loader.load_state_dict(run["loader"] or loader.state_dict())
    for batch in loader.get_iterator():
        losses = nn.functional.cross_entropy(model(batch["point"]), batch["label"], reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        buffer.set(batch.ids, loss=losses)
        if (steps_left := steps_left - 1) == 0:
            save("last.pt", {**run, "loader": loader.state_dict()})
            sys.exit(f"stopped in epoch {epoch}, after step {loader.step} of {loader.get_num_batches()}")
    accuracy = (model(test["point"]).argmax(dim=1) == test["label"]).float().mean().item()
    print(f"epoch {epoch}  loss {buffer.to_numpy()['loss'].mean():.4f}  accuracy {accuracy:.4f}", flush=True)
    run |= {"epoch": epoch + 1, "loader": None}
    if accuracy < run["accuracy"] - 0.05:
        came = buffer.index_of(buffer.diff(run["good"]).added)
        print(f"worse, with rows from {set(buffer.provenance(came)['origin'].to_pylist())}: back to {run['good']!r}")
        load("good.pt")
    else:
        run |= {"good": f"after epoch {epoch}", "accuracy": accuracy}
        if run["good"] not in committed:
            buffer.commit(run["good"])
        save("good.pt", run)
    save("last.pt", run)
