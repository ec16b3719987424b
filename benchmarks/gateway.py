"""What a recorded call costs: the gateway against a bare pass-through of the same stack.

    python benchmarks/gateway.py --calls 20000

Both are uvicorn with httptools and uvloop in front, aiohttp behind, in processes of their
own; the gateway records each call durably in SQLite before it answers. The reference call
is a 7.5 KB request whose answer has 1,500 prompt ids and 200 tokens with logprobs; 32
connections. Printed: CPU time (user and system) of the server process per call, their ratio,
and the gateway's resident memory at start, after a tenth of the calls and after all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from agentlightning import address, credentials
from agentlightning.config import GatewayConfig
from agentlightning.gateway.app import run
from agentlightning.serving import listen, serve_app

CONNECTIONS = 32
ROLLOUTS = 32
KEY = "benchmark"
WARM_UP = 500


@dataclass(frozen=True)
class Cost:
    """What a server process used for the calls."""

    calls: int
    cpu_ms: float
    wall_s: float
    rss_mb: tuple[float, float, float]


def reference_request() -> bytes:
    """About 7.5 KB: a system prompt, some turns and two tools, not streamed."""
    turns = [{"role": "system", "content": "You are a careful agent. " * 60}]
    for k in range(10):
        turns.append({"role": "user", "content": f"Step {k}: " + "look at the file again. " * 12})
        turns.append({"role": "assistant", "content": f"I looked at it {k} times. " * 10})
    body = json.dumps({"model": "policy", "messages": turns, "temperature": 1.0})
    return (body[:-1] + ', "user": "' + "x" * max(0, 7500 - len(body) - 12) + '"}').encode()


def reference_answer() -> bytes:
    """1,500 prompt ids, and 200 tokens with their ids and logprobs."""
    entries = [
        {
            "token": f"tok{k}",
            "logprob": -0.01 * k - 1e-7,
            "bytes": [116, 111, 107],
            "top_logprobs": [],
        }
        for k in range(200)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * 200},
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "token_ids": list(range(1000, 1200)),
    }
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [choice],
            "usage": {"prompt_tokens": 1500, "completion_tokens": 200, "total_tokens": 1700},
            "prompt_token_ids": list(range(20000, 21500)),
        }
    ).encode()


async def read_body(receive: Any) -> bytes:
    """The whole request body."""
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def answer(send: Any, status: int, body: bytes) -> None:
    """A JSON answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Upstream:
    """A model server that costs next to nothing."""

    def __init__(self) -> None:
        self._body = reference_answer()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await lifespan(receive, send)
        await read_body(receive)
        return await answer(send, 200, self._body)


class PassThrough:
    """The least that a proxy of this stack can do."""

    def __init__(self, upstream: str) -> None:
        self._url = upstream + "/chat/completions"
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await lifespan(receive, send)
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = await read_body(receive)
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            return await answer(send, response.status, await response.read())


async def lifespan(receive: Any, send: Any) -> None:
    """Starts and stops nothing."""
    for name in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{name}.complete"})


