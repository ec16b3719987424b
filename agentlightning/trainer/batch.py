"""Finished groups → the rows of one optimizer update, and rows → micro-batches. Pure Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentlightning.advantages import advantages
from agentlightning.config import LossConfig
from agentlightning.losses import token_weights
from agentlightning.samples import UNKNOWN_VERSION, SampleSet
from agentlightning.trainer.policy import TrainingRow
from agentlightning.types import INFRASTRUCTURE_OUTCOMES, Rollout, Sample

Member: TypeAlias = tuple[Rollout, SampleSet]
"""A finished rollout with its samples."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one update and what was left out, by reason.

    ``metrics`` names: ``rollouts`` (all that came), ``rollouts_trained`` (R of the loss),
    ``rollouts_dropped/<reason>``: ``infrastructure``, ``model_server_fault`` (the agent failed
    after its model server had) and ``no_reward`` (out of the baseline too), ``stale``,
    ``unknown_version`` and ``no_samples`` (their rewards stay in the baseline); ``groups``,
    ``groups_of_one`` and ``groups_without_signal`` (of those with a reward: all advantages 0);
    ``staleness_mean`` and ``staleness_max`` in policy versions, over the trained rollouts, each
    by its oldest token; ``samples``.
    """

    rows: tuple[TrainingRow, ...]
    metrics: Mapping[str, float]

    @property
    def has_signal(self) -> bool:
        return any(row.advantage for row in self.rows)

    @property
    def consumed(self) -> frozenset[str]:
        """The rollouts that the update uses up."""
        return frozenset(row.sample.rollout_id for row in self.rows)

    @property
    def trained_tokens(self) -> int:
        return sum(row.sample.trained_tokens for row in self.rows)

    @property
    def dropped(self) -> dict[str, int]:
        """Rollouts left out, by reason."""
        prefix = "rollouts_dropped/"
        found = {n.removeprefix(prefix): v for n, v in self.metrics.items() if n.startswith(prefix)}
        return {name: int(count) for name, count in found.items()}


def build_batch(
    groups: Sequence[Sequence[Member]], *, loss: LossConfig, version: int, max_staleness: int
) -> Batch:
    """Rows for one update of the policy whose version is ``version``."""
    counts: Counter[str] = Counter(rollouts=sum(map(len, groups)), groups=len(groups))
    rewards = [[_reward(member, counts) for member in group] for group in groups]
    estimates = advantages(rewards, estimator=loss.advantage)
    _count_groups(estimates, counts)
    kept: list[tuple[Sample, float]] = []
    ages: list[int] = []
    for group, estimate in zip(groups, estimates, strict=True):
        for (_, sample_set), advantage in zip(group, estimate, strict=True):
            if advantage is None:
                continue
            age = _staleness(sample_set, version)
            reason = _drop_reason(age, max_staleness)
            if reason is None and age is not None:
                ages.append(age)
                kept += [(sample, advantage) for sample in sample_set.samples]
            else:
                counts[f"rollouts_dropped/{reason}"] += 1
    return Batch(_rows(kept, loss, rollouts=len(ages)), _metrics(counts, ages, len(kept)))


def _reward(member: Member, counts: Counter[str]) -> float | None:
    """The reward that counts; None, counted, where there is none or it is not the agent's."""
    rollout, sample_set = member
    kind = rollout.outcome.kind if rollout.outcome is not None else None
    if kind in INFRASTRUCTURE_OUTCOMES:
        counts["rollouts_dropped/infrastructure"] += 1
        return None
    if kind in ("agent_error", "time_limit") and "untrainable/upstream_error" in sample_set.counts:
        counts["rollouts_dropped/model_server_fault"] += 1
        return None
    if rollout.reward is None or not math.isfinite(rollout.reward):
        counts["rollouts_dropped/no_reward"] += 1
        return None
    return rollout.reward


def _count_groups(estimates: Sequence[Sequence[float | None]], counts: Counter[str]) -> None:
    for estimate in estimates:
        known = [value for value in estimate if value is not None]
        counts["groups_of_one"] += len(known) == 1
        counts["groups_without_signal"] += bool(known) and not any(known)


def _staleness(sample_set: SampleSet, version: int) -> int | None:
    """Versions since the oldest trained token; None without one; -1 where it is not known."""
    sampled = {
        token_version
        for sample in sample_set.samples
        for token_version, trained in zip(sample.policy_versions, sample.loss_mask, strict=True)
        if trained
    }
    if not sampled:
        return None
    return -1 if UNKNOWN_VERSION in sampled else max(0, version - min(sampled))


def _drop_reason(age: int | None, max_staleness: int) -> str | None:
    if age is None:
        return "no_samples"
    if age < 0:
        return "unknown_version"
    return "stale" if age > max_staleness else None


def _rows(
    kept: Sequence[tuple[Sample, float]], loss: LossConfig, *, rollouts: int
) -> tuple[TrainingRow, ...]:
    weights = token_weights(
        [sample for sample, _ in kept],
        reduction=loss.reduction,
        rollouts=rollouts,
        constant_divisor=loss.constant_divisor,
    )
    return tuple(
        TrainingRow(sample, advantage, weight)
        for (sample, advantage), weight in zip(kept, weights, strict=True)
    )


def _metrics(counts: Counter[str], ages: Sequence[int], samples: int) -> dict[str, float]:
    metrics: dict[str, float] = {name: float(count) for name, count in counts.items()}
    metrics["rollouts_trained"] = float(len(ages))
    metrics["samples"] = float(samples)
    metrics["staleness_mean"] = sum(ages) / len(ages) if ages else 0.0
    metrics["staleness_max"] = float(max(ages, default=0))
    return metrics


def micro_batches(rows: Sequence[TrainingRow], *, max_tokens: int) -> list[list[TrainingRow]]:
    """Cuts rows so that rows × longest row ≤ ``max_tokens``: first fit, longest row first.

    A row longer than that is alone. The order depends on lengths only, then on the given one.
    """
    batches: list[list[TrainingRow]] = []
    for row in sorted(rows, key=lambda row: -len(row.sample.token_ids)):
        for batch in batches:
            # the first row of a batch is its longest
            if (len(batch) + 1) * len(batch[0].sample.token_ids) <= max_tokens:
                batch.append(row)
                break
        else:
            batches.append([row])
    return batches
