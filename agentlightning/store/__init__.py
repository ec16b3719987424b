"""Where rollouts, calls and rewards live: one protocol, several implementations."""

from agentlightning.store.protocol import Store

__all__ = ["Store"]
