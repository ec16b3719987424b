"""The embedded model server: what vLLM is at scale, small enough to read."""

from agentlightning.trainer.serve.server import run

__all__ = ["run"]
