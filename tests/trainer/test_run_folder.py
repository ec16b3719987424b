import json
import multiprocessing
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from agentlightning.trainer.run_folder import RunFolder, existing_run_folder, new_run_folder


def made(folder: RunFolder) -> RunFolder:
    folder.acquire()
    folder.config_file.write_text("{}")
    folder.release()
    return folder


def test_runs_are_numbered_by_their_config(tmp_path: Path) -> None:
    assert made(new_run_folder(tmp_path, None, "demo")).path.name == "demo-1"
    assert made(new_run_folder(tmp_path, None, "demo")).path.name == "demo-2"
    assert made(new_run_folder(tmp_path, None, "other")).path.name == "other-1"
    assert existing_run_folder(tmp_path, None, "demo").path.name == "demo-2"


def test_a_named_run_is_new_or_resumed(tmp_path: Path) -> None:
    made(new_run_folder(tmp_path, "mine", "demo"))
    with pytest.raises(ConfigError, match="resume"):
        new_run_folder(tmp_path, "mine", "demo")
    assert existing_run_folder(tmp_path, "mine", "demo").path == tmp_path / "mine"


def test_what_is_not_there_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run demo-N"):
        existing_run_folder(tmp_path / "nowhere", None, "demo")


def test_one_process_holds_a_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.acquire()
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    other = context.Process(target=_try_to_acquire, args=(str(folder.path), answers))
    other.start()
    other.join(60)
    assert "in use by process" in answers.get()
    folder.release()
    made(RunFolder(folder.path))


def _try_to_acquire(path: str, answers: "multiprocessing.SimpleQueue[str]") -> None:
    try:
        RunFolder(Path(path)).acquire()
        answers.put("acquired")
    except ConfigError as error:
        answers.put(str(error))


def test_the_admin_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    key = folder.admin_key()
    assert len(key) >= 32
    assert folder.admin_key() == key
    assert (tmp_path / "admin.key").stat().st_mode & 0o077 == 0


def test_metrics_of_lost_steps_are_moved_not_forgotten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.append_metrics({"step": step})
    assert folder.drop_metrics_after(1) == 2
    folder.append_metrics({"step": 2, "again": True})
    assert folder.metrics() == [{"step": 1}, {"step": 2, "again": True}]
    lost = [json.loads(line) for line in folder.lost_metrics_file.read_text().splitlines()]
    assert lost == [{"step": 2}, {"step": 3}]


def test_a_line_that_a_kill_cut_off_is_no_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1})
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 2, "rew')
    assert folder.metrics() == [{"step": 1}]
    folder.drop_metrics_after(1)
    folder.append_metrics({"step": 2})
    assert folder.metrics() == [{"step": 1}, {"step": 2}]


def test_an_empty_key_file_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "admin.key").touch()
    assert len(RunFolder(tmp_path).admin_key()) >= 32
