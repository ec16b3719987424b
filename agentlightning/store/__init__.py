"""Where rollouts, calls and rewards live: one protocol, several implementations."""

from agentlightning.store.protocol import Store, Transition
from agentlightning.store.sqlite import SqliteStore

__all__ = ["SqliteStore", "Store", "Transition"]
