"""The Policy protocol: the thing that is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentlightning.types import Sample


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A sample with what its rollout's standing makes of it.

    The loss is ``sum over trained tokens of token_weight * token_loss``: with the weight in
    the row, no cut into micro-batches or ranks changes a gradient.
    """

    sample: Sample
    advantage: float
    token_weight: float


class Policy(Protocol):
    """A model with its optimizer."""

    @property
    def description(self) -> str:
        """One line for people: name, parameters, precision, device."""

    def update(self, rows: Sequence[TrainingRow]) -> Mapping[str, float]:
        """One optimizer update from all of ``rows``; returns metrics. Rows whose advantage
        is exactly 0 may be skipped where they have no gradient. NaN or infinite gradients
        raise TrainerError and change nothing."""

    def export(self, directory: Path) -> None:
        """Writes the weights as a folder that transformers and a model server load."""

    def save(self, directory: Path) -> None:
        """Writes all that ``load`` needs to go on as if nothing had happened."""

    def load(self, directory: Path) -> None: ...
