"""A policy without tensors: it remembers what it was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentlightning.trainer.policy import TrainingRow


class RecordingPolicy:
    """``trained`` holds the rollout ids of each update, in order; save and load keep it."""

    description = "a policy that remembers"

    def __init__(self) -> None:
        self.trained: list[list[str]] = []

    def update(self, rows: Sequence[TrainingRow]) -> Mapping[str, float]:
        self.trained.append(sorted({row.sample.rollout_id for row in rows}))
        return {"loss": 0.0}

    def export(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "weights.json").write_text(json.dumps(len(self.trained)))

    def save(self, directory: Path) -> None:
        (directory / "policy.json").write_text(json.dumps(self.trained))

    def load(self, directory: Path) -> None:
        self.trained = json.loads((directory / "policy.json").read_text())
