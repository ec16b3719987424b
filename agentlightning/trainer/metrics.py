"""The numbers of a step that a practitioner looks for."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from agentlightning.trainer.collect import Collected


def rollout_metrics(groups: Sequence[Sequence[Collected]], *, seconds: float) -> dict[str, Any]:
    """What the rollouts of a step did: ``seconds`` is how long the step waited for them."""
    items = [item for group in groups for item in group]
    calls = [call for item in items for call in item.calls]
    rewards = [item.rollout.reward for item in items if item.rollout.reward is not None]
    generated = sum(len(c.token_ids) for call in calls for c in call.completions)
    samples = sum(len(item.samples.samples) for item in items)
    counts: Counter[str] = Counter()
    for item in items:
        counts.update(item.samples.counts)
    return {
        "reward": statistics.fmean(rewards) if rewards else None,
        "reward_std": statistics.pstdev(rewards) if rewards else None,
        "rewarded": len(rewards),
        "outcomes": dict(
            Counter(item.rollout.outcome.kind for item in items if item.rollout.outcome)
        ),
        "attempts_beyond_first": sum(max(item.rollout.attempt - 1, 0) for item in items),
        "calls": len(calls),
        "samples_per_rollout": samples / len(items) if items else 0.0,
        "tokens_generated": generated,
        "tokens_per_second": generated / seconds if seconds else 0.0,
        "sample_building": dict(counts),
    }
