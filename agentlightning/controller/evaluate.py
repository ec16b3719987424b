"""What an evaluator function gets, and what it may give back.

    def reward(rollout: FinishedRollout) -> float: ...

It runs in a process of its own after the last process of the agent is gone.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.controller.target import import_target
from agentlightning.errors import EvaluatorError
from agentlightning.types import Call, Json, Outcome, RawCall, Rollout


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """A rollout whose agent has ended.

    ``workspace`` is the folder that the agent worked in. ``stdout`` and ``stderr`` are what
    it printed, cut in the middle where longer than the launch spec's ``output_limit``.
    ``calls`` are its model calls in order. ``messages`` is the conversation of the last
    call that was answered, in the form of its dialect, the answer as its last message.

    Example:
        >>> rollout = FinishedRollout(Rollout("r1", {"answer": "4"}), Outcome("completed"),
        ...     workspace=None, messages=({"role": "assistant", "content": "4"},))
        >>> rollout.task["answer"] == rollout.answer
        True
    """

    rollout: Rollout
    outcome: Outcome
    workspace: Path | None
    stdout: str = ""
    stderr: str = ""
    calls: Sequence[Call] = ()
    messages: Sequence[Mapping[str, Json]] = ()

    @property
    def task(self) -> Json:
        return self.rollout.input

    @property
    def answer(self) -> str:
        """The text of the last message if that is the model's, else empty."""
        if not self.messages or self.messages[-1].get("role") != "assistant":
            return ""
        return _text(self.messages[-1].get("content"))


def checked_reward(value: object) -> tuple[float | None, dict[str, Json]]:
    """The reward and what was said beside it; EvaluatorError unless it is a finite number,
    None, or a mapping with such a ``value``.

    Example:
        >>> checked_reward({"value": 1, "reason": "equal"})
        (1.0, {'reason': 'equal'})
    """
    if isinstance(value, Mapping):
        if "value" not in value:
            raise EvaluatorError(f"the evaluator gave {dict(value)!r}, which has no 'value'")
        rest = {str(key): each for key, each in value.items() if key not in ("value", "source")}
        return checked_reward(value["value"])[0], rest
    if value is None:
        return None, {}
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EvaluatorError(
            f"the evaluator gave {value!r} ({type(value).__name__}); allowed are a finite number, "
            "None for no reward, and {'value': number, …}. Return one of these."
        )
    return float(value), {}


def conversation(call: Call, raw: RawCall) -> tuple[Mapping[str, Json], ...]:
    """Request and answer of a call as one list of messages."""
    request, response = json.loads(raw.request), json.loads(raw.response or b"{}")
    if call.dialect == "completions":
        prompt = {"role": "user", "content": request.get("prompt")}
        return prompt, {"role": "assistant", "content": response["choices"][0].get("text", "")}
    if call.dialect == "responses":
        given = request.get("input") or []
        given = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return (*given, *response.get("output", ()))
    if call.dialect == "messages":
        answer = {"role": "assistant", "content": response.get("content")}
    else:
        answer = {"role": "assistant", **response["choices"][0]["message"]}
    return (*request.get("messages", ()), answer)


def run_in_child(target: str, finished: str, result: str) -> None:
    """Calls ``target`` with the pickled rollout; writes what it gives to ``result``. Runs in
    the evaluator's process; both files lie outside the agent's workspace."""
    module, _, name = target.rpartition(":")
    function = getattr(import_target(module), name)
    rollout = pickle.loads(Path(finished).read_bytes())
    value = function(rollout)
    if inspect.isawaitable(value):
        value = importlib.import_module("asyncio").run(_await(value))
    Path(result).write_text(json.dumps(_answer(value)))


def _answer(value: object) -> dict[str, Json]:
    try:
        reward, rest = checked_reward(_plain(value))
        json.dumps(rest)
    except EvaluatorError as error:
        return {"error": str(error)}
    except (TypeError, ValueError) as error:
        return {"error": f"the evaluator gave {value!r}, which is not JSON: {error}"}
    return {"reward": reward, "data": rest}


def _plain(value: object) -> object:
    """A numpy or torch scalar as Python's number."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


async def _await(value: Any) -> object:
    return await value


def _text(content: Json) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part.get("text", "") for part in parts if isinstance(part, Mapping))
