"""The dataset: JSON Lines files, and the order in which training draws from them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.config import Config
from agentlightning.errors import ConfigError

Task = Mapping[str, Any]


def load_tasks(path: Path) -> list[Task]:
    """One JSON object a line, blank lines skipped; ConfigError names file and line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tasks: {path} cannot be read: {error}") from error
    tasks = [_parse(path, n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not tasks:
        raise ConfigError(f"tasks: {path} holds no task. Write one JSON object a line.")
    return tasks


def load_run_tasks(config: Config) -> tuple[list[Task], list[Task]]:
    """The tasks to train on and those to validate on, as the configuration says."""
    train = load_tasks(config.tasks.train)
    if config.tasks.val is None:
        return train, []
    held_out = load_tasks(config.tasks.val)
    if len(held_out) < config.validation.tasks:
        raise ConfigError(
            f"tasks: {config.tasks.val} holds {len(held_out)} tasks, validation.tasks asks for "
            f"{config.validation.tasks}."
        )
    return train, held_out[: config.validation.tasks]


def _parse(path: Path, number: int, line: str) -> Task:
    try:
        task = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ConfigError(f"tasks: {path}, line {number} is not JSON: {error}.") from error
    if not isinstance(task, dict):
        raise ConfigError(
            f"tasks: {path}, line {number} is a {type(task).__name__}; a task is a JSON object."
        )
    return task


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it has no number {name}")


class TaskOrder:
    """Which task the n-th draw takes: epoch after epoch, each in an order of its own.

    A position is all the state there is, so a checkpoint holds one integer.

    Example:
        >>> order = TaskOrder(["a", "b", "c"], seed=1, shuffle=True)
        >>> sorted(order[n] for n in range(3, 6))
        ['a', 'b', 'c']
    """

    def __init__(self, tasks: Sequence[Any], *, seed: int, shuffle: bool) -> None:
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, position: int) -> Any:
        epoch, offset = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._tasks[self._order[offset]]
