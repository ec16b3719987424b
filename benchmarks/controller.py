"""Rollouts a second of agents that make one model call, against plain ``python agent.py``.

    python benchmarks/controller.py [rollouts]

Both halves run the same agent (the openai SDK, one call) on the same tasks, as many at once,
against the same instant model server. The first half goes through the controller: queued,
claimed, started, called, evaluated, finished. The second only starts and awaits processes.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson
from aiohttp import web

from agentlightning.config import ControllerConfig
from agentlightning.controller.evaluator import LocalEvaluator
from agentlightning.controller.launch import Gateway
from agentlightning.controller.local import LocalRunner
from agentlightning.controller.loop import Controller
from agentlightning.controller.spawn import ForkServers
from agentlightning.store.sqlite import SqliteStore
from agentlightning.types import Rollout

AGENT = """
import os, time
print(time.time(), flush=True)
from openai import OpenAI
answer = OpenAI().chat.completions.create(
    model="policy", messages=[{"role": "user", "content": os.environ["AGL_TASK"]}])
print(answer.choices[0].message.content)
"""
# The SDK imports most of itself when it is first used: a module of `preload` may use it once.
WARM = """
import openai
openai.OpenAI(api_key="-", base_url="http://127.0.0.1:9").chat.completions
"""
EVALUATOR = """
def reward(rollout):
    return 1.0 if rollout.stdout.strip().endswith("4") else 0.0
"""
RUNNING = 16


async def serve() -> None:
    """The instant model server; prints its address."""
    message = {"role": "assistant", "content": "4"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": choices}
    answer = orjson.dumps(body)

    async def call(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    app = web.Application()
    app.router.add_post("/{path:.*}", call)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def rollouts(count: int, folder: Path) -> list[Rollout]:
    local = {
        "python": str(folder / "agent.py"),
        "preload": [str(folder / "warm.py")],
        "evaluate": {"python": f"{folder}/evaluator.py:reward"},
        "workspace": {"keep": "never"},
    }
    return [Rollout(f"r{i}", "2+2", config={"local": local}) for i in range(count)]


async def controlled(count: int, url: str, folder: Path) -> tuple[float, list[float]]:
    """Seconds for all rollouts, and each one's seconds from queued to its first line."""
    store = SqliteStore(folder / "store.db")
    servers = ForkServers(folder / "forkserver.log")
    runner = LocalRunner(folder / "runs", Gateway(url, "key"), servers)
    evaluator = LocalEvaluator(store, folder / "runs", servers)
    controller = Controller(store, runner, evaluator, ControllerConfig(max_running=RUNNING))
    running = asyncio.create_task(controller.run())
    await store.add_rollouts([Rollout("warm", "", config=rollouts(1, folder)[0].config)])
    await until_ended(store, 1)
    start = time.perf_counter()
    await store.add_rollouts(rollouts(count, folder))
    await until_ended(store, 1 + count)
    seconds = time.perf_counter() - start
    waits = await single_starts(store, folder)
    controller.stop()
    await running
    ended = await store.list_rollouts(states=["succeeded"])
    assert sum(rollout.reward == 1.0 for rollout in ended) >= count, ended[-1]
    await store.close()
    return seconds, waits


async def until_ended(store: SqliteStore, count: int) -> None:
    total = 0
    while total < count:
        total = (await store.terminal(after=total, wait=10)).total_terminal


async def single_starts(store: SqliteStore, folder: Path) -> list[float]:
    """Queued → first line of the agent's code, with the controller otherwise idle."""
    waits = []
    for i in range(20):
        rollout = Rollout(f"single{i}", "2+2", config=rollouts(1, folder)[0].config)
        before = (await store.terminal()).total_terminal
        queued = time.time()
        await store.add_rollouts([rollout])
        await until_ended(store, before + 1)
        log = next((folder / "runs" / rollout.rollout_id).glob("*/stdout.log"))
        waits.append(float(log.read_text().split()[0]) - queued)
    return waits


async def plain(count: int, url: str, folder: Path) -> float:
    """Seconds to start each agent as ``python agent.py``, as many at once."""
    env = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "k", "AGL_TASK": "2+2"}
    slots = asyncio.Semaphore(RUNNING)

    async def one() -> None:
        async with slots:
            process = await asyncio.create_subprocess_exec(
                sys.executable, folder / "agent.py", env=env, stdout=subprocess.DEVNULL
            )
            assert await process.wait() == 0

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return time.perf_counter() - start


def cpu_seconds() -> float:
    """Of this process and everything below it that has ended; the model server has not."""
    usages = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(count: int) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.controller", "serve"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "agent.py").write_text(AGENT)
            (folder / "warm.py").write_text(WARM)
            (folder / "evaluator.py").write_text(EVALUATOR)
            ours, waits = asyncio.run(controlled(count, url, folder))
            our_cpu = cpu_seconds() / (count + len(waits) + 1)
            # An eighth is enough: plain processes cost the same each.
            few = max(1, count // 8)
            theirs = asyncio.run(plain(few, url, folder)) * count / few
            their_cpu = (cpu_seconds() - our_cpu * (count + len(waits) + 1)) / few
    finally:
        server.terminate()
        server.wait()
    print(f"controller: {count / ours:6.1f} rollouts finished a second ({count}, evaluated)")
    print(f"baseline:   {count / theirs:6.1f} a second started as plain `python agent.py`")
    print(f"ratio:      {theirs / ours:6.1f}")
    print(f"CPU a rollout: {1000 * our_cpu:.0f} ms (baseline {1000 * their_cpu:.0f} ms)")
    print(f"queued to first line of agent code: median {1000 * statistics.median(waits):.0f} ms")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 200)
