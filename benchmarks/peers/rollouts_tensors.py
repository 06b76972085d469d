"""A dict of tensors, as RL trainers on torch keep rollouts: every sample padded to the longest allowed, then stacked.

Modelled on the way that verl's trainer goes, and written anew: each prompt is padded on the left and each response on
the right to a fixed length, all are stacked into one dict of tensors, with attention mask, position ids, response mask
and rewards per token; outcome advantages (GRPO) go by a Python dict from uid to rows; ranks are balanced by
Karmarkar-Karp over the lengths; mini-batches are cut out of every tensor by index. Where such trainers work row by row
and need not (masks, positions, rewards, the reordering after balancing), this is vectorised or left out.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from benchmarks.peers.karmarkar_karp import karmarkar_karp
from benchmarks.peers.rollouts import BATCH_ROWS, MAX_PROMPT, MAX_RESPONSE, WORLD, Epoch

PACKAGE = "torch"
_PAD_ID = 0


def run(rows: list[dict[str, Any]], how: str, epoch: Epoch) -> None:
    if how == "1 thread":
        torch.set_num_threads(1)
    with epoch.stage("read"):
        batch = stack(rows)
    with epoch.stage("advantages"):
        batch |= outcome_advantages(batch, [row["group"] for row in rows])
    with epoch.stage("balance"):
        lengths = batch["attention_mask"].sum(-1).tolist()
        ranks = torch.tensor(karmarkar_karp(lengths, WORLD))  # [rank, row of the rank]
    with epoch.stage("batches"):
        rank_rows = BATCH_ROWS // WORLD
        for first in range(0, ranks.shape[1], rank_rows):
            index = ranks[:, first : first + rank_rows].reshape(-1)
            mini = {name: column[index] for name, column in batch.items()}
            epoch.take(
                mini["input_ids"],
                lambda mini=mini: mini["responses"],
                mini["response_mask"],
                mini["old_log_probs"],
                mini["advantages"],
            )


def stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    prompts, responses, log_probs = [], [], []
    for row in rows:
        # By way of NumPy: torch.tensor(list) takes two to four times as long.
        prompt, response = torch.from_numpy(np.asarray(row["prompt"])), torch.from_numpy(np.asarray(row["response"]))
        old = torch.from_numpy(np.asarray(row["old_log_probs"], np.float32))
        prompts.append(pad(prompt, (MAX_PROMPT - len(prompt), 0), value=_PAD_ID))
        responses.append(pad(response, (0, MAX_RESPONSE - len(response)), value=_PAD_ID))
        log_probs.append(pad(old, (0, MAX_RESPONSE - len(old))))
    batch = {"responses": torch.stack(responses), "old_log_probs": torch.stack(log_probs)}
    batch["input_ids"] = torch.cat([torch.stack(prompts), batch["responses"]], 1)
    prompt_lengths = torch.tensor([len(row["prompt"]) for row in rows])
    response_lengths = torch.tensor([len(row["response"]) for row in rows])
    place = torch.arange(MAX_PROMPT + MAX_RESPONSE)
    is_token = place >= MAX_PROMPT - prompt_lengths[:, None]
    is_token &= place < MAX_PROMPT + response_lengths[:, None]
    batch["attention_mask"] = is_token.long()
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp_(min=0)
    batch["response_mask"] = batch["attention_mask"][:, -MAX_RESPONSE:]
    rewards = torch.zeros(len(rows), MAX_RESPONSE)
    rewards[torch.arange(len(rows)), response_lengths - 1] = torch.tensor([row["reward"] for row in rows])
    batch["token_level_rewards"] = rewards
    return batch


def outcome_advantages(batch: dict[str, torch.Tensor], uids: list[str], eps: float = 1e-6) -> dict[str, torch.Tensor]:
    """(score - mean of its group) / (std of its group + eps), the same for each token of a response."""
    scores = batch["token_level_rewards"].sum(-1)
    rows_of = defaultdict(list)
    for row, uid in enumerate(uids):
        rows_of[uid].append(row)
    worth = torch.empty_like(scores)
    for rows in rows_of.values():
        group = scores[rows]
        worth[rows] = (group - group.mean()) / (group.std() + eps)
    advantages = worth[:, None] * batch["response_mask"]
    return {"advantages": advantages, "returns": advantages}
