"""Starts our own services as child processes, and starts them again when they die."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from agentlightning.errors import ServiceError

T = TypeVar("T")

log = logging.getLogger(__name__)

_READY = re.compile(r"listening on (\S+)|controller running")
_RESTARTS = 5
_RESTART_WINDOW_SECONDS = 300.0
_STOP_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What to start: ``arguments`` (of ``agl``) is asked again at each start, since a service
    that comes back may have to start from newer weights. ``sockets`` are inherited: a listening
    socket that outlives the service makes its clients wait instead of failing."""

    name: str
    arguments: Callable[[], Sequence[str]]
    log_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    sockets: tuple[int, ...] = ()
    start_seconds: float = 180.0


class Service:
    """One child process. It ends with us: each service watches its parent."""

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self.url = ""
        self.restarts: list[float] = []
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the service says that it is ready; ServiceError with its last lines of
        log where it ends before, or is not ready in time."""
        spec = self.spec
        with spec.log_file.open("ab") as log_file:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "agentlightning",
                *spec.arguments(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, **spec.environment, "AGL_PARENT": str(os.getpid())},
                pass_fds=spec.sockets,
                start_new_session=True,
            )
        try:
            await asyncio.wait_for(self._until_ready(), spec.start_seconds)
        except asyncio.TimeoutError as error:
            await self.stop()
            raise ServiceError(
                f"{spec.name} was not ready after {spec.start_seconds:.0f} s. {self._last_log()}"
            ) from error

    async def ended(self) -> int:
        """Waits for the process; its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """TERM, then KILL after a bound."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except asyncio.TimeoutError:
            log.warning("%s did not end within %.0f s of TERM", self.spec.name, _STOP_SECONDS)
            process.kill()
            await process.wait()

    async def _until_ready(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if match := _READY.search(line.decode(errors="replace")):
                self.url = match[1] or self.url
                self._reader = asyncio.create_task(_discard(self._process.stdout))
                return
        code = await self._process.wait()
        raise ServiceError(f"{self.spec.name} ended with {code} at start. {self._last_log()}")

    def _last_log(self) -> str:
        lines = self.spec.log_file.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'It said nothing.'} (log: {self.spec.log_file})"


class Supervisor:
    """Keeps services running: one that dies is started again, a bounded number of times."""

    def __init__(self, specs: Sequence[ServiceSpec], on_restart: Callable[[str], None]) -> None:
        self.services = {spec.name: Service(spec) for spec in specs}
        self._on_restart = on_restart
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, *names: str) -> None:
        """Starts the named services side by side and watches them from then on."""
        chosen = [self.services[name] for name in names]
        await asyncio.gather(*(service.start() for service in chosen))
        self._watchers += [asyncio.create_task(self._watch(service)) for service in chosen]

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; ServiceError as soon as a service has died too often."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, *self._watchers], return_when=asyncio.FIRST_COMPLETED)
            for watcher in self._watchers:
                if watcher.done():
                    watcher.result()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self) -> None:
        """Ends every service; those started last end first."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for service in reversed(self.services.values()):
            await service.stop()

    async def _watch(self, service: Service) -> None:
        while True:
            code = await service.ended()
            name, now = service.spec.name, time.monotonic()
            recent = [t for t in service.restarts if now - t < _RESTART_WINDOW_SECONDS]
            if len(recent) >= _RESTARTS:
                raise ServiceError(
                    f"{name} died {len(recent) + 1} times in {_RESTART_WINDOW_SECONDS:.0f} s, "
                    f"last with {code}; see {service.spec.log_file}"
                )
            service.restarts = [*recent, now]
            self._on_restart(f"{name} ended with {code}; started again")
            await service.start()


async def _discard(stream: asyncio.StreamReader) -> None:
    """A service that prints more than its ready line never blocks on a full pipe."""
    while await stream.read(65536):
        pass
