"""Wakes who waits for rollouts to change: at once within the process, soon across processes."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading

POLL_SECONDS = 0.05
"""How often another process's writes are looked for while somebody waits."""


class Changes:
    """``db`` is a connection that only this object uses."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._lock = threading.Lock()
        self._count = 0
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def mark(self) -> tuple[int, int]:
        """Where the file stands now; take it before looking at what is waited for."""
        return self._count, int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def notify(self) -> None:
        """Something changed; may be called from any thread."""
        with self._lock:
            self._count += 1
            waiting = list(self._waiting)
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # that loop was closed
                loop.call_soon_threadsafe(event.set)

    async def wait(self, mark: tuple[int, int], *, seconds: float) -> None:
        """Returns when something changed since ``mark``, or after ``seconds``."""
        loop = asyncio.get_running_loop()
        waiter = (loop, asyncio.Event())
        end = loop.time() + seconds
        with self._lock:
            self._waiting.add(waiter)
        try:
            while self._count == mark[0] and (left := end - loop.time()) > 0:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(waiter[1].wait(), min(left, POLL_SECONDS))
                if self.mark() != mark:
                    return
        finally:
            with self._lock:
                self._waiting.discard(waiter)

    def close(self) -> None:
        self._db.close()
