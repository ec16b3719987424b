"""What only a store file promises: durability, shared commits, several processes, versions."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.errors import ConfigError, StoreUnavailable, StoreVersionError
from agentlightning.prefix import PrefixIndex
from agentlightning.store import HttpStore, SqliteStore, open_store
from agentlightning.store.schema import MIGRATIONS, connect, migrate
from agentlightning.types import (
    Call,
    Completion,
    ParentRef,
    RawCall,
    Rollout,
    float_array,
    token_array,
)

RAW = RawCall(b'{"messages":[{"role":"user","content":"hi"}]}', b"{}")


def call(number: int, prompt: list[int], *answers: list[int]) -> Call:
    completions = tuple(
        Completion(token_array(one), float_array([-0.25] * len(one))) for one in answers
    )
    return Call(f"c{number}", "r1", "a1", token_array(prompt), completions)


Forest = list[tuple[int, list[int], list[list[int]]]]
small = st.lists(st.integers(0, 2), max_size=3)
forests = st.lists(
    st.tuples(st.integers(0, 8), small, st.lists(small, max_size=2)), min_size=1, max_size=8
)


def grown(forest: Forest) -> list[Call]:
    """Calls that continue a random earlier history, or begin anew."""
    histories: list[list[int]] = [[]]
    calls = []
    for number, (origin, new, answers) in enumerate(forest):
        prompt = histories[origin % len(histories)] + new
        calls.append(call(number, prompt, *answers))
        histories += [prompt + one for one in answers]
    return calls


@settings(max_examples=25, deadline=None)
@given(forests)
def test_any_forest_of_calls_comes_back_exactly(forest: Forest) -> None:
    async def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            one, two = SqliteStore(f"{folder}/s.db"), SqliteStore(f"{folder}/s.db")
            await one.add_rollouts([Rollout("r1", {})])
            index: PrefixIndex[ParentRef] = PrefixIndex()
            stored = []
            for number, wanted in enumerate(grown(forest)):
                await (one, two)[number % 2].add_call(wanted, RAW)
                found = index.longest(wanted.prompt_ids)
                parent = found[0] if found else None
                stored.append(replace(wanted, sequence=number, parent=parent))
                for position, answer in enumerate(wanted.completions):
                    if answer.token_ids:
                        history = wanted.prompt_ids + answer.token_ids
                        index.add(history, ParentRef(wanted.call_id, position))
            assert await one.calls("r1") == stored
            await one.close()
            await two.close()

    asyncio.run(check())


async def test_concurrent_calls_share_transactions(sqlite: SqliteStore) -> None:
    await sqlite.add_rollouts([Rollout("r1", {})])
    before = sqlite.transactions
    await asyncio.gather(*(sqlite.add_call(call(n, [n], [1]), RAW) for n in range(100)))
    assert 1 <= sqlite.transactions - before < 50
    assert {one.sequence for one in await sqlite.calls("r1")} == set(range(100))


async def test_one_failing_operation_leaves_its_neighbours(sqlite: SqliteStore) -> None:
    await sqlite.add_rollouts([Rollout("r1", {})])
    asked = [sqlite.add_call(call(1, [1], [2]), RAW), sqlite.cancel("no"), sqlite.cancel("r1")]
    _, failed, cancelled = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(failed, Exception)
    assert await sqlite.calls("r1") == [call(1, [1], [2])]
    assert await sqlite.get_rollout("r1") == cancelled


async def test_two_stores_never_claim_the_same_rollout(tmp_path: Path) -> None:
    stores = [SqliteStore(tmp_path / "s.db") for _ in range(2)]
    await stores[0].add_rollouts([Rollout(f"r{n}", {}) for n in range(40)])
    claims = [stores[n % 2].claim(f"c{n}", limit=3, lease_seconds=60) for n in range(20)]
    taken = [one.rollout_id for some in await asyncio.gather(*claims) for one in some]
    assert sorted(taken) == sorted(f"r{n}" for n in range(40))
    for store in stores:
        await store.close()


async def test_waiting_sees_what_another_store_writes(tmp_path: Path) -> None:
    one, two = SqliteStore(tmp_path / "s.db"), SqliteStore(tmp_path / "s.db")
    waiting = asyncio.create_task(one.claim("c", limit=1, lease_seconds=60, wait=60))
    ended = asyncio.create_task(one.terminal(wait=60))
    await two.add_rollouts([Rollout("r1", {})])
    assert [r.rollout_id for r in await asyncio.wait_for(waiting, 20)] == ["r1"]
    await two.cancel("r1")
    assert (await asyncio.wait_for(ended, 20)).total_terminal == 1
    await one.close()
    await two.close()


async def test_a_repeated_claim_request_gives_the_same_rollouts(sqlite: SqliteStore) -> None:
    await sqlite.add_rollouts([Rollout(f"r{n}", {}) for n in range(3)])
    first = await sqlite.claim("c", limit=1, lease_seconds=60, request_id="q1")
    assert await sqlite.claim("c", limit=1, lease_seconds=60, request_id="q1") == first
    other = await sqlite.claim("c", limit=1, lease_seconds=60, request_id="q2")
    assert [one.rollout_id for one in other] == ["r1"]


WRITING = """
import asyncio, sys
from agentlightning.store import SqliteStore
from agentlightning.types import *

