from pathlib import Path

import pytest

from agentlightning.errors import TrainerError
from agentlightning.trainer.checkpoint import (
    Progress,
    latest_checkpoint,
    load_progress,
    save_checkpoint,
)
from tests.fakes.policy import RecordingPolicy


class FailingPolicy(RecordingPolicy):
    def save(self, directory: Path) -> None:
        raise OSError(f"no space left in {directory}")


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    policy = RecordingPolicy()
    policy.trained = [["r1"], ["r2"]]
    progress = Progress(step=4, policy_version=3, next_group=24, consumed={"r1": 1, "r2": 2})
    checkpoint = save_checkpoint(tmp_path, policy, progress, keep=2)
    restored = RecordingPolicy()
    restored.load(checkpoint / "training")
    assert load_progress(checkpoint) == progress
    assert restored.trained == policy.trained
    assert (checkpoint / "weights.json").exists()


def test_only_the_newest_are_kept_and_ten_is_newer_than_nine(tmp_path: Path) -> None:
    for step in (8, 9, 10):
        save_checkpoint(tmp_path, RecordingPolicy(), Progress(step=step), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9"]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_a_checkpoint_that_fails_half_way_is_none(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, RecordingPolicy(), Progress(step=1), keep=2)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(tmp_path, FailingPolicy(), Progress(step=2), keep=2)
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def test_an_unreadable_one_says_what_to_do(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, RecordingPolicy(), Progress(step=1), keep=2)
    (checkpoint / "training" / "progress.json").write_text("{")
    with pytest.raises(TrainerError, match=r"Remove .*checkpoint-1"):
        load_progress(checkpoint)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
