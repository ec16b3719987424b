"""The loss against closed forms, and what must not change it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from agentlightning.config import LossConfig
from agentlightning.losses import TokenBatch, combine, policy_loss, token_weights
from agentlightning.types import Sample, float_array, mask_array, token_array


def tokens(ratio, advantage, *, drift=0.0, weight=1.0, reference=None) -> TokenBatch:
    """One token whose probability is ``ratio`` times the old one."""
    old = torch.tensor([-1.0], dtype=torch.float64)
    logprob = (old + math.log(ratio)).requires_grad_()
    return TokenBatch(
        logprob,
        old,
        old - drift,
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([weight], dtype=torch.float64),
        torch.tensor([True]),
        None if reference is None else logprob.detach() + reference,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.6, 0.0),  # clipped above at 1.3
        (0.5, 2.0, -1.0, -1.0),  # the pessimistic side is never clipped
        (0.5, -2.0, 1.6, 0.0),  # clipped below at 0.8
        (1.5, -2.0, 3.0, 3.0),
        (5.0, -2.0, 6.0, 0.0),  # dual clip at 3
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate_and_its_gradient(ratio, advantage, expected, gradient):
    batch = tokens(ratio, advantage)
    loss, _ = policy_loss(batch, LossConfig(clip_low=0.2, clip_high=0.3, dual_clip=3.0))
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert batch.logprobs_N.grad.item() == pytest.approx(gradient)


def test_without_dual_clip_a_negative_advantage_is_unbounded():
    loss, _ = policy_loss(tokens(5.0, -2.0), LossConfig(dual_clip=None))
    assert loss.item() == pytest.approx(10.0)


@pytest.mark.parametrize(("drift", "expected"), [(0.5, math.exp(0.5)), (-1, math.exp(-1)), (3, 2)])
def test_recorded_logprobs_give_a_truncated_importance_ratio(drift, expected):
    batch = tokens(1.0, 1.0, drift=drift)
    loss, statistics = policy_loss(batch, LossConfig(importance_cap=2.0))
    loss.backward()
    assert loss.item() == pytest.approx(-expected)
    assert batch.logprobs_N.grad.item() == pytest.approx(-expected)
    metrics = combine([statistics])
    assert metrics["importance_capped"] == (drift == 3)
    assert metrics["kl_rollout_k1"] == pytest.approx(-drift)
    assert metrics["kl_rollout_k3"] == pytest.approx(math.exp(drift) - drift - 1)
    assert metrics["logprob_difference_max"] == pytest.approx(abs(drift))


def test_kl_to_the_reference_is_k3():
    batch = tokens(1.0, 0.0, reference=0.4, weight=0.5)
    loss, statistics = policy_loss(batch, LossConfig(kl_coefficient=0.1))
    loss.backward()
    k3 = math.exp(0.4) - 0.4 - 1
    assert loss.item() == pytest.approx(0.5 * 0.1 * k3)
    assert batch.logprobs_N.grad.item() == pytest.approx(0.5 * 0.1 * (1 - math.exp(0.4)))
    assert combine([statistics])["kl_reference"] == pytest.approx(k3)


def random_batch(B=3, T=5) -> TokenBatch:
    torch.manual_seed(0)
    values = [torch.randn(B, T, dtype=torch.float64) for _ in range(5)]
    mask_BT = torch.rand(B, T) < 0.6
    return TokenBatch(values[0].requires_grad_(), *values[1:4], values[4].abs(), mask_BT, values[1])


FIELDS = (
    "logprobs_N",
    "old_logprobs_N",
    "rollout_logprobs_N",
    "advantages_N",
    "weights_N",
    "reference_logprobs_N",
)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_positions_have_no_effect_whatever_they_hold(rubbish):
    config, batch = LossConfig(kl_coefficient=0.1), random_batch()
    clean, _ = policy_loss(batch, config)
    clean.backward()
    dirty_fields = {
        name: getattr(batch, name).detach().masked_fill(~batch.mask_N, rubbish) for name in FIELDS
    }
    dirty_fields["logprobs_N"].requires_grad_()
    dirty = replace(batch, **dirty_fields)
    loss, statistics = policy_loss(dirty, config)
    loss.backward()
    assert torch.equal(loss, clean)
    assert torch.equal(dirty.logprobs_N.grad, batch.logprobs_N.grad)
    assert all(map(math.isfinite, combine([statistics]).values()))


def test_any_cut_adds_up_to_the_same_loss_and_metrics():
    config, whole = LossConfig(kl_coefficient=0.1), random_batch()
    loss, statistics = policy_loss(whole, config)
    fields = {name: getattr(whole, name) for name in (*FIELDS, "mask_N")}
    parts = [
        policy_loss(TokenBatch(**{k: v[rows] for k, v in fields.items()}), config)
        for rows in (slice(0, 1), slice(1, 3))
    ]
    assert sum(p[0].item() for p in parts) == pytest.approx(loss.item(), abs=1e-12)
    assert combine([p[1] for p in parts]) == pytest.approx(combine([statistics]), abs=1e-6)


def test_no_tokens_give_zero_and_no_metrics_that_are_not_finite():
    batch = random_batch()
    loss, statistics = policy_loss(replace(batch, mask_N=batch.mask_N & False), LossConfig())
    assert loss.item() == 0.0
    assert combine([statistics]) == {"tokens_trained": 0.0}


def sample(rollout: str, trained: int) -> Sample:
    n = trained + 1
    return Sample(
        rollout, "g", 1.0, token_array(range(n)), mask_array([0] + [1] * trained),
        float_array([-1.0] * n), token_array([0] * n),
    )  # fmt: skip


SAMPLES = [sample("A", 50), sample("A", 100), *[sample("B", 30)] * 3, sample("C", 40)]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("rollout-mean", [1 / 450] * 2 + [1 / 270] * 3 + [1 / 120]),
        ("token-mean", [1 / 280] * 6),
        ("sequence-mean", [1 / 300, 1 / 600] + [1 / 180] * 3 + [1 / 240]),
        ("constant", [1 / 3000] * 6),
    ],
)
def test_token_weights(reduction, expected):
    weights = token_weights(SAMPLES, reduction=reduction, rollouts=3, constant_divisor=1000.0)
    assert weights == pytest.approx(expected)


def test_each_rollout_weighs_a_third_and_all_weigh_one():
    weights = token_weights(SAMPLES, reduction="rollout-mean", rollouts=3, constant_divisor=1.0)
    of_rollout = {"A": 0.0, "B": 0.0, "C": 0.0}
    for each, weight in zip(SAMPLES, weights, strict=True):
        of_rollout[each.rollout_id] += weight * each.trained_tokens
    assert of_rollout == pytest.approx({"A": 1 / 3, "B": 1 / 3, "C": 1 / 3})


def test_an_unknown_reduction_lists_the_choices():
    with pytest.raises(ValueError, match="token-mean"):
        token_weights([], reduction="mean", rollouts=1, constant_divisor=1.0)
