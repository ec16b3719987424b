"""The controller's side of the fork servers: starts processes and waits for their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from agentlightning.errors import LaunchError

_PRELOAD_WAIT = 120.0
"""Longest time, in seconds, that the imports of a fork server may take."""

_PRELOAD_RETRY = 15.0
"""Seconds until a preload that failed is tried again: it may have been mended."""

_SERVER_ENV = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. ``target`` is a program, a script's absolute path, a module, a
    class or an evaluator, as ``kind`` says; ``output_limit`` is bytes of each stream."""

    kind: Literal["command", "script", "module", "class", "evaluator"]
    target: str
    cwd: str
    stdout: str
    stderr: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    preload: Sequence[str] = ()
    output_limit: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. Both None: nobody knows, its warden is gone."""

    code: int | None = None
    launch_error: str | None = None


class Process:
    """A started process with everything that it starts in turn."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def wait(self) -> Exit:
        """Returns when no process of it is left."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        self._writer.close()
        report = json.loads(line) if line.endswith(b"\n") else {}
        return Exit(code=report.get("exit_code"), launch_error=report.get("launch_error"))

    def kill(self, grace_seconds: float) -> None:
        """TERM to all of it now, KILL to what is left after the grace time."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"kill": grace_seconds}).encode() + b"\n")


class ForkServers:
    """One fork server for each set of preloaded modules, started when first needed and
    started again when it has died."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._servers: dict[tuple[str, ...], asyncio.Task[_Server]] = {}
        self._failed: dict[tuple[str, ...], tuple[float, LaunchError]] = {}

    async def spawn(self, spec: ProcessSpec) -> Process:
        """Starts a process; LaunchError where its preload cannot be imported."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await self._hand_over(theirs, tuple(spec.preload))
        except BaseException:
            ours.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours)
        # Not asdict, which copies all of it deeply.
        values = {each.name: getattr(spec, each.name) for each in fields(spec)}
        writer.write(json.dumps(values).encode() + b"\n")
        return Process(reader, writer)

    async def close(self) -> None:
        """Ends the fork servers; processes that still run are not touched."""
        servers, self._servers = list(self._servers.values()), {}
        for server in await asyncio.gather(*servers, return_exceptions=True):
            if isinstance(server, _Server):
                await server.close()

    async def _hand_over(self, sock: socket.socket, preload: tuple[str, ...]) -> None:
        for last_try in (False, True):
            server = await self._server(preload)
            try:
                server.send(sock)
                return
            except OSError as error:
                self._servers.pop(preload, None)
                await server.close()
                if last_try:
                    raise LaunchError(f"the fork server of {list(preload)} died twice") from error

    async def _server(self, preload: tuple[str, ...]) -> _Server:
        """A preload that failed is not tried again at once: many rollouts share one."""
        failed_at, failure = self._failed.get(preload, (float("-inf"), None))
        if failure is not None and time.monotonic() - failed_at < _PRELOAD_RETRY:
            raise LaunchError(str(failure))
        if preload not in self._servers:
            self._servers[preload] = asyncio.create_task(_started(preload, self._log))
        try:
            return await asyncio.shield(self._servers[preload])
        except LaunchError as error:
            self._servers.pop(preload, None)
            self._failed[preload] = time.monotonic(), error
            raise


class _Vanished(LaunchError):
    """A fork server ended without a word: killed, or brought down by what it imported."""


async def _started(preload: tuple[str, ...], log: Path) -> _Server:
    """One that vanishes is started once more: somebody may have killed it, and a LaunchError
    is the end of every rollout that waits for it."""
    try:
        return await _Server.start(preload, log)
    except _Vanished:
        return await _Server.start(preload, log)


class _Server:
    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control

    @classmethod
    async def start(cls, preload: tuple[str, ...], log: Path) -> _Server:
        ours, theirs = socket.socketpair()
        module = "agentlightning.controller.forkserver"
        argv = [sys.executable, "-m", module, str(theirs.fileno()), json.dumps(preload)]
        with theirs, log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_server_env(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        server = cls(process, ours)
        await server._ready(preload)
        return server

    async def _ready(self, preload: tuple[str, ...]) -> None:
        self._control.setblocking(False)
        try:
            line = await asyncio.wait_for(self._read_line(), _PRELOAD_WAIT)
        except asyncio.TimeoutError as error:
            await self.close()
            raise LaunchError(
                f"preload {list(preload)}: not imported after {_PRELOAD_WAIT:.0f} s"
            ) from error
        if not line:
            await self.close()
            raise _Vanished(f"preload {list(preload)} failed: the fork server ended")
        answer = json.loads(line)
        if "error" in answer:
            await self.close()
            raise LaunchError(f"preload {list(preload)} failed: {answer['error'].strip()}")

    async def _read_line(self) -> bytes:
        line, loop = b"", asyncio.get_running_loop()
        while not line.endswith(b"\n"):
            data = await loop.sock_recv(self._control, 65536)
            if not data:
                return b""
            line += data
        return line

    def send(self, sock: socket.socket) -> None:
        socket.send_fds(self._control, [b"+"], [sock.fileno()])

    async def close(self) -> None:
        self._control.close()
        try:
            await asyncio.wait_for(self._process.wait(), 2)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _server_env() -> dict[str, str]:
    """Little: a forked agent can read the environment that its fork server was started with."""
    env = {name: os.environ[name] for name in _SERVER_ENV if name in os.environ}
    return {**env, "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
