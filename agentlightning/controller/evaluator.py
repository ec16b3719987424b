"""Runs evaluators: after the agent, outside its reach, under a time limit."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from agentlightning.config import EvaluatorConfig
from agentlightning.controller import evaluate, launch
from agentlightning.controller.evaluate import FinishedRollout
from agentlightning.controller.launch import Folders
from agentlightning.controller.local import tail
from agentlightning.controller.runner import Job
from agentlightning.controller.spawn import ForkServers, ProcessSpec
from agentlightning.errors import EvaluatorError, LaunchError
from agentlightning.store.protocol import Store
from agentlightning.types import Event, Json, Outcome, Rollout

_NO_ANSWER = '{"error": "the evaluator ended without an answer"}'
_SECRETS = ("AGL_ADMIN_KEY",)


class Evaluator(Protocol):
    """Gives a finished rollout its reward."""

    async def evaluate(self, rollout: Rollout, job: Job, outcome: Outcome) -> None:
        """Posts the reward, if there is one; EvaluatorError if the evaluator is at fault."""


class LocalEvaluator:
    """Evaluators as processes of this machine, forked from one that has imported the
    function's module. A ``python`` evaluator is the operator's own code: it gets the
    controller's environment and working directory, without the admin key. A ``command`` runs
    in the workspace, among what the agent wrote, with an environment built from nothing."""

    def __init__(self, store: Store, root: Path, servers: ForkServers) -> None:
        self._store = store
        self._root = root
        self._servers = servers

    async def evaluate(self, rollout: Rollout, job: Job, outcome: Outcome) -> None:
        config = launch.local_launch(launch.parse(rollout)).evaluate
        if config is None or config.event:
            return
        where = launch.folders(self._root, rollout)
        finished = await self._finished(rollout, job, outcome, where)
        try:
            reward, data = await self._run(config, finished, where)
        except LaunchError as error:
            raise EvaluatorError(f"the evaluator cannot start: {error}") from error
        if reward is not None:
            await self._post(rollout, reward, data)

    async def _post(self, rollout: Rollout, reward: float, data: Mapping[str, Json]) -> None:
        attempt = rollout.attempt_id or ""
        key = f"evaluator:{attempt}"
        event = Event(
            event_id=key,
            rollout_id=rollout.rollout_id,
            attempt_id=attempt,
            event_type="reward",
            data={**data, "value": reward, "source": "evaluator"},
        )
        await self._store.add_event(event, idempotency_key=key)

    async def _finished(
        self, rollout: Rollout, job: Job, outcome: Outcome, where: Folders
    ) -> FinishedRollout:
        calls = await self._store.calls(rollout.rollout_id, attempt_id=rollout.attempt_id)
        answered = [call for call in calls if call.status == "ok"]
        messages: tuple[Mapping[str, Json], ...] = ()
        if answered:
            raw = await self._store.raw_call(answered[-1].call_id)
            messages = evaluate.conversation(answered[-1], raw)
        stdout, stderr = await asyncio.to_thread(lambda: (_read(where.stdout), _read(where.stderr)))
        return FinishedRollout(
            rollout=rollout,
            outcome=outcome,
            workspace=job.workspace,
            stdout=stdout,
            stderr=stderr,
            calls=calls,
            messages=messages,
        )

    async def _run(
        self, config: EvaluatorConfig, finished: FinishedRollout, where: Folders
    ) -> tuple[float | None, Mapping[str, Json]]:
        result = where.base / "evaluation.json"
        if config.python is not None:
            spec = _python(config.python, finished, where)
            await self._process(spec, config.time_limit)
            answer = json.loads(await asyncio.to_thread(_read, result) or _NO_ANSWER)
            if "error" in answer:
                raise EvaluatorError(answer["error"])
            return answer["reward"], answer["data"]
        spec = _command(config.command or [], finished, where)
        await self._process(spec, config.time_limit)
        return _printed_reward(await asyncio.to_thread(_read, _stdout(where))), {}

    async def _process(self, spec: ProcessSpec, time_limit: float) -> None:
        process = await self._servers.spawn(spec)
        waiting = asyncio.create_task(process.wait())
        try:
            end = await asyncio.wait_for(asyncio.shield(waiting), time_limit)
        except asyncio.TimeoutError as error:
            raise EvaluatorError(
                f"the evaluator did not end within its time limit of {time_limit:g} s"
            ) from error
        finally:
            process.kill(0.0)  # also where this task is cancelled; harmless after the end
        if end.code != 0:
            last = await asyncio.to_thread(tail, Path(spec.stderr), lines=1)
            why = end.launch_error or f"exit code {end.code}: {last}"
            raise EvaluatorError(f"the evaluator failed: {why}")


def _python(target: str, finished: FinishedRollout, where: Folders) -> ProcessSpec:
    module, _, function = target.rpartition(":")
    if not module:
        raise EvaluatorError(
            f"evaluate.python {target!r} is not module:function or path.py:function"
        )
    if module.endswith(".py"):
        module = str(Path(module).absolute())
    pickled, result = where.base / "finished.pickle", where.base / "evaluation.json"
    result.unlink(missing_ok=True)
    pickled.write_bytes(pickle.dumps(finished))
    return ProcessSpec(
        kind="evaluator",
        target=f"{module}:{function}",
        args=(str(pickled), str(result)),
        cwd=str(Path.cwd()),
        stdout=str(_stdout(where)),
        stderr=str(where.base / "evaluator-stderr.log"),
        env={name: value for name, value in os.environ.items() if name not in _SECRETS},
        preload=("agentlightning.controller.evaluate", module),
    )


def _command(command: list[str], finished: FinishedRollout, where: Folders) -> ProcessSpec:
    rollout = finished.rollout
    config = launch.parse(rollout)
    render = launch.Renderer(rollout.input, config.model)
    argv = [render.text(part, f"evaluate.command[{i}]") for i, part in enumerate(command)]
    if not argv:
        raise EvaluatorError("evaluate.command is empty. Give a program and its arguments.")
    record = where.base / "rollout.json"
    facts = {"rollout": asdict(rollout), "outcome": asdict(finished.outcome)}
    record.write_text(json.dumps(facts | {"messages": finished.messages}, default=dict))
    files = {"AGL_TASK_FILE": str(where.task), "AGL_ROLLOUT_FILE": str(record)}
    logs = {"AGL_STDOUT_FILE": str(where.stdout), "AGL_STDERR_FILE": str(where.stderr)}
    return ProcessSpec(
        kind="command",
        target=str(Path(argv[0]).absolute()) if "/" in argv[0] else argv[0],
        args=argv[1:],
        cwd=str(where.workspace),
        stdout=str(_stdout(where)),
        stderr=str(where.base / "evaluator-stderr.log"),
        env=launch.base_environment(where) | files | logs,
    )


def _printed_reward(output: str) -> float | None:
    line = (output.strip().splitlines() or [""])[-1].strip()
    try:
        value = float(line)
    except ValueError as error:
        raise EvaluatorError(
            f"the evaluator's last line of output is {line!r}; it must be a number"
        ) from error
    return evaluate.checked_reward(value)[0]


def _stdout(where: Folders) -> Path:
    return where.base / "evaluator-stdout.log"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
