"""Where rollouts, calls and rewards live: one protocol, several implementations."""

from __future__ import annotations

from agentlightning.errors import ConfigError
from agentlightning.store.http import HttpStore
from agentlightning.store.protocol import Store, Transition
from agentlightning.store.sqlite import SqliteStore

__all__ = ["HttpStore", "SqliteStore", "Store", "Transition", "open_store"]

_SQLITE = "sqlite:///"


async def open_store(url: str, *, key: str = "") -> Store:
    """The store at ``url``: ``sqlite:///relative.db``, ``sqlite:////absolute.db``, or the
    ``http(s)://…`` address of a gateway, whose admin key is ``key``.

    Raises ConfigError for another address, StoreVersionError for a file of a newer package.
    """
    if url.startswith(_SQLITE) and len(url) > len(_SQLITE):
        return SqliteStore(url[len(_SQLITE) :])
    if url.startswith(("http://", "https://")):
        return HttpStore(url, key)
    raise ConfigError(
        f"store {url!r} is not an address of a store; "
        "use sqlite:///relative.db, sqlite:////absolute.db or http://host:port"
    )