@contextmanager
def server(*arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    """This file in a process of its own: its URL once it listens."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield line.split()[-1], psutil.Process(process.pid)
        finally:
            process.terminate()


async def drive(url: str, process: psutil.Process, calls: int, paths: list[str]) -> Cost:
    """Sends the reference call ``calls`` times over 32 connections, after a warm-up."""
    body = reference_request()
    memory = [process.memory_info().rss / 2**20]

    async with clients() as session:

        async def worker(k: int, count: int) -> None:
            token = credentials.sign(KEY, f"r{k % ROLLOUTS}", "a1", scopes=["call"], seconds=3600)
            headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
            for _ in range(count):
                async with session.post(url + paths[k], data=body, headers=headers) as response:
                    text = await response.read()
                    if response.status != 200:
                        raise RuntimeError(f"HTTP {response.status}: {text[:300]!r}")

        async def batch(count: int) -> None:
            share = -(-count // CONNECTIONS)
            await asyncio.gather(*(worker(k, share) for k in range(CONNECTIONS)))

        await batch(WARM_UP)
        before, started = _cpu(process), time.monotonic()
        await batch(calls // 10)
        memory.append(process.memory_info().rss / 2**20)
        await batch(calls - calls // 10)
        cpu, wall = _cpu(process) - before, time.monotonic() - started
        memory.append(process.memory_info().rss / 2**20)
    done = -(-(calls // 10) // CONNECTIONS) * CONNECTIONS
    done += -(-(calls - calls // 10) // CONNECTIONS) * CONNECTIONS
    return Cost(done, cpu / done * 1000, wall, (memory[0], memory[1], memory[2]))


@asynccontextmanager
async def clients() -> AsyncIterator[aiohttp.ClientSession]:
    """A client with one connection for each worker."""
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def prepare(gateway: str, upstream: str) -> None:
    """Registers the model server and queues the rollouts."""
    headers = {"authorization": f"Bearer {KEY}"}
    rollouts = [{"rollout_id": f"r{k}", "input": {}} for k in range(ROLLOUTS)]
    servers = [{"model": "policy", "endpoint": upstream + "/v1", "version": 1}]
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as session:
        await session.post(f"{gateway}/api/rollouts", json=rollouts)
        await session.post(f"{gateway}/api/models", json=servers)


def measure(calls: int, folder: Path) -> tuple[Cost, Cost, int]:
    """Pass-through, gateway, and the bytes of the store afterwards."""
    with server("--role", "upstream") as (upstream, _):
        with server("--role", "passthrough", "--upstream", upstream) as (url, process):
            bare = asyncio.run(drive(url, process, calls, ["/"] * CONNECTIONS))
        store = folder / "calls.db"
        with server("--role", "gateway", "--store", f"sqlite:///{store}") as (url, process):
            asyncio.run(prepare(url, upstream))
            base = [
                address.openai_base_url("", f"r{k % ROLLOUTS}", "a1", "train")
                for k in range(CONNECTIONS)
            ]
            recorded = asyncio.run(
                drive(url, process, calls, [b + "/chat/completions" for b in base])
            )
        size = sum(path.stat().st_size for path in folder.iterdir())
    return bare, recorded, size


def report(bare: Cost, recorded: Cost, size: int) -> None:
    """Prints what was measured."""
    ratio = recorded.cpu_ms / bare.cpu_ms
    start, early, late = recorded.rss_mb
    for name, cost in (("pass-through", bare), ("gateway", recorded)):
        rate = cost.calls / cost.wall_s
        print(f"{name:13} {cost.cpu_ms:6.3f} ms CPU per call, {rate:6.0f} calls/s")
    print(f"ratio         {ratio:6.2f} (to reach: at most 3, and under 1.2 ms)")
    print(
        f"memory        {start:.1f} MB at start, {early:.1f} after a tenth, {late:.1f} at the end"
    )
    kept = (late - early) * 2**20 / (recorded.calls * 0.9)
    print(f"              {kept:.0f} bytes kept per call of the last nine tenths")
    print(f"store         {size / (recorded.calls + WARM_UP):.0f} bytes per call")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--role", choices=["upstream", "passthrough", "gateway"])
    parser.add_argument("--upstream", default="")
    parser.add_argument("--store", default="")
    options = parser.parse_args()
    if options.role == "upstream":
        serve_app(Upstream(), listen("127.0.0.1", 0), name="upstream")
    elif options.role == "passthrough":
        serve_app(PassThrough(options.upstream), listen("127.0.0.1", 0), name="passthrough")
    elif options.role == "gateway":
        run(GatewayConfig(key=KEY), store_url=options.store, sampling={"train": {}, "val": {}})
    else:
        with tempfile.TemporaryDirectory() as folder:
            report(*measure(options.calls, Path(folder)))


if __name__ == "__main__":
    main()
