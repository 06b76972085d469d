"""GRPO on CPU: one process generates, another trains, both are killed in the middle, and nothing is lost or used twice.

    python train_grpo.py                   both processes; after the kill they are started again, and the run is checked
    python train_grpo.py generate RUN      a generator of the run in folder RUN: start as many as you like
    python train_grpo.py train RUN         its trainer: one line of JSON for each step

The task is to write a word of two letters backwards, "ab>" -> "ba\\n"; the policy begins at random, and learns from
rewards alone. Put your prompts, model, engine and reward in the place of these. EPOCHS=6 makes the run shorter.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn
from torch.nn import functional as F

import batchwright as bw

ALPHABET = "abcdefgh>\n"  # a character's place in it is its token id
END = ALPHABET.index("\n")
PROMPTS = [
    {"prompt": [ALPHABET.index(character) for character in a + b + ">"], "answer": f"{b}{a}\n"}
    for a in "abcdefgh"
    for b in "abcdefgh"
]
EPOCHS = int(os.environ.get("EPOCHS", "16"))
GROUP_SIZE = 8  # responses to each prompt
GROUPS_PER_STEP = 8
MAX_TOKENS = 4
CHECKPOINT_STEPS = 10
NUM_STEPS = len(PROMPTS) * EPOCHS // GROUPS_PER_STEP


class Policy(nn.Module):
    """The last 4 tokens, one hidden layer, the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 16)
        self.hidden = nn.Conv1d(16, 128, kernel_size=4)
        self.output = nn.Linear(128, len(ALPHABET))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = F.pad(self.embedding(input_ids).mT, (3, 0))  # pad before a row, so that no token sees a later one
        return self.output(F.relu(self.hidden(embedded)).mT)


def open_log(run: str) -> bw.RolloutLog:
    """The same in every process: whoever is first makes it. `ahead` keeps generators close to the trainer's weights."""
    path = os.path.join(run, "rollouts")
    return bw.RolloutLog(path, PROMPTS, group_size=GROUP_SIZE, epochs=EPOCHS, seed=0, ahead=2 * GROUPS_PER_STEP)


def save(path: str, **content: object) -> None:
    """Rename last: a kill never leaves half a file, and others may read it at any time."""
    torch.save(content, path + ".new")
    os.replace(path + ".new", path)


def reward_of(text: str, answer: str) -> float:
    return sum(map(str.__eq__, text, answer)) / len(answer)


@torch.no_grad()
def sample(policy: Policy, prompt: list[int]) -> tuple[list[list[int]], list[list[float]]]:
    """A group of responses as token ids, and the log-probability that each of their tokens had."""
    rows, log_probs = torch.tensor([prompt] * GROUP_SIZE), torch.empty(GROUP_SIZE, 0)
    for _ in range(MAX_TOKENS):
        choice = torch.distributions.Categorical(logits=policy(rows)[:, -1])
        token = choice.sample()
        rows = torch.cat([rows, token[:, None]], dim=1)
        log_probs = torch.cat([log_probs, choice.log_prob(token)[:, None]], dim=1)
    responses = rows[:, len(prompt) :].tolist()
    lengths = [response.index(END) + 1 if END in response else MAX_TOKENS for response in responses]
    return (
        [response[:length] for response, length in zip(responses, lengths, strict=True)],
        [row[:length] for row, length in zip(log_probs.tolist(), lengths, strict=True)],
    )


def generate(run: str) -> None:
    """Answer prompts with the newest weights until all are used. If this process dies, others get its prompts."""
    log, policy, weights = open_log(run), Policy(), os.path.join(run, "weights.pt")
    while not os.path.exists(weights):
        time.sleep(0.05)  # the trainer has not begun
    while not log.is_over:
        jobs = log.next_prompts(GROUPS_PER_STEP, timeout=1)  # none, while the trainer has enough to do
        newest = torch.load(weights, weights_only=True)
        policy.load_state_dict(newest["policy"])
        for job in jobs:  # an engine that needs minutes calls log.heartbeat() meanwhile
            responses, log_probs = sample(policy, job.prompt)
            texts = ["".join(ALPHABET[token] for token in response) for response in responses]
            rewards = [reward_of(text, job.fields["answer"]) for text in texts]
            log.add(job, responses, rewards, old_log_probs=log_probs, policy_version=newest["version"])


