"""Advantages against closed forms."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.advantages import STD_EPSILON, advantages
from agentlightning.config import LossConfig

ESTIMATORS = get_args(LossConfig.model_fields["advantage"].annotation)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo-no-std", [0.25, 0.25, 0.25, -0.75]),
        ("grpo", [x / (0.5 + STD_EPSILON) for x in (0.25, 0.25, 0.25, -0.75)]),
        ("rloo", [1 / 3, 1 / 3, 1 / 3, -1.0]),
        ("reinforce++-baseline", [x / (0.5 + STD_EPSILON) for x in (0.25, 0.25, 0.25, -0.75)]),
    ],
)
def test_closed_forms(estimator, expected):
    (got,) = advantages([[1.0, 1.0, 1.0, 0.0]], estimator=estimator)
    assert got == pytest.approx(expected, abs=1e-12)


def test_reinforce_plus_plus_scales_over_the_update_and_leaves_silent_groups_out():
    groups = [[1.0, 0.0], [3.0, 0.0], [7.0, 7.0]]
    got = advantages(groups, estimator="reinforce++-baseline")
    scale = math.sqrt((2 * 0.25 + 2 * 2.25) / 3) + STD_EPSILON
    expected = [[0.5 / scale, -0.5 / scale], [1.5 / scale, -1.5 / scale], [0.0, 0.0]]
    assert got == [pytest.approx(e, abs=1e-12) for e in expected]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -1e17, 1e-300])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_constant_group_is_exactly_zero(estimator, reward, size):
    assert advantages([[reward] * size], estimator=estimator) == [[0.0] * size]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_reward_is_out_of_the_result_and_of_the_baseline(estimator):
    with_none = advantages([[1.0, None, 0.0, None, 0.0]], estimator=estimator)[0]
    without = advantages([[1.0, 0.0, 0.0]], estimator=estimator)[0]
    assert with_none == [without[0], None, without[1], None, without[2]]
    assert advantages([[None, None], [], [2.0, None]], estimator=estimator) == [
        [None, None],
        [],
        [0.0, None],
    ]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused(reward):
    with pytest.raises(ValueError, match="finite"):
        advantages([[1.0, reward]], estimator="grpo")


def test_an_unknown_estimator_lists_the_choices():
    with pytest.raises(ValueError, match="rloo"):
        advantages([[1.0]], estimator="gae")


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rewards=st.lists(st.integers(-50, 50).map(lambda x: x / 10), min_size=2, max_size=8))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(estimator, rewards):
    (got,) = advantages([rewards], estimator=estimator)
    assert sum(got) == pytest.approx(0.0, abs=1e-9)
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    assert all(got[a] <= got[b] for a, b in pairwise(order))
