"""Commits what many coroutines asked for in one transaction, with one sync.

Operations run in the event loop, each some hundred microseconds; what may wait, for another
process's lock or for the disk, runs in a thread. Running the operations there too would have
the thread and the loop hand the interpreter's lock to each other at every statement.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    """Runs operations in the order they were asked for, all from one event loop.

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
        self._asked: deque[_Operation] = deque()
        self._work: asyncio.Task[None] | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self.transactions = 0

    async def write(self, run: Callable[[sqlite3.Connection], T], *, wakes: bool = False) -> T:
        """What ``run`` returned, once it is committed; or raises what it raised."""
        if self._closed:
            raise StoreUnavailable("the store is closed; open it again with open_store(url)")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._asked.append(_Operation(run, wakes, future))
        if self._work is None or self._work.done():
            self._work = loop.create_task(self._commit_all())
        return await future

    async def close(self) -> None:
        """Returns when everything asked for is committed."""
        self._closed = True
        if self._work is not None:
            await asyncio.wait([self._work])
        self._thread.shutdown()
        self._db.close()

    async def _commit_all(self) -> None:
        while self._asked:
            batch: list[_Operation] = []
            try:
                if not self._db.in_transaction:
                    await self._in_thread(self._begin)
                self._begun(self._db)
                while self._asked and len(batch) < MAX_BATCH:
                    batch.append(self._asked.popleft())
                    self._perform(batch[-1])
                await self._in_thread(self._commit)
                self.transactions += 1
            except sqlite3.Error as error:  # full disk, lock held too long: nothing of it stands
                self._lose(batch or [self._asked.popleft()], error)
            for operation in batch:
                operation.settle()
            if any(operation.wakes and operation.error is None for operation in batch):
                self._changed()

    async def _in_thread(self, step: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, step)

    def _begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        """Commits; begins the next transaction at once where more was asked for meanwhile."""
        self._db.execute("COMMIT")
        if self._asked:
            with contextlib.suppress(sqlite3.Error):  # then it is begun, and may fail, in turn
                self._begin()

    def _perform(self, operation: _Operation) -> None:
        self._db.execute("SAVEPOINT operation")
        try:
            operation.value = operation.run(self._db)
        except Exception as error:  # recording border: raised where it was asked for
            operation.error = _named(error)
            self._db.execute("ROLLBACK TO operation")
        self._db.execute("RELEASE operation")

    def _lose(self, batch: list[_Operation], error: sqlite3.Error) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("ROLLBACK")
        self._failed()
        for operation in batch:
            operation.error = StoreUnavailable(f"the store file cannot be written: {error}")
            operation.settle()


def _named(error: Exception) -> Exception:
    if isinstance(error, sqlite3.IntegrityError):
        return Conflict(f"another record has that id: {error}")
    if isinstance(error, sqlite3.Error):
        return StoreUnavailable(f"the store file cannot be written: {error}")
    return error
