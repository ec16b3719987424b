"""What an operator gets wrong ends in one line, before anything is spent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentlightning.cli.display import Display
from agentlightning.cli.train import train
from agentlightning.config import load_config, read_tree
from agentlightning.errors import ConfigError
from agentlightning.trainer.run_folder import RunFolder
from agentlightning.trainer.tasks import load_tasks


def test_a_task_may_hold_a_line_separator_of_unicode(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    task = {"question": "a\u2028b\x85c"}
    path.write_text(json.dumps(task, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_tasks(path) == [task]


def test_a_run_folder_that_cannot_be_made_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/run-1 cannot be written: .*run\.root"):
        RunFolder(tmp_path / "file" / "run-1").acquire()


def test_a_config_that_is_no_text_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\x00\xff\xfe")
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        read_tree(path, [])


def test_a_run_is_not_resumed_to_less_than_it_has_done(tmp_path: Path) -> None:
    training = tmp_path / "runs" / "it" / "checkpoint-3" / "training"
    training.mkdir(parents=True)
    (training / "progress.json").write_text(json.dumps({"step": 3}))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"n": 1}))
    path = tmp_path / "it.yaml"
    settings = {
        "model": "none",
        "agent": {"python": "agent.py"},
        "evaluate": {"event": True},
        "tasks": {"train": str(tasks)},
        "trainer": {"updates": 2},
        "run": {"root": str(tmp_path / "runs"), "name": "it"},
    }
    path.write_text(json.dumps(settings))
    RunFolder(tmp_path / "runs" / "it").write_config(load_config(path))
    with pytest.raises(ConfigError, match=r"updates is 2, but .* 3 steps already"):
        train(path, [], resume=True, display=Display())
