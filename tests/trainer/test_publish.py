"""How weights reach the folder that a model server starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.store.sqlite import SqliteStore
from agentlightning.trainer.publish import Publisher
from tests.fakes.policy import RecordingPolicy


class BrokenExport(RecordingPolicy):
    """Fails when a part of the weights is written."""

    def export(self, directory: Path) -> None:
        super().export(directory)
        raise OSError("no space left on device")


async def test_a_part_of_an_export_is_never_a_version(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    store = SqliteStore(tmp_path / "store.db")
    nowhere = "http://127.0.0.1:9"
    publisher = Publisher(
        store=store,
        model="policy",
        gateway_url=nowhere,
        admin_key="k",
        server_url=nowhere,
        weights=weights,
    )
    with pytest.raises(OSError, match="no space"):
        await publisher.publish(BrokenExport(), 1)
    await store.close()
    assert [path.name for path in weights.iterdir()] == [".version-1.partial"]
    assert list(weights.glob("version-*")) == []
