"""Whether the tokens of an answer may be trained on, and if not, why. Pure.

A sampled token is trainable only with the id and the logprob that the model server reported
for it. What does not add up is kept without being trained; nothing is filled in.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from agentlightning.gateway.wire.answer import Answer, Choice
from agentlightning.types import Completion, Floats, Tokens, VersionSpan, float_array, token_array

_ENDS = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
_ROUNDING = 1e-3
"""A logprob may be this far above 0 by rounding, no further."""
_SIGN_BYTE = 3 if sys.byteorder == "little" else 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """The tokens of an answer, and why they must not be trained on (None if they may)."""

    prompt_ids: Tokens
    completions: tuple[Completion, ...]
    reason: str | None


def judge(answer: Answer, version: int) -> Judgement:
    """Ids or logprobs that are no such thing are left out. ``version`` holds for the tokens
    where the server names no versions itself.

    Example:
        >>> from agentlightning.gateway.wire.answer import Answer
        >>> judge(Answer(prompt_ids=[1], completion_tokens=2), version=0).reason
        'ids_missing'
    """
    prompt_ids = _ids(answer.prompt_ids or [])
    judged = [_judge_choice(answer.choices[i], version) for i in sorted(answer.choices)]
    reason = _answer_reason(answer)
    if reason is None and prompt_ids is None:
        reason = "ids_invalid"
    if reason is None:
        reason = next((reason for _, reason in judged if reason is not None), None)
    completions = tuple(completion for completion, _ in judged)
    return Judgement(prompt_ids or token_array(), completions, reason)


def _answer_reason(answer: Answer) -> str | None:
    choices = answer.choices.values()
    if answer.malformed:
        return "malformed_answer"
    seen = answer.completion_tokens == 0 or all(choice.ids_seen for choice in choices)
    if not choices or not seen:
        return "ids_missing"
    if not answer.prompt_ids:
        return "prompt_ids_missing"
    if answer.prompts_differ:
        return "several_prompts"
    if answer.completion_tokens is None:
        return "usage_missing"
    if answer.completion_tokens != sum(len(choice.token_ids) for choice in choices):
        return "ids_usage_mismatch"
    if answer.prompt_tokens not in (None, len(answer.prompt_ids)):
        return "prompt_usage_mismatch"
    return None


def _judge_choice(choice: Choice, version: int) -> tuple[Completion, str | None]:
    ids = _ids(choice.token_ids)
    length = 0 if ids is None else len(ids)
    logprobs = _finite(choice.logprobs) if len(choice.logprobs) == length else None
    spans = tuple(choice.spans) if _cover(choice.spans, length) else ()
    if not choice.spans and length:
        spans = (VersionSpan(version, 0, length),)
    kept = logprobs if choice.logprobs_seen else None
    completion = Completion(ids or token_array(), kept, choice.finish_reason, spans)
    if ids is None:
        return completion, "ids_invalid"
    return completion, _choice_reason(choice, logprobs)


def _choice_reason(choice: Choice, logprobs: Floats | None) -> str | None:
    if choice.finish_reason == "abort":
        return "aborted"
    if choice.finish_reason is None:
        return "finish_reason_missing"
    if choice.finish_reason not in _ENDS:
        return "finish_reason_unknown"
    if choice.spans and not _cover(choice.spans, len(choice.token_ids)):
        return "version_spans_invalid"
    if not choice.token_ids:
        return None
    if not choice.logprobs:
        return "logprobs_missing"
    if len(choice.logprobs) != len(choice.token_ids):
        return "length_mismatch"
    if logprobs is None:
        return "logprob_not_finite"
    return "logprob_positive" if max(choice.logprobs) > _ROUNDING else None


def _ids(values: list[Any]) -> Tokens | None:
    try:
        ids = token_array(values)
    except (TypeError, OverflowError):
        return None
    signs = ids.tobytes()[_SIGN_BYTE :: ids.itemsize]
    return ids if signs.isascii() else None  # a set sign bit is no ASCII


def _finite(values: list[Any]) -> Floats | None:
    """The values in single precision; None if one is missing, NaN or infinite there."""
    try:
        floats = float_array(values)
    except (TypeError, OverflowError):
        return None
    return floats if math.isfinite(sum(floats)) else None


def _cover(spans: list[VersionSpan], length: int) -> bool:
    """Whether the spans cover ``[0, length)`` in order, without gap or overlap."""
    position = 0
    for span in spans:
        if span.start != position or span.end < span.start:
            return False
        position = span.end
    return position == length
