"""Waiting for what real processes do."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from agentlightning.store import Store
from agentlightning.types import Rollout


async def appears(path: Path, lines: int = 1) -> str:
    """What an agent wrote to a file, once it holds that many lines."""

    def look() -> str:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            text = path.read_text() if path.exists() else ""
            if text.count("\n") >= lines:
                return text
            time.sleep(0.005)
        raise TimeoutError(f"{path} never had {lines} lines")

    return await asyncio.to_thread(look)


async def finished(store: Store, *rollout_ids: str) -> list[Rollout]:
    """The rollouts, once each has ended."""
    left, after = set(rollout_ids), 0
    while left:
        page = await store.terminal(after=after, wait=30)
        if not page.items:
            raise TimeoutError(f"still not ended: {left}")
        left -= {item.rollout_id for item in page.items}
        after = page.next_after
    return [await store.get_rollout(each) for each in rollout_ids]
