"""Train on two processes with torchrun, and go on from a checkpoint in the middle of an epoch, in new processes.

    python train_ddp.py                                      Python's own json package: bakes, trains twice, compares
    python train_ddp.py 'my_texts/*.txt'                     your files
    torchrun --standalone --nproc-per-node 2 train_ddp.py    then this goes on from the checkpoint

The losses after the checkpoint must be those of the run that was not interrupted, bit for bit.
"""

import os
import re
import subprocess
import sys
import sysconfig

import batchwright as bw

FILES = sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("stdlib") + "/json/*.py"
STEPS = 40
SAVED_AT = 15
CHECKPOINT = "checkpoint.pt"


def bake() -> None:
    """Once, before any process opens the store."""
    recipe = bw.DatasetRecipe(seed=0)
    recipe.add_ingredient(FILES, format="text", name="text")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    bw.bake(recipe, to="train.store", on_error="skip", show_progress=False)


def train() -> None:
    """What each process does. (The imports are here because the process that only launches needs none of them.)"""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Rank and world size are found by themselves. Of these 16 rows, each of two processes gets 8.
    loader = bw.PretrainDataLoader("train.store", chunk_size=128, batch_size=16, seed=7, epochs=None)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(257, 32), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 257))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT, weights_only=True)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # one state for all ranks

    while loader.step < STEPS:
        batch = loader.get_batch()
        loss = F.cross_entropy(model(batch.input_ids).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {loader.step}  loss {mean.item()!r}", flush=True)  # all its digits: they are compared
            if loader.step == SAVED_AT:
                saved = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(saved | {"loader": loader.state_dict()}, "new.pt")
                os.replace("new.pt", CHECKPOINT)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads outlive the group, and may abort an interpreter that ends beside them (pytorch#190489)


def launch() -> dict[int, float]:
    """The loss of each step of one torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)  loss (\S+)", printed, re.MULTILINE)}


if __name__ == "__main__" and "RANK" in os.environ:  # torchrun sets it
    train()
elif __name__ == "__main__":
    if os.path.exists(CHECKPOINT):
        os.remove(CHECKPOINT)
    bake()
    whole = launch()  # leaves checkpoint.pt
    rest = launch()  # finds it
    expected = {step: loss for step, loss in whole.items() if step > SAVED_AT}
    if rest != expected:
        sys.exit(f"the losses differ after the checkpoint: {expected} and {rest}")
    print(f"steps {SAVED_AT + 1} to {STEPS}: exact; the loss went from {whole[1]:.4f} to {rest[STEPS]:.4f}")
