"""Tokens a second of the embedded model server against plain batched ``generate``.

Both run the same model on the same machine in turns, in one run: 64 new tokens after about
150 prompt tokens, through HTTP for the server, left-padded in one batch for ``generate``.
What counts is the ratio; the absolute numbers depend on what else the machine does.

    python benchmarks/serve.py --model smollm2-135m
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from agentlightning.trainer.models import fast_dtype, pick_device, resolve_model

NEW_TOKENS, PROMPT_TOKENS, SHARED_TOKENS = 64, 150, 140

SERVER = """
import sys
from agentlightning.config import ServeConfig
from agentlightning.trainer.serve import run
run(ServeConfig(), model=sys.argv[1], served_name="bench")
"""


def prompts(count: int, rng: random.Random, shared: int) -> list[list[int]]:
    """Prompts of random ids, of which the first ``shared`` are the same in all."""
    head = [rng.randrange(100, 40000) for _ in range(shared)]
    lengths = [PROMPT_TOKENS + rng.randrange(-8, 9) for _ in range(count)]
    return [head + [rng.randrange(100, 40000) for _ in range(n - shared)] for n in lengths]


def generate(model: torch.nn.Module, batch: list[list[int]]) -> None:
    width = max(len(p) for p in batch)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
    model.generate(  # type: ignore[operator]
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=True,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )


async def ask(url: str, batch: list[list[int]]) -> None:
    async def one(session: aiohttp.ClientSession, prompt: list[int]) -> None:
        body = {
            "prompt": prompt,
            "max_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert len(answer["choices"][0]["token_ids"]) == NEW_TOKENS, answer

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(one(session, prompt) for prompt in batch))


def serve(url: str, batch: list[list[int]]) -> None:
    asyncio.run(ask(url, batch))


def timed(work: Callable[[], None]) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = resolve_model(options.model)
    device = pick_device("auto")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=fast_dtype("auto", device))
    model.to(device).eval()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split()[-1]
        compare(model, url, options.rounds)
    finally:
        process.terminate()
        process.wait(30)


def compare(model: torch.nn.Module, url: str, rounds: int) -> None:
    rng = random.Random(0)
    load = os.getloadavg()[0]
    print(f"{torch.get_num_threads()} threads, load average before: {load:.1f}")
    print(f"{'parallel':>8} {'shared':>6} {'generate':>9} {'server':>7}  ratio (tokens/s)")
    for count, shared in [(1, 0), (8, 0), (32, 0), (32, SHARED_TOKENS)]:
        theirs, ours = [], []
        for _ in range(rounds):
            batch = prompts(count, rng, shared)
            theirs.append(timed(partial(generate, model, batch)))
            ours.append(timed(partial(serve, url, batch)))
        tokens = count * NEW_TOKENS
        print(
            f"{count:>8} {shared:>6} {tokens / min(theirs):>9.0f} {tokens / min(ours):>7.0f}"
            f"  {min(theirs) / min(ours):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
