"""What an operator gets wrong ends in one line, before anything is spent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentlightning.config import read_tree
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
