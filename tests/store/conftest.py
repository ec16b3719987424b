from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import SqliteStore, Store


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def sqlite(tmp_path: Path, clock: Clock) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db", clock=clock)
    yield store
    await store.close()


@pytest.fixture(params=["sqlite"])
def store(request: Any) -> Store:
    found: Store = request.getfixturevalue(request.param)
    return found
