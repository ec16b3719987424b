"""The store in one SQLite file, for any number of processes on one machine."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from agentlightning.errors import NotFound, StoreUnavailable
from agentlightning.store import events, rollouts
from agentlightning.store.bodies import read_body
from agentlightning.store.calls import CallWriter, read_calls
from agentlightning.store.changes import Changes
from agentlightning.store.protocol import Transition
from agentlightning.store.rows import dumps, server_of
from agentlightning.store.schema import connect, migrate
from agentlightning.store.writer import Writer
from agentlightning.types import (
    Attempt,
    Call,
    Event,
    Json,
    ModelServer,
    Outcome,
    RawCall,
    Rollout,
    RolloutState,
    TerminalPage,
)

T = TypeVar("T")

READERS = 2
LEASE_CHECK_SECONDS = 1.0
"""How often a waiting claim looks for leases that have ended: time alone wakes nobody."""


class SqliteStore:
    """See :class:`agentlightning.store.Store`. ``clock`` gives Unix seconds.

    Opening migrates the file; raises StoreVersionError for a newer one.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._clock = clock
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            db = _opened(self._path)
            self._changes = Changes(connect(self._path))
        except (OSError, sqlite3.Error) as error:
            raise StoreUnavailable(
                f"cannot open the store file {self._path}: {error}. "
                "Name a file in a folder that can be written."
            ) from error
        self._calls = CallWriter()
        self._data_version = -1
        self._writer = Writer(
            db, begun=self._begun, failed=self._calls.forget, changed=self._changes.notify
        )
        self._local = threading.local()
        self._reading: list[sqlite3.Connection] = []
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")

    @property
    def transactions(self) -> int:
        """Transactions committed so far."""
        return self._writer.transactions

    async def close(self) -> None:
        await self._writer.close()
        await asyncio.get_running_loop().run_in_executor(None, self._readers.shutdown)
        while self._reading:
            self._reading.pop().close()
        self._changes.close()

    # --- rollouts

    async def add_rollouts(self, rollouts_: Sequence[Rollout]) -> list[Rollout]:
        now = self._clock()
        return await self._writer.write(
            lambda db: [rollouts.add(db, one, now=now) for one in rollouts_], wakes=True
        )

    async def get_rollout(self, rollout_id: str) -> Rollout:
        return self._glance(lambda db: rollouts.get(db, rollout_id))

    async def list_rollouts(
        self,
        *,
        states: Sequence[RolloutState] = (),
        group_ids: Sequence[str] = (),
        after: str | None = None,
        limit: int = 1000,
    ) -> list[Rollout]:
        return await self._read(
            lambda db: rollouts.list_page(
                db, states=states, group_ids=group_ids, after=after, limit=limit
            )
        )

    async def transition(self, rollout_id: str, change: Transition) -> Rollout:
        now = self._clock()
        return await self._writer.write(
            lambda db: rollouts.transition(db, rollout_id, change, now=now), wakes=True
        )

    async def cancel(self, rollout_id: str) -> Rollout:
        now = self._clock()
        return await self._writer.write(
            lambda db: rollouts.cancel(db, rollout_id, now=now), wakes=True
        )

    async def delete_rollout(self, rollout_id: str) -> None:
        def delete(db: sqlite3.Connection) -> None:
            self._calls.forget()
            rollouts.delete(db, rollout_id)

        await self._writer.write(delete, wakes=True)

    async def terminal(self, *, after: int = 0, limit: int = 1000, wait: float = 0) -> TerminalPage:
        async def look() -> TerminalPage:
            return await self._read(lambda db: rollouts.terminal_page(db, after=after, limit=limit))

        return await self._held(look, lambda page: bool(page.items), wait=wait)

    # --- attempts and leases

    async def claim(
        self,
        owner: str,
        *,
        limit: int,
        lease_seconds: float,
        wait: float = 0,
        request_id: str | None = None,
    ) -> list[Rollout]:
        """A repeated ``request_id`` of the owner gets again what it took and still holds."""

        def take(db: sqlite3.Connection) -> list[Rollout]:
            now = self._clock()
            return rollouts.claim(
                db, owner, limit=limit, until=now + lease_seconds, now=now, request=request_id
            )

        async def look() -> list[Rollout]:
            return await self._writer.write(take)  # waking here would wake this very wait

        return await self._held(look, bool, wait=wait)

    async def renew(
        self, owner: str, rollout_ids: Sequence[str], *, lease_seconds: float
    ) -> list[Rollout]:
        until = self._clock() + lease_seconds if lease_seconds else rollouts.GIVEN_UP
        return await self._writer.write(
            lambda db: rollouts.renew(db, owner, rollout_ids, until=until)
        )

    async def retry(
        self,
        rollout_id: str,
        *,
        owner: str,
        attempt_id: str,
        outcome: Outcome,
        lease_seconds: float,
    ) -> Rollout:
        now = self._clock()
        change = Transition(owner=owner, attempt_id=attempt_id, outcome=outcome)
        return await self._writer.write(
            lambda db: rollouts.retry(db, rollout_id, change, until=now + lease_seconds, now=now)
        )

    async def open_attempt(self, rollout_id: str, attempt_id: str) -> Rollout:
        now = self._clock()
        return await self._writer.write(
            lambda db: rollouts.open_attempt(db, rollout_id, attempt_id, now=now)
        )

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        return await self._read(lambda db: rollouts.attempts(db, rollout_id))

    # --- calls and events

    async def add_call(self, call: Call, raw: RawCall) -> None:
        await self._writer.write(lambda db: self._calls.add(db, call, raw))

    async def mark_undelivered(self, call_id: str, reason: str) -> None:
        def mark(db: sqlite3.Connection) -> None:
            changed = db.execute(
                "UPDATE calls SET status = 'undelivered', trainable = 0, reason = ? "
                "WHERE call_id = ?",
                (reason, call_id),
            )
            if not changed.rowcount:
                raise NotFound(f"no call has the id {call_id!r}")

        await self._writer.write(mark)

    async def calls(self, rollout_id: str, *, attempt_id: str | None = None) -> list[Call]:
        return await self._read(
            lambda db: read_calls(db, rollouts.find(db, rollout_id)["seq"], attempt_id=attempt_id)
        )

    async def raw_call(self, call_id: str) -> RawCall:
        return await self._read(lambda db: read_body(db, call_id))

    async def add_event(self, event: Event, *, idempotency_key: str | None = None) -> Event:
        events.check_reward(event)
        now = self._clock()
        return await self._writer.write(
            lambda db: events.add(db, event, key=idempotency_key, now=now)
        )

    async def events(
        self, rollout_id: str, *, attempt_id: str | None = None, event_type: str | None = None
    ) -> list[Event]:
        return await self._read(
            lambda db: events.of_rollout(
                db, rollout_id, attempt_id=attempt_id, event_type=event_type
            )
        )

    # --- what the gateway must remember

    async def set_model_servers(
        self, servers: Sequence[ModelServer], *, owner: str | None = None
    ) -> None:
        def swap(db: sqlite3.Connection) -> None:
            if owner is None:
                db.execute("DELETE FROM model_servers")
            else:
                db.execute("DELETE FROM model_servers WHERE owner = ?", (owner,))
            own = [one if owner is None else replace(one, owner=owner) for one in servers]
            db.executemany(
                "INSERT INTO model_servers (model, endpoint, version, owner) VALUES (?, ?, ?, ?)",
                [(one.model, one.endpoint, one.version, one.owner) for one in own],
            )

        await self._writer.write(swap)

    async def model_servers(self) -> list[ModelServer]:
        query = "SELECT * FROM model_servers ORDER BY position"
        return self._glance(lambda db: [server_of(row) for row in db.execute(query)])

    async def set_setting(self, name: str, value: Json) -> None:
        text = dumps(value)
        await self._writer.write(
            lambda db: db.execute(
                "INSERT INTO settings VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (name, text),
            ).close()
        )

    async def setting(self, name: str) -> Json:
        def read(db: sqlite3.Connection) -> Json:
            row = db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
            return None if row is None else json.loads(row["value"])

        return await self._read(read)

    # --- how

    async def _read(self, look: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, self._look, look)
        except (sqlite3.Error, RuntimeError) as error:  # RuntimeError: the pool was shut down
            raise StoreUnavailable(f"the store file cannot be read: {error}") from error

    def _glance(self, look: Callable[[sqlite3.Connection], T]) -> T:
        """A look that takes microseconds, less than handing it to a thread. Readers wait for
        nobody in a file with a write-ahead log."""
        try:
            return self._look(look)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the store file cannot be read: {error}") from error

    def _look(self, look: Callable[[sqlite3.Connection], T]) -> T:
        """One snapshot of the file, on the connection of this thread."""
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            db = self._local.db = connect(self._path)
            self._reading.append(db)
        db.execute("BEGIN")
        try:
            return look(db)
        finally:
            db.execute("COMMIT")

    async def _held(
        self, look: Callable[[], Awaitable[T]], found: Callable[[T], bool], *, wait: float
    ) -> T:
        """What ``look`` sees once it is ``found``, or what it sees after ``wait`` seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + wait
        while True:
            mark = self._changes.mark()
            seen = await look()
            left = end - loop.time()
            if found(seen) or left <= 0:
                return seen
            await self._changes.wait(mark, seconds=min(left, LEASE_CHECK_SECONDS))

    def _begun(self, db: sqlite3.Connection) -> None:
        """Another process wrote: what the writer remembers may be out of date."""
        version = int(db.execute("PRAGMA data_version").fetchone()[0])
        if version != self._data_version:
            self._data_version = version
            self._calls.forget()


def _opened(path: Path) -> sqlite3.Connection:
    db = connect(path)
    try:
        migrate(db)
    except BaseException:
        db.close()
        raise
    return db
