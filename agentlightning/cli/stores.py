"""Which store a command reads: a store, a run's folder, or a gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from agentlightning.errors import ConfigError, NotFound
from agentlightning.store import Store
from agentlightning.types import Rollout

T = TypeVar("T")

StoreOption = Annotated[
    str | None, typer.Option("--store", help="sqlite:///path/file.db, or the file's path.")
]
RunOption = Annotated[
    Path | None, typer.Option("--run", help="A run's folder. Default: the newest below runs/.")
]
GatewayOption = Annotated[
    str | None, typer.Option("--gateway", help="Address of a gateway: asks it instead of a file.")
]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="The gateway's admin key. Default: AGL_ADMIN_KEY.")
]

_PAGE = 1000
_SHOWN_CANDIDATES = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a store is. ``run`` is the run's folder where that is known.

    Example:
        >>> Place("sqlite:///runs/a-1/store.db", run=Path("runs/a-1")).url
        'sqlite:///runs/a-1/store.db'
    """

    url: str
    key: str = ""
    run: Path | None = None


def place(store: str | None, run: Path | None, gateway: str | None, key: str | None) -> Place:
    """The one place that the options name; ConfigError for two, or for none to be found."""
    given = [
        f"--{name}"
        for name, value in (("store", store), ("run", run), ("gateway", gateway))
        if value is not None
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} name different stores. Give one of them.")
    if gateway:
        return Place(gateway, key or os.environ.get("AGL_ADMIN_KEY", ""))
    if store:
        return _from_store(store)
    return _from_run(run or newest_run(Path("runs")))


def newest_run(root: Path) -> Path:
    """The run folder below ``root`` whose store was made last."""
    stores = sorted(root.glob("*/store.db"), key=lambda file: file.stat().st_mtime)
    if not stores:
        raise ConfigError(
            f"there is no run in {root.absolute()}. Give --run DIR, --store URL or --gateway URL."
        )
    return stores[-1].parent


def _from_store(store: str) -> Place:
    path = Path(store.removeprefix("sqlite:///"))
    if "://" in str(path):
        return Place(store)
    if not path.is_file():
        raise ConfigError(f"there is no store {path}. Give the path of a store.db.")
    return Place(f"sqlite:///{path}", run=path.absolute().parent)


def _from_run(run: Path) -> Place:
    if not (run / "store.db").is_file():
        raise ConfigError(f"{run} holds no store.db. Give --run the folder of a run.")
    return Place(f"sqlite:///{run / 'store.db'}", run=run)


@asynccontextmanager
async def opened(where: Place) -> AsyncIterator[Store]:
    from agentlightning.store import open_store

    store = await open_store(where.url, key=where.key)
    try:
        yield store
    finally:
        await store.close()


def with_store(where: Place, work: Callable[[Store], Awaitable[T]]) -> T:
    """Opens the store, does the work, closes the store."""

    async def run() -> T:
        async with opened(where) as store:
            return await work(store)

    return asyncio.run(run())


async def every_rollout(store: Store) -> AsyncIterator[Rollout]:
    """All rollouts in order of creation, read page by page."""
    after: str | None = None
    while page := await store.list_rollouts(after=after, limit=_PAGE):
        for rollout in page:
            yield rollout
        after = page[-1].rollout_id


async def find_rollout(store: Store, text: str) -> Rollout:
    """The rollout with that id, or the only one whose id begins so."""
    try:
        return await store.get_rollout(text)
    except NotFound:
        found = [each async for each in every_rollout(store) if each.rollout_id.startswith(text)]
    if not found:
        raise NotFound(f"there is no rollout {text!r}. `agl rollouts list` shows them.")
    if len(found) > 1:
        some = ", ".join(each.rollout_id for each in found[:_SHOWN_CANDIDATES])
        raise NotFound(f"{text!r} begins {len(found)} rollout ids ({some} …). Give more of it.")
    return found[0]
