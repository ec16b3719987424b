"""The Runner protocol: what starts, watches and ends agents. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentlightning.types import Outcome, Rollout


@dataclass(frozen=True, slots=True)
class Job:
    """One agent as the runner sees it. ``outcome`` is None while it runs.

    Example:
        >>> Job("r1", "a1", started_at=0.0).outcome is None
        True
    """

    rollout_id: str
    attempt_id: str
    started_at: float
    outcome: Outcome | None = None
    workspace: Path | None = None


class Runner(Protocol):
    """Launches agents for one controller."""

    async def list(self) -> list[Job]:
        """Every agent that was launched and not yet removed."""

    async def launch(self, rollout: Rollout) -> Job:
        """Starts the current attempt; LaunchError where the spec can never start. Starting an
        attempt a second time starts nothing and returns the job."""

    async def kill(self, job: Job, *, grace_seconds: float) -> None:
        """TERM to the whole process group, KILL after the grace time. Returns at once."""

    async def remove(self, job: Job) -> None:
        """Forgets an ended agent and what it may not leave behind."""

    async def output_tail(self, job: Job, *, lines: int = 20) -> str:
        """The last lines of the agent's standard error."""

    async def wait_for_change(self, timeout: float) -> None:
        """Returns when an agent ended, or after ``timeout`` seconds."""

    async def close(self) -> None:
        """Ends every agent and returns when none is left."""