def train(run: str) -> None:
    """Train until all prompts are used. If this process dies, the next one goes on at the last checkpoint."""
    checkpoint, weights = os.path.join(run, "checkpoint.pt"), os.path.join(run, "weights.pt")
    loader = bw.RolloutDataLoader(
        open_log(run),
        compute_advantages=True,  # the data has groups: each reward against those of its group
        batch_size=GROUPS_PER_STEP * GROUP_SIZE,
        max_staleness=4,  # groups of older weights are not used, and their prompts are answered again
        timeout=60,
        framework="torch",
    )
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint, weights_only=True)
        policy.load_state_dict(saved["policy"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    save(weights, policy=policy.state_dict(), version=loader.step)
    loader.policy_version = loader.step
    for batch in loader:
        facts = batch.metadata  # aligned with targets, as log_probs here
        log_probs = F.log_softmax(policy(batch.input_ids), dim=-1)
        log_probs = log_probs.gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0]
        ratio = torch.exp(log_probs - facts["old_log_probs"])
        gain = torch.minimum(ratio * facts["advantages"], ratio.clamp(0.8, 1.2) * facts["advantages"])
        loss = -(gain * batch.loss_mask).sum() / facts["global_tokens"]  # on several ranks: add up their gradients
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        step = loader.policy_version = loader.step  # the version of weights is the number of updates
        save(weights, policy=policy.state_dict(), version=step)
        prompts = facts["ordinal"][::GROUP_SIZE].tolist()
        report = {
            "step": step,
            "reward": (facts["reward"] * facts["weight"]).sum().item() / facts["global_sequences"],
            "loss": loss.item(),
            "prompts": prompts,
        }
        print(json.dumps(report), flush=True)
        if step % CHECKPOINT_STEPS == 0 or step == NUM_STEPS:
            state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
            save(checkpoint, **state, loader=loader.state_dict())


def watch(run: str, kill_after: int | None = None) -> dict[int, dict]:
    """Start both processes; wait for their end, or kill both soon after a step. Returns the report of each step."""
    command, steps = [sys.executable, __file__], {}
    generator = subprocess.Popen([*command, "generate", run])
    trainer = subprocess.Popen([*command, "train", run], stdout=subprocess.PIPE, text=True)
    try:
        for line in trainer.stdout:
            if line.endswith("\n"):  # a killed process may leave half a line
                steps[json.loads(line)["step"]] = json.loads(line)
            if len(steps) == kill_after:
                time.sleep(random.uniform(0, 0.05))  # so that it is anywhere in a step
                trainer.kill()  # SIGKILL: neither can do anything about it
                generator.kill()
        if kill_after is None and (trainer.wait() or generator.wait(timeout=60)):
            sys.exit("the trainer or the generator failed")
    finally:
        for process in (trainer, generator):
            process.kill()
            process.wait()
    return steps


def check_log(run: str) -> None:
    """Exits with an error where a prompt is lost, or used twice by the run that the checkpoint restores."""
    position = torch.load(os.path.join(run, "checkpoint.pt"), weights_only=True)["loader"]["position"]
    command = [sys.executable, "-m", "batchwright", "rollouts", "status", os.path.join(run, "rollouts")]
    if subprocess.run([*command, "--position", str(position)], check=False).returncode:
        sys.exit("prompts are lost, or were used twice")


def rewards(steps: dict[int, dict], parts: int = 5) -> list[float]:
    """Mean rewards of consecutive steps."""
    return [part.mean().item() for part in torch.tensor([steps[step]["reward"] for step in sorted(steps)]).chunk(parts)]


def main() -> None:
    run = tempfile.mkdtemp(prefix="grpo-")
    middle = NUM_STEPS // 2 // CHECKPOINT_STEPS * CHECKPOINT_STEPS
    before = watch(run, kill_after=middle + random.randint(1, CHECKPOINT_STEPS // 2))  # between two checkpoints
    print(f"killed both after step {max(before)}", flush=True)
    check_log(run)
    after = watch(run)
    print(f"\nresumed from step {min(after) - 1}", flush=True)
    check_log(run)

    if min(after) - 1 < middle:
        sys.exit("the trainer did not go on at its last checkpoint")
    again = before.keys() & after.keys()
    if any(before[step] != after[step] for step in again):
        sys.exit("steps that were trained again had other batches or losses")
    print(f"\n{len(again)} steps were trained again, with the same batches and the same losses")
    complete = before | after
    if sorted(prompt for step in complete.values() for prompt in step["prompts"]) != list(range(len(PROMPTS) * EPOCHS)):
        sys.exit("the trainer did not use every prompt once in every epoch")
    for name, steps in (("before the kill", before), ("after it", after)):
        print(
            f"reward {name}, steps {min(steps)} to {max(steps)}: {' '.join(f'{mean:.2f}' for mean in rewards(steps))}"
        )
    if rewards(after)[-1] < rewards(before)[0] + 0.3:
        sys.exit("the reward did not rise")


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is so small that more threads only wait for each other
    if len(sys.argv) == 1:
        main()
    else:
        {"generate": generate, "train": train}[sys.argv[1]](sys.argv[2])
