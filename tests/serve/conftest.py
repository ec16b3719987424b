from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.trainer.serve.engine import Engine, Step
from agentlightning.trainer.serve.engine import Sequence as EngineSequence
from agentlightning.trainer.serve.runner import ModelRunner
from agentlightning.trainer.serve.sampler import Sampling
from tests.fakes.tiny_model import save_tiny_model

WAIT = 20.0


@dataclass
class Answer:
    """A sequence and what the engine said of it."""

    sequence: EngineSequence
    queue: queue.SimpleQueue[Step]
    steps: list[Step] = field(default_factory=list)

    def take(self, count: int) -> None:
        """Waits for ``count`` more tokens."""
        self.steps += [self.queue.get(timeout=WAIT) for _ in range(count)]

    def wait(self) -> Answer:
        while not self.steps or self.steps[-1].finish is None:
            self.steps.append(self.queue.get(timeout=WAIT))
        return self

    @property
    def tokens(self) -> list[int]:
        return [s.drawn.token for s in self.steps if s.drawn]

    @property
    def logprobs(self) -> list[float]:
        return [s.drawn.logprob for s in self.steps if s.drawn]

    @property
    def versions(self) -> list[int]:
        return [s.version for s in self.steps if s.drawn]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=7)


@pytest.fixture(scope="session")
def reference(tiny_folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    return model.eval()


@pytest.fixture
def make_engine(tiny_folder: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(folder: Path = tiny_folder, *, cache: int = 2048, running: int = 8) -> Engine:
        runner = ModelRunner(
            folder, dtype=torch.float32, device=torch.device("cpu"), pool_rows=cache
        )
        engines.append(Engine(runner, cache_tokens=cache, max_running=running))
        engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def submit(
    engine: Engine,
    prompt: Sequence[int],
    *,
    sampling: Sampling = Sampling(temperature=0),  # noqa: B008 (frozen)
    seed: int = 0,
    max_tokens: int = 12,
) -> Answer:
    steps: queue.SimpleQueue[Step] = queue.SimpleQueue()
    sequence = EngineSequence(
        prompt=np.array(prompt, np.int32),
        sampling=sampling,
        rng=random.Random(seed),
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        on_step=steps.put,
    )
    engine.submit(sequence)
    return Answer(sequence, steps)


def random_prompt(length: int, seed: int) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(256) for i in range(length)]
