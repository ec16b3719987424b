"""Calls of a rollout → training samples. Pure; the tokenizer is never asked.

A completion's *history* is its call's ``prompt_ids`` followed by its own ``token_ids``. The
parent of a call is the completion whose history is the longest exact prefix of the call's
prompt; completions whose call has none are roots. Only content decides: calls may come in any
order, and interleaved sub-agents separate by themselves.

A sample is the history of a leaf. Its loss mask covers the completions on the way from the
root that no other sample trains, so each trainable sampled token is trained exactly once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentlightning.prefix import PrefixIndex, sequence_digest
from agentlightning.types import (
    Call,
    Completion,
    Floats,
    Mask,
    Rollout,
    Sample,
    Tokens,
    float_array,
    mask_array,
    token_array,
)

UNKNOWN_VERSION = -1


@dataclass(frozen=True, slots=True)
class SampleSet:
    """The samples of one rollout, and what became of its calls.

    ``counts`` holds only what occurred:

    * ``calls``: calls of the rollout's current attempt.
    * ``calls/other_attempt``: calls of earlier attempts; left out.
    * ``completions/empty``: answers without a token; nothing to train, no history of their own.
    * ``untrainable/<reason>``: calls that are context at most. Reasons of our own beside those
      in the record: ``logprobs`` (missing, of another length or not finite) and ``no_prompt``.
    * ``roots``: different prompts that continue no recorded completion.
    * ``root/retokenised``: roots that repeat a call's whole prompt and then hold other tokens
      than its answer. That the text is the same cannot be known from ids alone: an answer that
      the harness rewrote, or dropped reasoning from, looks alike and is counted here too.
    * ``root/history_edited``: roots that leave another root's history within context, after
      sharing at least half of the shorter prompt. A second conversation with the same long
      system prompt looks alike.
    * ``root/independent``: roots that share less than that with all others. Of several roots
      that nothing explains, one is the beginning and has no cause.
    * ``branches``: leaves beyond one a root: histories that were continued in several ways,
      and siblings of one prompt.
    * ``branch/retokenised``: as ``root/retokenised``, further down the history.
    * ``orphans``: trainable completions that nothing continues while another completion of
      the same prompt was continued: perhaps a retry's. They are trained.
    * ``cut/completions``, ``cut/tokens``: trainable ones left out, since the history up to
      their end is longer than ``max_sample_tokens``.

    Example:
        >>> SampleSet((), {"calls": 1, "untrainable/aborted": 1}).trained_tokens
        0
    """

    samples: tuple[Sample, ...]
    counts: Mapping[str, int]

    @property
    def trained_tokens(self) -> int:
        return sum(sample.trained_tokens for sample in self.samples)


@dataclass(eq=False, slots=True)
class _Node:
    """A non-empty completion in the forest; its tokens are ``[start, end)`` of its history."""

    call: Call
    completion: Completion
    trainable: bool
    parent: _Node | None = None
    continued: bool = False

    @property
    def start(self) -> int:
        return len(self.call.prompt_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.completion.token_ids)

    @property
    def history(self) -> Tokens:
        return self.call.prompt_ids + self.completion.token_ids

    def path(self) -> Iterator[_Node]:
        """This node and its ancestors, leaf first."""
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent


def build_samples(
    rollout: Rollout, calls: Sequence[Call], *, max_sample_tokens: int | None = None
) -> SampleSet:
    """The samples of ``rollout``'s current attempt.

    A completion whose history is longer than ``max_sample_tokens`` is cut off, with all that
    continues it: a sample ends at the end of a turn. A sampled token's policy version comes
    from the completion's spans, else from the call's ``version_start``, else it is -1.

    Raises ValueError where a call belongs to another rollout.
    """
    counts: Counter[str] = Counter()
    nodes = _forest(_current_calls(rollout, calls, counts), counts)
    _count_shape(nodes, counts)
    kept = []
    for node in nodes:
        if node.trainable and max_sample_tokens is not None and node.end > max_sample_tokens:
            counts["cut/completions"] += 1
            counts["cut/tokens"] += node.end - node.start
        elif node.trainable:
            kept.append(node)
    return SampleSet(tuple(_cover(rollout, kept)), dict(counts))


def _current_calls(rollout: Rollout, calls: Sequence[Call], counts: Counter[str]) -> Iterator[Call]:
    for call in calls:
        if call.rollout_id != rollout.rollout_id:
            raise ValueError(
                f"call {call.call_id} belongs to rollout {call.rollout_id}, "
                f"not to {rollout.rollout_id}: pass the calls of one rollout."
            )
        if call.attempt_id == rollout.attempt_id:
            counts["calls"] += 1
            yield call
        else:
            counts["calls/other_attempt"] += 1


def _forest(calls: Iterator[Call], counts: Counter[str]) -> list[_Node]:
    nodes: list[_Node] = []
    for call in calls:
        reason = _untrainable_reason(call)
        if reason is not None:
            counts[f"untrainable/{reason}"] += 1
        for completion in call.completions:
            if completion.token_ids:
                nodes.append(_Node(call, completion, trainable=reason is None))
            else:
                counts["completions/empty"] += 1
    nodes.sort(key=_content_key)
    index = PrefixIndex[_Node]()
    for node in nodes:
        index.add(node.history, node)
    for node in nodes:
        found = index.longest(node.call.prompt_ids)
        if found is not None:
            node.parent = found[0]
            node.parent.continued = True
    return nodes


def _untrainable_reason(call: Call) -> str | None:
    if not call.trainable or call.status != "ok":
        return call.reason or call.status
    if not call.prompt_ids:
        return "no_prompt"
    for completion in call.completions:
        logprobs = completion.logprobs
        if completion.token_ids and (
            logprobs is None
            or len(logprobs) != len(completion.token_ids)
            or not all(map(math.isfinite, logprobs))
        ):
            return "logprobs"
    return None


def _content_key(node: _Node) -> tuple[object, ...]:
    """Orders nodes by content; of equal histories the trainable ones are the parents."""
    spans = tuple((span.start, span.end, span.version) for span in node.completion.spans)
    logprobs = node.completion.logprobs
    version = node.call.version_start
    return (
        node.end,
        sequence_digest(node.history),
        node.start,
        not node.trainable,
        b"" if logprobs is None else logprobs.tobytes(),
        spans,
        UNKNOWN_VERSION if version is None else version,
    )


def _cover(rollout: Rollout, trainable: Sequence[_Node]) -> Iterator[Sample]:
    """One sample for each trainable node that no trainable node descends from."""
    inner = {id(ancestor) for node in trainable for ancestor in node.path() if ancestor is not node}
    fitting = {id(node) for node in trainable}
    for leaf in trainable:
        if id(leaf) not in inner:
            mine = [node for node in leaf.path() if id(node) in fitting]
            fitting.difference_update(map(id, mine))
            yield _sample(rollout, leaf, mine)


def _sample(rollout: Rollout, leaf: _Node, trained: Sequence[_Node]) -> Sample:
    length = leaf.end
    mask: Mask = mask_array([0]) * length
    logprobs: Floats = float_array([0.0]) * length
    versions: Tokens = token_array([UNKNOWN_VERSION]) * length
    for node in trained:
        assert node.completion.logprobs is not None  # _untrainable_reason saw to it
        mask[node.start : node.end] = mask_array([1]) * (node.end - node.start)
        logprobs[node.start : node.end] = node.completion.logprobs
        versions[node.start : node.end] = _versions(node)
    return Sample(
        rollout.rollout_id,
        rollout.group_id,
        rollout.reward,
        leaf.history,
        mask,
        logprobs,
        versions,
    )


def _versions(node: _Node) -> Tokens:
    start = node.call.version_start
    unknown = UNKNOWN_VERSION if start is None else start
    versions = token_array([unknown]) * len(node.completion.token_ids)
    for span in node.completion.spans:
        versions[span.start : span.end] = token_array([span.version]) * (span.end - span.start)
    return versions


def _count_shape(nodes: Sequence[_Node], counts: Counter[str]) -> None:
    leaves = sum(not node.continued for node in nodes)
    prompts: dict[bytes, _Node] = {}
    continued_prompts = set()
    for node in nodes:
        digest = sequence_digest(node.call.prompt_ids)
        prompts.setdefault(digest, node)
        if node.continued:
            continued_prompts.add(digest)
    roots = [node for node in prompts.values() if node.parent is None]
    counts["roots"] += len(roots)
    counts["branches"] += leaves - len(roots)
    counts["orphans"] += sum(
        node.trainable
        and not node.continued
        and sequence_digest(node.call.prompt_ids) in continued_prompts
        for node in nodes
    )
    _count_causes(list(prompts.values()), nodes, counts)
    for name in [name for name, count in counts.items() if not count]:
        del counts[name]


def _count_causes(prompts: Sequence[_Node], nodes: Sequence[_Node], counts: Counter[str]) -> None:
    """Why a prompt continues its parent beside an answer that is there, or nothing at all.

    ``prompts`` holds one node for each different prompt.
    """
    children: dict[_Node | None, list[_Node]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node)
    unexplained = []
    for node in prompts:
        siblings = children[node.parent]
        if any(_replaces_answer(node, other) for other in siblings):
            counts["branch/retokenised" if node.parent else "root/retokenised"] += 1
        elif node.parent is None:
            unexplained.append(node)
    for position, root in enumerate(unexplained):
        earlier = unexplained[:position]
        if earlier:
            edited = any(_shares_half(root.call.prompt_ids, o.call.prompt_ids) for o in earlier)
            counts["root/history_edited" if edited else "root/independent"] += 1


def _replaces_answer(node: _Node, other: _Node) -> bool:
    """The prompt repeats the other's prompt and goes on, but not with the other's answer."""
    prompt = node.call.prompt_ids
    return len(prompt) > other.start and prompt[: other.start] == other.call.prompt_ids


def _shares_half(first: Tokens, second: Tokens) -> bool:
    half = (min(len(first), len(second)) + 1) // 2
    return first[:half] == second[:half]
