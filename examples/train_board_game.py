"""Train a small Hex network on self-play: read shard after shard its loss goes in waves, mixed in a pool it does not.

    python train_board_game.py        9 to 13 seconds on one core

Shards come from three generations of players, so each differs from the one before. Both runs have the same network,
the same positions with the same symmetries, and 1,152 updates; only the order differs. It prints how well the stream is
mixed, checks that a saved state goes on with the same batch, and prints for each 64 steps, which is a shard, the loss
and the loss on held-out games:

        steps  loss of shards in order               held out   loss of the pool           held out
     961-1024  beginners 1.23 #######                2.109      2.02 ############          2.059
    1025-1088  improving 1.84 ###########            2.059      2.00 ############          2.105
    1089-1152  strong    2.88 #################      2.253      2.01 ############          2.065

    wave of the loss: 0.682 in order, 0.014 mixed
    wave of the held-out loss: 0.070 in order, 0.020 mixed
    held-out loss in the last 3 blocks: 2.140 in order, 2.076 mixed

The first wave is that shards are not equally hard, and hides whether the network learns. The second is the network's
own: after a shard of strong players it is worse on games of beginners, and the other way round. With five seeds for
weights and order, the last line was 2.12 to 2.14 in order and 2.06 to 2.08 mixed.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import batchwright as bw

N = 5  # the board has N x N cells
SKILLS = {"beginners": 0, "improving": 8, "strong": 30}  # a directory for each generation of players
SHARDS, ROWS = 7, 1024  # shards of each generation, and positions in a shard
ENTRIES = 4 * ROWS  # the symmetries of Hex make four of each position
BATCH, STEPS = 64, ENTRIES // 64  # entries of a batch, and batches of a shard
BITS = 2.0 ** np.arange(N * (N + 1)).reshape(N, N + 1)[:, :N]  # of each cell, with a gap after each row
Batch = dict[str, torch.Tensor]


def connects(stones: np.ndarray) -> np.ndarray:
    """Which boards [..., N, N] have a chain of stones from the first row to the last: a flood fill, on bits."""
    here = (stones.reshape(*stones.shape[:-2], -1) @ BITS.ravel()).astype(np.int64)
    reached, before = here & int(BITS[0].sum()), -1
    while not np.array_equal(reached, before):
        before = reached
        beside = before << 1 | before >> 1 | before << N | before >> N | before << N + 1 | before >> N + 1
        reached = before | beside & here
    return reached & int(BITS[-1].sum()) != 0


def search(mine: np.ndarray, theirs: np.ndarray, skill: int, random: np.random.Generator) -> np.ndarray:
    """A policy for who goes from the first row to the last: the cells it has where it wins a board filled at random."""
    empty = ~(mine | theirs)
    filled = empty[:, None] & (random.integers(0, 2, (len(mine), 32, N, N), dtype="u1") == 1)
    wins = (filled & connects(filled | mine[:, None])[..., None, None]).sum(1)
    policy = empty * (wins + 1.0) ** skill  # with skill 0, any empty cell
    return policy / policy.sum((1, 2), keepdims=True)


def play(num_games: int, skill: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Positions of whole games: stones and who is to move, that player's policy, and whether it won in the end."""
    stones, boards, policies, undecided = np.zeros((2, num_games, N, N), bool), [], [], []
    for ply in range(N * N):  # to the full board: who has won by then is who connected first
        mover = ply % 2
        seen = stones[::-1].swapaxes(2, 3) if mover else stones  # red goes from top to bottom, blue from left to right
        policy = search(*seen, skill, random)
        policy = (policy.swapaxes(1, 2) if mover else policy).reshape(num_games, N * N)
        boards.append(np.stack([*stones, np.full_like(stones[0], mover)], axis=1))
        policies.append(policy)
        undecided.append(~connects(stones[0]) & ~connects(stones[1].swapaxes(1, 2)))
        cell = (policy / random.exponential(size=policy.shape)).argmax(1)  # drawn with these probabilities
        stones[mover, np.arange(num_games), cell // N, cell % N] = True
    is_red = np.arange(N * N)[:, None] % 2 == 0
    value = np.where(connects(stones[0]) == is_red, 1, -1)
    of_plies = {"board": np.array(boards, "u1"), "policy": np.array(policies, "f4"), "value": value.astype("f4")}
    return {name: column[np.array(undecided)] for name, column in of_plies.items()}


def write_shards(folder: str) -> list[str]:
    """Each shard has games of its own, so that none is in training and in validation."""
    random = np.random.default_rng(0)
    for directory, skill in SKILLS.items():
        os.mkdir(os.path.join(folder, directory))
        for number in range(SHARDS):
            columns = play(ROWS // 8, skill, random)
            rows = random.permutation(len(columns["value"]))[:ROWS]
            path = os.path.join(folder, directory, f"shard_{number:04}.npz")
            np.savez(path, **{name: column[rows] for name, column in columns.items()})
    return [os.path.join(folder, directory) for directory in SKILLS]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * N * N, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.policy, self.value = nn.Linear(128, N * N), nn.Linear(128, 1)

    def loss(self, batch: Batch) -> torch.Tensor:
        hidden = self.body(batch["board"].float())
        policy = F.kl_div(F.log_softmax(self.policy(hidden), dim=1), batch["policy"], reduction="batchmean")
        return policy + F.mse_loss(torch.tanh(self.value(hidden))[:, 0], batch["value"])


def train(batches: Iterable[Batch], held_out: Batch) -> tuple[np.ndarray, np.ndarray]:
    """For each block of steps, as long as a shard: their mean loss, and the loss on held-out positions after them."""
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3, fused=True)
    losses, validation = [], []
    for step, batch in enumerate(batches, start=1):
        loss = network.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % STEPS == 0:
            with torch.no_grad():
                validation.append(network.loss(held_out).item())
    return np.array(losses).reshape(-1, STEPS).mean(axis=1), np.array(validation)


def in_order(paths: list[str]) -> Iterator[Batch]:
    """The same entries without the pool: a shard is loaded, shuffled, used up."""
    random, hex4 = np.random.default_rng(0), bw.hex4()
    for path in paths:
        columns = dict(np.load(path))
        for entries in random.permutation(ENTRIES).reshape(STEPS, BATCH):
            some = hex4.function({name: column[entries // 4] for name, column in columns.items()}, entries % 4)
            yield {name: torch.from_numpy(column) for name, column in some.items()}


def open_shards(directories: list[str]) -> tuple[bw.StreamingMixedShardDataset, bw.StreamingMixedShardDataset]:
    """For training and for validation. The pool has six shards, and a refill brings one of each directory.

    In so small a pool that matters: refilled at 4 or 5 shards, shares swing and the wave is 0.079 or 0.064, not 0.014.
    """
    return bw.create_datasets(
        directories,
        ["all"] * len(directories),
        validation_split=1 / SHARDS,
        pool_size=6 * ENTRIES,
        refill_threshold=3 * ENTRIES,
        random_seed=0,
        augmentation="hex4",
    )


def check_resume(directories: list[str], step: int) -> None:
    """Another dataset, given the state of this one in mid-epoch, has the same next batch."""
    loader, resumed = (open_shards(directories)[0].loader(batch_size=BATCH) for _ in range(2))
    batches = iter(loader)
    for _ in range(step):
        next(batches)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    expected, batch = next(batches), next(iter(resumed))
    if not all(torch.equal(batch[name], expected[name]) for name in expected):
        sys.exit("the resumed dataset gave another batch")
    print(f"resumed after step {step} of {len(loader)}: the next batch is the same")


def wave(losses: np.ndarray) -> float:
    """How far block losses are from a straight line, as a standard deviation, when the steep beginning is over."""
    late = losses[len(losses) // 3 :]
    blocks = np.arange(len(late))
    return float(np.std(late - np.polyval(np.polyfit(blocks, late, 1), blocks)))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directories = write_shards(folder)
        dataset, validation = open_shards(directories)
        held_out = next(iter(validation.loader(batch_size=len(validation))))
        print(dataset.mixing_report(), end="\n\n")
        ordered, ordered_held_out = train(in_order([shard.path for shard in dataset.shards]), held_out)
        mixed, mixed_held_out = train(dataset.loader(batch_size=BATCH), held_out)
        check_resume(directories, step=500)

    print(f"\n{'steps':>9}  {'loss of shards in order':<37} {'held out':<9}  {'loss of the pool':<26} held out")
    for block, shard in enumerate(dataset.shards):
        steps, name = f"{block * STEPS + 1}-{(block + 1) * STEPS}", list(SKILLS)[shard.directory]
        left, right = (f"{loss[block]:.2f} {'#' * round(6 * loss[block]):<21}" for loss in (ordered, mixed))
        print(f"{steps:>9}  {name:<9} {left}  {ordered_held_out[block]:<9.3f}  {right} {mixed_held_out[block]:.3f}")
    print(f"\nwave of the loss: {wave(ordered):.3f} in order, {wave(mixed):.3f} mixed")
    print(f"wave of the held-out loss: {wave(ordered_held_out):.3f} in order, {wave(mixed_held_out):.3f} mixed")
    ends = [losses[-len(SKILLS) :].mean() for losses in (ordered_held_out, mixed_held_out)]  # after one shard of each
    print(f"held-out loss in the last {len(SKILLS)} blocks: {ends[0]:.3f} in order, {ends[1]:.3f} mixed")
    if wave(mixed) > wave(ordered) / 5 or wave(mixed_held_out) > wave(ordered_held_out) / 1.5:
        sys.exit("the pool has not taken the wave away")
    if ends[1] > ends[0]:
        sys.exit("the network is no better for it")


if __name__ == "__main__":
    torch.set_num_threads(1)  # for so small a model, more only wait for each other
    main()
