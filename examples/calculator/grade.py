"""The calculator agent's evaluator. It runs after the agent, outside its reach."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from math_verify import parse, verify

if TYPE_CHECKING:
    from agentlightning.controller.evaluate import FinishedRollout

VALID_CALL = 0.2


def final_answer(finished: FinishedRollout) -> dict[str, Any]:
    """1 for the right final answer, else 0.2 for a valid tool call, else 0.

    Graded from the recorded conversation alone: what the agent printed or wrote into its
    workspace could say anything. Only what the model itself said for this question counts, so
    that neither the worked example nor a made-up history earns anything.
    """
    said = _said_after(finished.messages, finished.task["question"])
    if said and _right(said[-1], finished.task["answer"]):
        return {"value": 1.0, "reason": "right answer"}
    if _called_tool(finished.messages, finished.task["question"]):
        return {"value": VALID_CALL, "reason": "valid tool call, no right answer"}
    return {"value": 0.0, "reason": "no valid tool call"}


def _tail(messages: Iterable[Mapping[str, Any]], question: str) -> list[Mapping[str, Any]]:
    """The messages after the last one that asks the question; none where nobody asked it."""
    kept = list(messages)
    asked = [i for i, each in enumerate(kept) if each.get("content") == question]
    return kept[asked[-1] + 1 :] if asked else []


def _said_after(messages: Iterable[Mapping[str, Any]], question: str) -> list[str]:
    tail = _tail(messages, question)
    return [str(each.get("content") or "") for each in tail if each.get("role") == "assistant"]


def _right(text: str, answer: str) -> bool:
    """Whether the text's first line is an answer, and the right one."""
    found = re.match(r"\s*ANSWER\s+(-?\d+)\s*$", text.strip().partition("\n")[0])
    return found is not None and bool(verify(parse(answer), parse(found[1])))


def _called_tool(messages: Iterable[Mapping[str, Any]], question: str) -> bool:
    """Whether a call of the model was followed by the tool's result."""
    tail = _tail(messages, question)
    return any(
        "CALL calc(" in str(call.get("content")) and str(result.get("content")).startswith("RESULT")
        for call, result in pairwise(tail)
        if call.get("role") == "assistant" and result.get("role") == "user"
    )
