"""One whole machine with a tiny model: real processes, HTTP, SDK, store and updates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[2]

AGENT = """
import sys
from openai import OpenAI

messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(2):
    answer = OpenAI().chat.completions.create(model=sys.argv[2], messages=messages, max_tokens=6)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content or "-"})
    messages.append({"role": "user", "content": "more"})
"""

GRADER = """
def spread(rollout):
    ids = [i for call in rollout.calls for c in call.completions for i in c.token_ids]
    return {"value": float(sum(ids) % 2), "tokens": len(ids)}
"""

CONFIG = {
    "model": "model",
    "agent": {
        "python": "agent.py",
        "args": ["{{ task.text }}", "{{ model }}"],
        "preload": ["openai"],
        "time_limit": 60,
    },
    "evaluate": "grade.py:spread",
    "tasks": {"train": "tasks.jsonl", "val": "tasks.jsonl"},
    "validation": {"tasks": 4},
    "controller": {"lease": 3},
    "serve": {"cache_tokens": 4096, "precision": "fp32"},
    "trainer": {
        "updates": 3,
        "groups_per_update": 2,
        "rollouts_per_group": 4,
        "precision": "fp32",
        "checkpoint_every": 1,
    },
    "run": {"name": "it"},
}


@dataclass
class Machine:
    """A folder with all that a run needs; ``run`` is the run's folder."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "it"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "agentlightning", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def agl(self, *arguments: str) -> str:
        """Runs a command to its end, which must be a good one; what it printed."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=150)
        assert process.returncode == 0, output
        return output

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def machine(tmp_path: Path, model_dir: Path) -> Iterator[Machine]:
    (tmp_path / "model").symlink_to(model_dir)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "grade.py").write_text(GRADER)
    tasks = [json.dumps({"text": f"task {n}"}) for n in range(8)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    (tmp_path / "it.yaml").write_text(json.dumps(CONFIG))
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield Machine(tmp_path)
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    for process in left:
        process.kill()


def service(trainer: int, name: str) -> psutil.Process:
    """The child of a training process that runs one of our services."""
    for child in psutil.Process(trainer).children():
        if name in child.cmdline():
            return child
    raise AssertionError(f"no {name} among {psutil.Process(trainer).children()}")


def until(condition: Callable[[], object], *, seconds: float = 240.0) -> None:
    """Waits for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.02)


def kill(process: psutil.Process | subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
