"""Whether the tokens of an answer may be trained on, and if not, why. Pure.

A sampled token is trainable only with the id and the logprob that the model server reported
for it. What does not add up is kept without being trained; nothing is filled in.
"""

from __future__ import annotations

import math

from agentlightning.gateway.wire.answer import Answer, Choice
from agentlightning.types import Completion, Floats, Tokens, VersionSpan, float_array, token_array


def completions(answer: Answer, version: int) -> tuple[Completion, ...]:
    """What was sampled, in order of the choices. Ids or logprobs that are no such thing are
    left out; ``version`` holds where the server names no versions itself."""
    return tuple(_completion(answer.choices[index], version) for index in sorted(answer.choices))


def prompt(answer: Answer) -> Tokens:
    """The prompt's ids, empty where they are not known."""
    return _ids(answer.prompt_ids or []) or token_array()


def untrainable_reason(answer: Answer) -> str | None:
    """Why an answer that arrived whole must not be trained on; None if it may be.

    Example:
        >>> from agentlightning.gateway.wire.answer import Answer
        >>> untrainable_reason(Answer(prompt_ids=[1], completion_tokens=2))
        'ids_missing'
    """
    choices = list(answer.choices.values())
    if answer.malformed:
        return "malformed_answer"
    if not choices or not all(choice.ids_seen for choice in choices):
        return "ids_missing" if answer.completion_tokens != 0 else None
    if not answer.prompt_ids:
        return "prompt_ids_missing"
    if answer.prompts_differ:
        return "several_prompts"
    if answer.completion_tokens is None:
        return "usage_missing"
    if answer.completion_tokens != sum(len(choice.token_ids) for choice in choices):
        return "ids_usage_mismatch"
    if _ids(answer.prompt_ids) is None:
        return "ids_invalid"
    return next(filter(None, map(_choice_reason, choices)), None)


def _choice_reason(choice: Choice) -> str | None:
    if choice.finish_reason == "abort":
        return "aborted"
    if choice.finish_reason is None:
        return "finish_reason_missing"
    if _ids(choice.token_ids) is None:
        return "ids_invalid"
    if choice.spans and not _cover(choice.spans, len(choice.token_ids)):
        return "version_spans_invalid"
    if not choice.token_ids:
        return None
    if not choice.logprobs:
        return "logprobs_missing"
    if len(choice.logprobs) != len(choice.token_ids):
        return "length_mismatch"
    return "logprob_not_finite" if _finite(choice.logprobs) is None else None


def _completion(choice: Choice, version: int) -> Completion:
    ids = _ids(choice.token_ids) or token_array()
    matching = choice.logprobs_seen and len(choice.logprobs) == len(ids)
    spans = tuple(choice.spans)
    if not _cover(choice.spans, len(ids)):
        spans = (VersionSpan(version, 0, len(ids)),) if ids and not choice.spans else ()
    return Completion(
        ids, _finite(choice.logprobs) if matching else None, choice.finish_reason, spans
    )


def _ids(values: list[int]) -> Tokens | None:
    try:
        return token_array(values)
    except (TypeError, OverflowError):
        return None


def _finite(values: list[float]) -> Floats | None:
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