async def main():
    store = SqliteStore(sys.argv[1])
    await store.add_rollouts([Rollout("r1", {})])
    async def write(lane):
        for n in range(10**6):
            answer = Completion(token_array([n]), float_array([-1.0]))
            call = Call(f"{lane}-{n}", "r1", "a1", token_array([lane]), (answer,))
            await store.add_call(call, RawCall(b"{}", b"{}"))
            print(call.call_id, flush=True)
    await asyncio.gather(*(write(lane) for lane in range(8)))

asyncio.run(main())
"""


async def test_every_acknowledged_call_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    writing = subprocess.Popen(  # noqa: ASYNC220  (its answers are awaited on purpose)
        [sys.executable, "-c", WRITING, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writing.stdout is not None
    told = [writing.stdout.readline().strip() for _ in range(60)]
    writing.send_signal(signal.SIGKILL)
    told += [line.strip() for line in writing.stdout if line.endswith("\n")]
    writing.wait()
    writing.stdout.close()
    store = SqliteStore(path)
    assert set(told) <= {one.call_id for one in await store.calls("r1")}
    await store.close()


def test_a_file_of_a_newer_package_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "s.db")
    db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(StoreVersionError, match="newer package"):
        SqliteStore(tmp_path / "s.db")


def test_migrations_run_once_and_in_order(tmp_path: Path) -> None:
    db = connect(tmp_path / "s.db")
    steps = [*MIGRATIONS, lambda db: db.execute("ALTER TABLE rollouts ADD COLUMN note TEXT")]
    migrate(db)
    for _ in range(2):
        migrate(db, steps)
        assert db.execute("PRAGMA user_version").fetchone()[0] == len(steps)
    db.execute("SELECT note FROM rollouts")
    db.close()


def test_a_failed_migration_changes_nothing(tmp_path: Path) -> None:
    db = connect(tmp_path / "s.db")
    with pytest.raises(sqlite3.OperationalError):
        migrate(db, [*MIGRATIONS, lambda db: db.execute("nonsense")])
    assert db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    db.close()


async def test_equal_messages_are_kept_once_and_go_with_their_last_rollout(
    sqlite: SqliteStore, tmp_path: Path
) -> None:
    await sqlite.add_rollouts([Rollout("r1", {})])
    for number in range(5):
        await sqlite.add_call(call(number, [number], [1]), RAW)
    db = connect(tmp_path / "store.db")
    count = "SELECT count(*) FROM messages"
    assert db.execute(count).fetchone()[0] == 2  # the message and the rest of the body
    await sqlite.delete_rollout("r1")
    assert db.execute(count).fetchone()[0] == 0
    db.close()


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    await store.close()
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.cancel("r1")


async def test_open_store_by_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:///rel.db", f"sqlite:///{tmp_path}/abs.db"):
        await (await open_store(url)).close()
    assert (tmp_path / "rel.db").exists()
    assert (tmp_path / "abs.db").exists()
    assert isinstance(await open_store("http://127.0.0.1:1"), HttpStore)
    for url in ("postgres://x", "sqlite:///", "store.db"):
        with pytest.raises(ConfigError, match="sqlite:///"):
            await open_store(url)
