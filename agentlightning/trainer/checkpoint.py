"""A checkpoint is one atomic step: weights, optimizer, and where the run stood.

``checkpoint-12/`` is a transformers folder; ``checkpoint-12/training/`` holds what only the
trainer needs. It is written beside its place and renamed into it.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentlightning.errors import TrainerError
from agentlightning.trainer.policy import Policy


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands.

    ``step`` counts the loop's turns, ``policy_version`` the updates that were published,
    ``next_group`` the groups drawn. ``consumed`` maps each trained rollout to the step that
    consumed it.

    Example:
        >>> Progress().step
        0
    """

    step: int = 0
    policy_version: int = 0
    next_group: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    rollouts: int = 0
    training_seconds: float = 0.0
    consumed: dict[str, int] = field(default_factory=dict)


def save_checkpoint(root: Path, policy: Policy, progress: Progress, keep: int) -> Path:
    """Writes ``root/checkpoint-{step}`` and removes all but the ``keep`` newest."""
    target = root / f"checkpoint-{progress.step}"
    partial = root / f".checkpoint-{progress.step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    training = partial / "training"
    training.mkdir(parents=True)
    policy.export(partial)
    policy.save(training)
    (training / "progress.json").write_text(json.dumps(asdict(progress)))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    for old in _checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(root: Path) -> Path | None:
    found = _checkpoints(root)
    return found[-1] if found else None


def load_progress(checkpoint: Path) -> Progress:
    path = checkpoint / "training" / "progress.json"
    try:
        return Progress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise TrainerError(
            f"{path} cannot be read: {error}. Remove {checkpoint} to resume from an older one."
        ) from error


def _checkpoints(root: Path) -> list[Path]:
    matches = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in root.iterdir()]
    return [path for _, path in sorted((int(m[1]), path) for m, path in matches if m)]
