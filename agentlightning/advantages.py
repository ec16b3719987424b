"""Rewards of a group → one advantage a rollout. Pure Python; a rollout counts once, however
many samples it fell into.

A reward of None (no reward, a failed grader) is out of the loss and out of the baseline. A
group whose rewards are all equal, a group of one among them, has advantages of exactly 0.0:
there is nothing to compare, and rounding must not make a signal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Literal, TypeAlias

Estimator: TypeAlias = Literal["grpo", "grpo-no-std", "rloo", "reinforce++-baseline"]
Rewards: TypeAlias = Sequence["float | None"]

STD_EPSILON = 1e-6
"""Added to each standard deviation. GRPO's paper has none; its implementations have 1e-4
to 1e-6."""


def advantages(groups: Sequence[Rewards], *, estimator: str) -> list[list[float | None]]:
    """One advantage for each reward, None for None; all groups of one optimizer update at once.

    * ``grpo``: (r - mean) / (std + 1e-6) over the group, with the sample standard deviation
      (n - 1). Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    * ``grpo-no-std``: r - mean over the group. Liu et al. 2025 ("Dr. GRPO"), arXiv:2503.20783.
    * ``rloo``: r minus the mean of the group's others. Ahmadian et al. 2024, arXiv:2402.14740.
    * ``reinforce++-baseline``: r - mean over the group, then centred and divided by the
      standard deviation over the whole update. Hu et al. 2025, arXiv:2501.03262. Departure:
      the statistics run over the rollouts of groups that have a spread, each once, not over
      tokens, so that neither lengths nor groups without a signal move them.

    Raises ValueError for an unknown estimator and for a reward that is NaN or infinite.

    Example:
        >>> advantages([[1.0, 1.0, 0.0, 0.0], [1.0, None]], estimator="grpo-no-std")
        [[0.5, 0.5, -0.5, -0.5], [0.0, None]]
    """
    if estimator not in _ESTIMATORS:
        raise ValueError(
            f"advantage estimator is {estimator!r}: choose one of {', '.join(_ESTIMATORS)}."
        )
    by_group, over_update = _ESTIMATORS[estimator]
    values = [_by_group(rewards, by_group) for rewards in groups]
    return over_update(values)


GroupValues: TypeAlias = "list[list[float | None]]"


def _by_group(
    rewards: Rewards, estimate: Callable[[Sequence[float]], list[float]]
) -> list[float | None]:
    known = [float(reward) for reward in rewards if reward is not None]
    if not all(map(math.isfinite, known)):
        raise ValueError(
            f"rewards are {list(rewards)}: each must be a finite number, or None for no reward."
        )
    spread = len(set(known)) > 1
    results = iter(estimate(known) if spread else [0.0] * len(known))
    return [None if reward is None else next(results) for reward in rewards]


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _standardised(rewards: Sequence[float]) -> list[float]:
    centred = _centred(rewards)
    scale = _sample_std(centred) + STD_EPSILON
    return [value / scale for value in centred]


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    others = len(rewards) - 1
    return [value * (others + 1) / others for value in _centred(rewards)]


def _sample_std(centred: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in centred) / (len(centred) - 1))


def _unchanged(groups: GroupValues) -> GroupValues:
    return groups


def _whitened(groups: GroupValues) -> GroupValues:
    """Centred and scaled over all groups that have a spread; the others stay exactly 0."""
    spread = [any(group) for group in groups]
    values = [
        v for v in chain(*(g for g, s in zip(groups, spread, strict=True) if s)) if v is not None
    ]
    if not values:
        return groups
    mean = math.fsum(values) / len(values)
    scale = _sample_std([value - mean for value in values]) + STD_EPSILON
    return [
        [None if v is None else (v - mean) / scale for v in group] if has_spread else group
        for group, has_spread in zip(groups, spread, strict=True)
    ]


_ESTIMATORS: Mapping[
    str,
    tuple[Callable[[Sequence[float]], list[float]], Callable[[GroupValues], GroupValues]],
] = MappingProxyType(
    {
        "grpo": (_standardised, _unchanged),
        "grpo-no-std": (_centred, _unchanged),
        "rloo": (_leave_one_out, _unchanged),
        "reinforce++-baseline": (_centred, _whitened),
    }
)
