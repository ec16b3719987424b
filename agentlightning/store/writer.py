"""One thread that writes, and commits what many coroutines asked for in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from agentlightning.errors import Conflict, StoreUnavailable

T = TypeVar("T")

MAX_BATCH = 256
"""Operations in one transaction at most."""


@dataclass(eq=False, slots=True)
class _Operation:
    run: Callable[[sqlite3.Connection], Any]
    wakes: bool
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    value: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        if self.future.done():  # its caller was cancelled; what it asked for stands
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


class Writer:
    """Runs operations in the order they were asked for.

    An operation that raises is undone alone (each has its savepoint); its neighbours in the
    transaction stand. An answer is given only after the commit that holds it is on disk.
    ``begun`` is called in each transaction before its operations, ``failed`` when a commit
    was lost, ``changed`` after a commit that holds an operation with ``wakes``.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        *,
        begun: Callable[[sqlite3.Connection], None],
        failed: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._db = db
        self._begun, self._failed, self._changed = begun, failed, changed
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._closed = False
        self.transactions = 0
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    async def write(self, run: Callable[[sqlite3.Connection], T], *, wakes: bool = False) -> T:
        """What ``run`` returned, once it is committed; or raises what it raised."""
        if self._closed:
            raise StoreUnavailable("the store is closed; open it again with open_store(url)")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put(_Operation(run, wakes, loop, future))
        return await future

    async def close(self) -> None:
        """Ends the thread when everything asked for is committed."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            if batch:
                self._commit(batch)
                self._answer(batch)
        self._db.close()

    def _take(self) -> list[_Operation] | None:
        """What is queued now (at least one); an empty queue's end gives None."""
        first = self._queue.get()
        if first is None:
            return None
        batch = [first]
        while len(batch) < MAX_BATCH:
            try:
                operation = self._queue.get_nowait()
            except queue.Empty:
                break
            if operation is None:
                self._queue.put(None)  # seen again when this batch is done
                break
            batch.append(operation)
        return batch

    def _commit(self, batch: list[_Operation]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._begun(self._db)
            for operation in batch:
                self._perform(operation)
            self._db.execute("COMMIT")
            self.transactions += 1
        except sqlite3.Error as error:  # full disk, lock held too long: nothing of it stands
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            self._failed()
            for operation in batch:
                operation.error = StoreUnavailable(f"the store file cannot be written: {error}")

    def _perform(self, operation: _Operation) -> None:
        self._db.execute("SAVEPOINT operation")
        try:
            operation.value = operation.run(self._db)
        except Exception as error:  # recording border: raised where it was asked for
            operation.error = _named(error)
            self._db.execute("ROLLBACK TO operation")
        self._db.execute("RELEASE operation")

    def _answer(self, batch: list[_Operation]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
        for operation in batch:
            by_loop.setdefault(operation.loop, []).append(operation)
        wakes = any(operation.wakes and operation.error is None for operation in batch)
        for loop, operations in by_loop.items():
            with contextlib.suppress(RuntimeError):  # that loop was closed: nobody waits there
                loop.call_soon_threadsafe(_settle, operations)
        if wakes:
            self._changed()


def _named(error: Exception) -> Exception:
    if isinstance(error, sqlite3.IntegrityError):
        return Conflict(f"another record has that id: {error}")
    if isinstance(error, sqlite3.Error):
        return StoreUnavailable(f"the store file cannot be written: {error}")
    return error


def _settle(operations: list[_Operation]) -> None:
    for operation in operations:
        operation.settle()
