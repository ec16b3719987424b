"""Waiting for what real processes do."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path


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
