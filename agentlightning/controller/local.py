"""The runner for this machine: each agent is a group of processes under its own warden."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from agentlightning.controller import launch
from agentlightning.controller.launch import Folders, Gateway
from agentlightning.controller.runner import Job
from agentlightning.controller.spawn import Exit, ForkServers, Process
from agentlightning.types import Outcome, Rollout

_TAIL_BYTES = 16_384
_CLOSE_GRACE = 1.0
_CLOSE_WAIT = 15.0


@dataclass(slots=True)
class _Agent:
    job: Job
    where: Folders
    keep: Literal["always", "failed", "never"]
    process: Process | None = None
    watcher: asyncio.Task[None] | None = None


class LocalRunner:
    """Starts agents through fork servers; an attempt's files lie in
    ``{root}/{rollout}/{attempt_id}/``: ``workspace/``, ``home/``, ``task.json``,
    ``stdout.log`` and ``stderr.log``. The logs stay, unless the workspace is kept ``never``.
    """

    def __init__(self, root: Path, gateway: Gateway, servers: ForkServers) -> None:
        self._root = root
        self._gateway = gateway
        self._servers = servers
        self._agents: dict[str, _Agent] = {}
        self._changed = asyncio.Event()

    async def list(self) -> list[Job]:
        return [agent.job for agent in self._agents.values()]

    async def launch(self, rollout: Rollout) -> Job:
        attempt = rollout.attempt_id or ""
        if attempt in self._agents:
            return self._agents[attempt].job
        where = launch.folders(self._root, rollout)
        config = launch.parse(rollout)
        workspace = launch.local_launch(config).workspace
        spec = launch.process_spec(rollout, config, where, self._gateway)
        job = Job(rollout.rollout_id, attempt, started_at=time.time(), workspace=where.workspace)
        agent = self._agents[attempt] = _Agent(job, where, keep=workspace.keep)
        try:
            if workspace.copy_from is None:
                launch.prepare(rollout, where, None)
            else:
                await asyncio.to_thread(launch.prepare, rollout, where, workspace.copy_from)
            agent.process = await self._servers.spawn(spec)
        except BaseException:
            del self._agents[attempt]
            raise
        # The time that the first agent of its kind waited for imports is not its own.
        agent.job = replace(job, started_at=time.time())
        agent.watcher = asyncio.create_task(self._watch(agent, agent.process))
        return agent.job

    async def kill(self, job: Job, *, grace_seconds: float) -> None:
        agent = self._agents.get(job.attempt_id)
        if agent and agent.process:
            agent.process.kill(grace_seconds)

    async def remove(self, job: Job) -> None:
        """``job.outcome`` says whether it failed, for ``workspace.keep``."""
        agent = self._agents.pop(job.attempt_id, None)
        if agent is not None:
            await asyncio.to_thread(self._clean, agent, job)

    async def output_tail(self, job: Job, *, lines: int = 20) -> str:
        path = self._agents[job.attempt_id].where.stderr
        return await asyncio.to_thread(tail, path, lines=lines)

    async def wait_for_change(self, timeout: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except asyncio.TimeoutError:
            return
        self._changed.clear()

    async def close(self) -> None:
        for agent in self._agents.values():
            await self.kill(agent.job, grace_seconds=_CLOSE_GRACE)
        watchers = [agent.watcher for agent in self._agents.values() if agent.watcher]
        if watchers:
            await asyncio.wait(watchers, timeout=_CLOSE_WAIT)
        await self._servers.close()

    async def _watch(self, agent: _Agent, process: Process) -> None:
        agent.job = replace(agent.job, outcome=_outcome(await process.wait()))
        self._changed.set()

    def _clean(self, agent: _Agent, job: Job) -> None:
        failed = job.outcome is None or job.outcome.kind != "completed"
        if agent.keep == "always" or (agent.keep == "failed" and failed):
            return
        shutil.rmtree(agent.where.workspace, ignore_errors=True)
        shutil.rmtree(agent.where.home, ignore_errors=True)


def tail(path: Path, *, lines: int) -> str:
    """The last lines of a file, whatever its bytes; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.strip().splitlines()[-lines:])


def _outcome(end: Exit) -> Outcome:
    if end.launch_error is not None:
        return Outcome("launch_error", message=end.launch_error)
    if end.code is None:
        return Outcome("lost", message="the process that watched over the agent vanished")
    return Outcome("agent_error" if end.code else "completed", exit_code=end.code)
