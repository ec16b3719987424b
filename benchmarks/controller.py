"""Rollouts a second of agents that make one model call, against plain ``python agent.py``.

    python benchmarks/controller.py --rollouts 200

The real path: a gateway process over a SQLite file, a controller process over HTTP, an instant
model server that answers with ids and logprobs, and agents that make one call with the openai
SDK and are then judged by a Python function. Both halves run the same unmodified agent against
the same gateway, 16 at once. The first goes through the controller: queued, claimed, started,
called, recorded, evaluated, finished, with the launch spec that docs/operations.md gives for
many agents a second. The second only starts processes and awaits them.

CPU time is user and system, of each process with all that it started; the model server's is
left out. The wait from queued to the agent's first line is measured with nothing else running.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentlightning import address, credentials  # noqa: E402
from agentlightning.serving import listen, serve_app  # noqa: E402
from agentlightning.store.http import HttpStore  # noqa: E402
from agentlightning.types import ModelServer, Rollout  # noqa: E402

AGENT = """
import os, time
print(time.time(), flush=True)
from openai import OpenAI
answer = OpenAI().chat.completions.create(
    model="policy", messages=[{"role": "user", "content": os.environ["AGL_TASK"]}])
print(answer.choices[0].message.content)
"""
EVALUATOR = """
def reward(rollout):
    return 1.0 if rollout.answer == "4" else 0.0
"""
RUNNING = 16
SINGLES = 20
KEY = "benchmark"


def answer_body() -> bytes:
    """A chat completion as vLLM gives it: ids of the prompt, ids and logprobs of the answer."""
    entry = {"token": "4", "logprob": -0.1, "bytes": [52], "top_logprobs": []}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "4"},
        "logprobs": {"content": [entry, {**entry, "token": ""}]},
        "finish_reason": "stop",
        "token_ids": [52, 2],
    }
    usage = {"prompt_tokens": 60, "completion_tokens": 2, "total_tokens": 62}
    head = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy"}
    ids = {"prompt_token_ids": list(range(100, 160))}
    return json.dumps({**head, "choices": [choice], "usage": usage, **ids}).encode()


async def instant_model(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that gives every call the same answer."""
    if scope["type"] == "lifespan":
        for name in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{name}.complete"})
        return
    while (await receive()).get("more_body"):
        pass
    body = answer_body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def started(*argv: str, log: Path, ready: str) -> Iterator[tuple[str, psutil.Process]]:
    """A service of ours in a process: the last word of its ready line, and the process."""
    env = {**os.environ, "AGL_ADMIN_KEY": KEY}
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [sys.executable, *argv],
            stdout=PIPE,
            stderr=file,
            text=True,
            env=env,
            cwd=ROOT,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if ready not in line:
                raise RuntimeError(f"{argv} gave {line!r}: {log.read_text()[-2000:]}")
            yield line.split()[-1], psutil.Process(process.pid)
        finally:
            process.terminate()


def rollout(rollout_id: str, folder: Path) -> Rollout:
    local = {
        "python": str(folder / "agent.py"),
        "preload": [str(ROOT / "examples/warm_openai.py")],
        "env": {"SSL_CERT_DIR": "/etc/ssl/certs"},
        "evaluate": {"python": f"{folder}/evaluator.py:reward"},
        "workspace": {"keep": "never"},
    }
    return Rollout(rollout_id, "2+2", config={"local": local, "model": "policy"})


class Meter:
    """CPU seconds since it was made, by part. Fork servers hold those of wardens and agents
    that ended: each is reaped by the one above it."""

    def __init__(self, gateway: psutil.Process, controller: psutil.Process | None) -> None:
        self._gateway = gateway
        self._controller = controller
        self._start = self._now()

    def read(self) -> dict[str, float]:
        return {name: value - self._start.get(name, 0.0) for name, value in self._now().items()}

    def _now(self) -> dict[str, float]:
        parts = {"gateway": own(self._gateway)}
        if self._controller is None:
            return parts
        parts["controller"] = own(self._controller)
        for server in self._controller.children():
            kind = "evaluators" if "evaluate" in server.cmdline()[-1] else "agents"
            parts["fork servers"] = parts.get("fork servers", 0.0) + own(server)
            parts[f"{kind} with wardens"] = below(server)
        return parts


