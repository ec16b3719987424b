"""What a long rollout costs in the store: bytes kept, and CPU time of ``add_call``.

    python benchmarks/storage.py

The baseline keeps each call's whole prompt, answer and request, in the same run.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import tempfile
import time
from pathlib import Path

from agentlightning.store import SqliteStore
from agentlightning.types import (
    Call,
    Completion,
    Json,
    RawCall,
    Rollout,
    float_array,
    token_array,
)

TURNS, CONTEXT, ANSWER = 100, 200, 200  # each turn: 200 tokens of context, 200 sampled
BYTES_PER_TOKEN = 8  # an id and a logprob
HOT_CALLS = 400


def text(rng: random.Random, tokens: int) -> str:
    return " ".join(f"w{rng.randrange(1000):03d}"[:3] for _ in range(tokens))


def rollout_calls(seed: int = 0) -> tuple[list[tuple[Call, RawCall]], int]:
    """The calls of one linear rollout, and the bytes of its texts once."""
    rng = random.Random(seed)
    ids, messages, texts, calls = token_array(), [], 0, []
    for turn in range(TURNS):
        ids = ids + token_array(rng.randrange(150_000) for _ in range(CONTEXT))
        messages = [*messages, {"role": "user", "content": text(rng, CONTEXT)}]
        sampled = token_array(rng.randrange(150_000) for _ in range(ANSWER))
        logprobs = float_array(-rng.random() for _ in range(ANSWER))
        answer = {"role": "assistant", "content": text(rng, ANSWER)}
        raw = RawCall(_json({"model": "m", "messages": messages}), _json({"choices": [answer]}))
        calls.append((Call(f"c{turn}", "r", "a", ids, (Completion(sampled, logprobs),)), raw))
        texts += len(messages[-1]["content"]) + len(answer["content"])
        ids, messages = ids + sampled, [*messages, answer]
    return calls, texts


def _json(value: Json) -> bytes:
    return json.dumps(value).encode()


async def ours(path: Path, calls: list[tuple[Call, RawCall]]) -> int:
    store = SqliteStore(path)
    await store.add_rollouts([Rollout("r", {})])
    for call, raw in calls:
        await store.add_call(call, raw)
    await store.close()
    return path.stat().st_size  # closing moved the write-ahead log into the file


def naive(path: Path, calls: list[tuple[Call, RawCall]]) -> int:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE calls (prompt BLOB, ids BLOB, logprobs BLOB, q BLOB, a BLOB)")
    for call, raw in calls:
        (answer,) = call.completions
        assert answer.logprobs is not None
        arrays = (call.prompt_ids, answer.token_ids, answer.logprobs)
        values = (*(one.tobytes() for one in arrays), raw.request, raw.response)
        db.execute("INSERT INTO calls VALUES (?, ?, ?, ?, ?)", values)
    db.commit()
    db.close()
    return path.stat().st_size


async def add_call_seconds(path: Path) -> float:
    """CPU seconds of this process per call: 1,500 prompt ids, 200 sampled, a 7.5 KB request."""
    store = SqliteStore(path)
    await store.add_rollouts([Rollout("r", {})])
    rng = random.Random(1)
    calls = []
    for number in range(HOT_CALLS):
        prompt = token_array(rng.randrange(150_000) for _ in range(1500))
        answer = Completion(token_array(range(200)), float_array([-0.5] * 200))
        messages = [{"role": "user", "content": text(rng, 180)} for _ in range(10)]
        raw = RawCall(_json({"model": "m", "messages": messages}), b'{"choices":[]}')
        calls.append((Call(f"c{number}", "r", f"a{number % 20}", prompt, (answer,)), raw))
    begin = time.process_time()
    for first in range(0, HOT_CALLS, 32):
        await asyncio.gather(*(store.add_call(*one) for one in calls[first : first + 32]))
    spent = time.process_time() - begin
    await store.close()
    return spent / HOT_CALLS


def main() -> None:
    calls, texts = rollout_calls()
    unique = TURNS * (CONTEXT + ANSWER)
    with tempfile.TemporaryDirectory() as folder:
        kept = asyncio.run(ours(Path(folder, "ours.db"), calls))
        full = naive(Path(folder, "naive.db"), calls)
        seconds = asyncio.run(add_call_seconds(Path(folder, "hot.db")))
    tokens = BYTES_PER_TOKEN * unique
    print(f"{TURNS} turns, {unique} unique tokens ({tokens} B), texts once {texts} B")
    print(f"stored {kept} B; (stored - texts) / (8 B x tokens) = {(kept - texts) / tokens:.2f}")
    print(f"full copies {full} B; {full / kept:.1f} times as much")
    print(f"add_call {seconds * 1e3:.3f} ms of CPU, 32 at a time")


if __name__ == "__main__":
    main()
