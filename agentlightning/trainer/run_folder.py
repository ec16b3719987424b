"""What a run leaves behind, and where."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from agentlightning.config import Config
from agentlightning.errors import ConfigError


class RunFolder:
    """``runs/<name>/``: one process at a time writes it.

    Example:
        >>> RunFolder(Path("runs/calculator-1")).store_url
        'sqlite:///runs/calculator-1/store.db'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.agents = path / "agents"
        self.weights = path / "weights"
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.lost_metrics_file = path / "metrics.lost.jsonl"
        self.summary_file = path / "summary.json"
        self.plot_file = path / "reward.png"
        self._lock: IO[str] | None = None

    @property
    def store_url(self) -> str:
        return f"sqlite:///{self.path / 'store.db'}"

    def acquire(self) -> None:
        """Creates the folder and takes it; ConfigError where another process holds it."""
        try:
            for folder in (self.path, self.logs, self.agents, self.weights):
                folder.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "run.lock").open("a+")
        except OSError as error:
            raise ConfigError(
                f"run: {self.path} cannot be written: {error.strerror}. Give another run.root."
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise ConfigError(
                f"{self.path} is in use by process {holder}. Wait for it, end it, or give "
                "another run.name."
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def admin_key(self) -> str:
        """The run's admin key, made at its first use and readable by its owner only."""
        path = self.path / "admin.key"
        if not path.exists() or not path.read_text():
            write_atomically(path, secrets.token_urlsafe(32), mode=0o600)
        return path.read_text()

    def write_config(self, config: Config) -> None:
        tree = config.model_dump(mode="json")
        tree["gateway"]["key"] = None
        write_atomically(self.config_file, yaml.safe_dump(tree, sort_keys=False))

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The steps, without a last line that a kill cut off."""
        if not self.metrics_file.exists():
            return []
        *lines, _ = self.metrics_file.read_text().split("\n")
        return [json.loads(line) for line in lines]

    def drop_metrics_after(self, step: int) -> int:
        """Moves the lines of steps whose weights were lost to another file; returns how many."""
        lines = self.metrics()
        lost = [line for line in lines if line["step"] > step]
        with self.lost_metrics_file.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lost)
        kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= step]
        write_atomically(self.metrics_file, "".join(kept))
        return len(lost)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self.summary_file, json.dumps(summary, indent=2) + "\n")


def write_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    """A reader sees the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    partial.replace(path)


def new_run_folder(root: Path, name: str | None, stem: str) -> RunFolder:
    """``root/name``, or ``root/stem-N`` with the next free N; a named one must be new."""
    if name is not None:
        folder = root / name
        if (folder / "config.yaml").exists():
            raise ConfigError(f"{folder} exists. Give another run.name, or --resume to go on.")
        return RunFolder(folder)
    return RunFolder(root / f"{stem}-{max(_numbers(root, stem), default=0) + 1}")


def existing_run_folder(root: Path, name: str | None, stem: str) -> RunFolder:
    """The named run, or the newest of ``stem``."""
    numbers = _numbers(root, stem)
    if name is None and numbers:
        name = f"{stem}-{max(numbers)}"
    if name is None or not (root / name / "config.yaml").exists():
        raise ConfigError(f"there is no run {name or stem + '-N'} in {root} to resume.")
    return RunFolder(root / name)


def _numbers(root: Path, stem: str) -> list[int]:
    pattern = re.compile(re.escape(stem) + r"-(\d+)")
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return [int(match[1]) for match in map(pattern.fullmatch, names) if match]