def own(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def below(process: psutil.Process) -> float:
    """Of the children that ended and were waited for, and of theirs."""
    times = process.cpu_times()
    return float(times.children_user + times.children_system)


@dataclass(frozen=True)
class Half:
    """What ``count`` agents took: wall seconds and CPU seconds by part."""

    count: int
    wall: float
    cpu: Mapping[str, float]

    @property
    def rate(self) -> float:
        return self.count / self.wall

    def milliseconds(self) -> str:
        each = {name: 1000 * value / self.count for name, value in self.cpu.items()}
        parts = ", ".join(f"{name} {value:.1f}" for name, value in each.items())
        return f"{sum(each.values()):6.1f} ms ({parts})"


async def until_ended(store: HttpStore, count: int) -> None:
    total = 0
    while total < count:
        total = (await store.terminal(after=total, wait=10)).total_terminal


async def controlled(
    store: HttpStore, count: int, folder: Path, processes: tuple[psutil.Process, psutil.Process]
) -> tuple[Half, list[float]]:
    """The rollouts, and the seconds from queued to first line of others, one at a time."""
    await store.add_rollouts([rollout("warm", folder)])
    await until_ended(store, 1)
    meter, start = Meter(*processes), time.perf_counter()
    await store.add_rollouts([rollout(f"r{i}", folder) for i in range(count)])
    await until_ended(store, 1 + count)
    half = Half(count, time.perf_counter() - start, meter.read())
    waits = [await single_start(store, i, folder) for i in range(SINGLES)]
    ended = await store.list_rollouts(states=["succeeded"])
    if sum(one.reward == 1.0 for one in ended) != 1 + count + SINGLES:
        raise RuntimeError(f"{len(ended)} succeeded; see {folder}")
    return half, waits


async def single_start(store: HttpStore, number: int, folder: Path) -> float:
    before = (await store.terminal()).total_terminal
    queued = time.time()
    await store.add_rollouts([rollout(f"single{number}", folder)])
    await until_ended(store, before + 1)
    log = next((folder / "runs" / f"single{number}").glob("*/stdout.log"))
    return float(log.read_text().split()[0]) - queued


async def plain(
    store: HttpStore, count: int, folder: Path, gateway: tuple[str, psutil.Process]
) -> Half:
    """Each agent as ``python agent.py``, as many at once, through the same gateway."""
    url, process = gateway
    await store.add_rollouts([rollout(f"plain{i}", folder) for i in range(count)])
    slots = asyncio.Semaphore(RUNNING)

    async def one(name: str) -> None:
        base = address.openai_base_url(url, name, "a1", "train")
        key = credentials.sign(KEY, name, "a1", scopes=["call"], seconds=600)
        env = {**os.environ, "OPENAI_BASE_URL": base, "OPENAI_API_KEY": key, "AGL_TASK": "2+2"}
        async with slots:
            agent = await asyncio.create_subprocess_exec(
                sys.executable, folder / "agent.py", env=env, stdout=DEVNULL, stderr=PIPE
            )
            _, error = await agent.communicate()
            if agent.returncode:
                raise RuntimeError(f"a plain agent failed: {error[-300:]!r}")

    meter, start, agents = Meter(process, None), time.perf_counter(), below(psutil.Process())
    await asyncio.gather(*(one(f"plain{i}") for i in range(count)))
    cpu = {**meter.read(), "agents": below(psutil.Process()) - agents}
    return Half(count, time.perf_counter() - start, cpu)


async def measure(count: int, folder: Path) -> tuple[Half, Half, list[float]]:
    (folder / "agent.py").write_text(AGENT)
    (folder / "evaluator.py").write_text(EVALUATOR)
    log = folder / "model.log"
    with started("benchmarks/controller.py", "--model", log=log, ready="listening") as (model, _):
        argv = ["-m", "agentlightning", "gateway", "--port", "0", "--store", f"{folder}/store.db"]
        log = folder / "gateway.log"
        with started(*argv, log=log, ready="listening") as (url, gateway):
            store = HttpStore(url, KEY)
            await store.set_model_servers([ModelServer("policy", f"{model}/v1", 1)])
            argv = ["-m", "agentlightning", "controller", "--gateway", url]
            argv += ["--root", str(folder / "runs"), f"controller.max_running={RUNNING}"]
            log = folder / "controller.log"
            with started(*argv, log=log, ready="running") as (_, controller):
                ours, waits = await controlled(store, count, folder, (gateway, controller))
            # A tenth is enough: plain processes cost the same each.
            theirs = await plain(store, max(1, count // 10), folder, (url, gateway))
            await store.close()
    return ours, theirs, waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--model", action="store_true", help="be the model server")
    options = parser.parse_args()
    if options.model:
        serve_app(instant_model, listen("127.0.0.1", 0), name="model")
        return
    with tempfile.TemporaryDirectory() as name:
        ours, theirs, waits = asyncio.run(measure(options.rollouts, Path(name)))
    load = os.getloadavg()[0]
    print(f"controller  {ours.rate:6.1f} rollouts finished a second ({ours.count}, evaluated)")
    print(f"plain       {theirs.rate:6.1f} a second as `python agent.py` ({theirs.count})")
    print(f"ratio       {ours.rate / theirs.rate:6.2f}")
    print(f"CPU         {ours.milliseconds()} a rollout")
    print(f"CPU plain   {theirs.milliseconds()}")
    print(
        f"queued to the agent's first line: median {1000 * statistics.median(waits):.0f} ms, "
        f"longest {1000 * max(waits):.0f} ms ({len(waits)} rollouts, one at a time)"
    )
    print(f"{os.cpu_count()} CPUs, load average {load:.1f}")


if __name__ == "__main__":
    main()
