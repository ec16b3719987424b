"""How fast an update is, against a plain forward and backward pass with full logits.

    python benchmarks/update.py --model DIR [--rows 48] [--shared 150] [--repeat 2]

Rows look like a group's: they begin with the same tokens, then differ, and train two turns. Both
sides see the same rows, precision and threads, and end with an AdamW step. Prints tokens of
samples a second, CPU seconds and the ratios.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agentlightning.config import TrainerConfig
from agentlightning.trainer.policy import TrainingRow
from agentlightning.trainer.torch_policy import TorchPolicy
from agentlightning.types import Sample, float_array, mask_array, token_array

VOCABULARY = 32_000


def make_rows(count: int, shared: int) -> list[TrainingRow]:
    draw = random.Random(0)
    beginning = [draw.randrange(3, VOCABULARY) for _ in range(shared)]
    rows = []
    for number in range(count):
        ids = beginning + [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(80, 111))]
        mask = [0] * (len(ids) - 60) + [1] * 25 + [0] * 10 + [1] * 25
        logprobs, versions = float_array([-10.0]) * len(ids), token_array([0]) * len(ids)
        sample = Sample(
            str(number), "g", 1.0, token_array(ids), mask_array(mask), logprobs, versions
        )
        rows.append(TrainingRow(sample, (-1.0) ** number, 1 / (50 * count)))
    return rows


class PlainUpdate:
    """Right-padded rows, eight at a time, all logits at once, AdamW on bf16 or fp32 weights."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-5)

    def update(self, rows: Sequence[TrainingRow]) -> None:
        for start in range(0, len(rows), 8):
            self._accumulate(rows[start : start + 8])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _accumulate(self, rows: Sequence[TrainingRow]) -> None:
        longest = max(len(row.sample.token_ids) for row in rows)
        ids_BT, present_BT = torch.zeros(2, len(rows), longest, dtype=torch.long)
        weight_BT = torch.zeros(len(rows), longest)
        for b, row in enumerate(rows):
            n = len(row.sample.token_ids)
            ids_BT[b, :n], present_BT[b, :n] = torch.tensor(row.sample.token_ids), 1
            weight_BT[b, :n] = torch.tensor(row.sample.loss_mask) * row.token_weight * row.advantage
        logits_BTV = self.model(input_ids=ids_BT, attention_mask=present_BT).logits[:, :-1].float()
        logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        (-(logprobs_BT * weight_BT[:, 1:]).sum()).backward()


def measure(update: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Best wall seconds and best CPU seconds, after one run that does not count."""
    update()
    walls, cpus = [], []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        update()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--shared", type=int, default=150)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    rows = make_rows(arguments.rows, arguments.shared)
    tokens = sum(len(row.sample.token_ids) for row in rows)
    policy = TorchPolicy(
        arguments.model,
        TrainerConfig(device="cpu", micro_batch_tokens=arguments.micro_batch_tokens),
        seed=0,
    )
    print(
        f"{policy.description}; {len(rows)} rows, {tokens} tokens, "
        f"{torch.get_num_threads()} threads"
    )
    ours = measure(lambda: policy.update(rows), arguments.repeat)
    dtype = next(policy._model.parameters()).dtype
    plain = PlainUpdate(arguments.model, dtype)
    theirs = measure(lambda: plain.update(rows), arguments.repeat)
    for name, (wall, cpu) in (("agentlightning", ours), ("plain", theirs)):
        print(f"{name:15} {wall:7.2f} s  {cpu:7.2f} CPU s  {tokens / wall:8.0f} tokens/s")
    print(f"ratio (plain / ours): wall {theirs[0] / ours[0]:.2f}, CPU {theirs[1] / ours[1]:.2f}")


if __name__ == "__main__":
    main()
