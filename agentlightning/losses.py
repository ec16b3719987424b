"""Tensors → (loss, statistics): the clipped surrogate over single tokens.

Shape letters: B rows, T tokens of a row; N stands for any shape that all arguments share,
``[B, T]`` as well as the trained tokens of several rows in one line.

The loss is a weighted sum, ``sum(weight * token_loss)``, with weights that already carry every
mean (:func:`token_weights`). So any cut of an update into rows, micro-batches or ranks adds up
to the same loss and gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentlightning.config import LossConfig
from agentlightning.types import Sample

_LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped here before ``exp``: e^20 is far beyond every cap and still finite."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What the loss needs of each token. Where ``mask_N`` is False nothing is read, not even NaN.

    ``logprobs_N`` (nats) carries the gradient; ``old_logprobs_N`` are of the policy before the
    update; ``rollout_logprobs_N`` are those that the model server reported when it sampled;
    ``reference_logprobs_N`` are of the KL's reference. ``weights_N`` come from
    :func:`token_weights`.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    mask_N: Tensor
    reference_logprobs_N: Tensor | None = None


def policy_loss(batch: TokenBatch, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (a scalar) and its statistics; :func:`combine` makes metrics of them.

    Per token, with ``r = exp(logprob - old)``, advantage ``A`` and ``w`` below, minus

        w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),   at least w * dual_clip * A if A < 0

    * clipped surrogate: Schulman et al. 2017, arXiv:1707.06347, eq. 7; separate bounds: Yu et
      al. 2025 (DAPO), arXiv:2503.14476; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5;
    * ``w = min(exp(old - rollout), importance_cap)``, a constant: the truncated importance ratio
      of a model server that is stale or computes otherwise (Yao et al. 2025, "Your efficient RL
      framework secretly brings you off-policy RL training");
    * plus ``kl_coefficient * k3`` with ``k3 = exp(d) - d - 1``, ``d = reference - logprob``
      (Schulman 2020, "Approximating KL divergence"; GRPO, arXiv:2402.03300, eq. 4).

    Departure: log-ratios are clamped to ±20, so that nothing overflows before a cap applies.
    """
    mask = batch.mask_N.bool()

    def used(values: Tensor) -> Tensor:
        return values.masked_fill(~mask, 0.0)

    logprobs, old = used(batch.logprobs_N), used(batch.old_logprobs_N)
    advantages, weights = used(batch.advantages_N), used(batch.weights_N)
    drift = (old - used(batch.rollout_logprobs_N)).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    importance = drift.exp().clamp(max=config.importance_cap)
    ratio = (logprobs - old).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()
    token_loss = -importance * _surrogate(ratio, advantages, config)
    statistics = _statistics(ratio, drift, advantages, mask, config)
    if batch.reference_logprobs_N is not None:
        k3 = _k3(logprobs, used(batch.reference_logprobs_N))
        token_loss = token_loss + config.kl_coefficient * k3
        statistics["mean/kl_reference"] = k3.detach()[mask].sum()
    return (weights * token_loss).sum(), statistics


def _surrogate(ratio: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if config.dual_clip is None:
        return surrogate
    bounded = torch.maximum(surrogate, config.dual_clip * advantages)
    return torch.where(advantages < 0, bounded, surrogate)


def _k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    difference = (reference - logprobs).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return difference.exp() - difference - 1


@torch.no_grad()
def _statistics(
    ratio: Tensor, drift: Tensor, advantages: Tensor, mask: Tensor, config: LossConfig
) -> dict[str, Tensor]:
    """``mean/…`` are sums over the masked-in tokens, ``max/…`` maxima, ``tokens`` their number.

    ``drift`` is old minus recorded: ``mean/kl_rollout_k1`` and ``k3`` estimate the KL from the
    policy that sampled to the one that is trained.
    """
    ratio, drift, advantages = ratio[mask], drift[mask], advantages[mask]
    low = (ratio < 1 - config.clip_low) & (advantages < 0)
    high = (ratio > 1 + config.clip_high) & (advantages > 0)
    importance = drift.exp()
    statistics = {
        "tokens": torch.tensor(float(ratio.numel())),
        "mean/ratio": ratio.sum(),
        "mean/clip_low": low.sum(),
        "mean/clip_high": high.sum(),
        "mean/importance": importance.sum(),
        "mean/importance_capped": (importance > config.importance_cap).sum(),
        "mean/logprob_difference": drift.abs().sum(),
        "mean/kl_rollout_k1": -drift.sum(),
        "mean/kl_rollout_k3": (importance - drift - 1).sum(),
    }
    if ratio.numel():
        statistics["max/ratio"] = ratio.max()
        statistics["max/importance"] = importance.max()
        statistics["max/logprob_difference"] = drift.abs().max()
    return statistics


def combine(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Metrics of an update from the statistics of its micro-batches: means over all tokens
    (never means of means) as ``name``, maxima as ``name_max``.

    Example:
        >>> one = {"tokens": torch.tensor(1.0), "mean/ratio": torch.tensor(1.0)}
        >>> three = {"tokens": torch.tensor(3.0), "mean/ratio": torch.tensor(6.0)}
        >>> combine([one, three])["ratio"]
        1.75
    """
    tokens = sum(float(part["tokens"]) for part in parts)
    metrics: dict[str, float] = {"tokens_trained": tokens}
    for part in parts:
        for key, value in part.items():
            kind, _, name = key.partition("/")
            if kind == "mean" and tokens:
                metrics[name] = metrics.get(name, 0.0) + float(value) / tokens
            elif kind == "max":
                name = f"{name}_max"
                metrics[name] = max(metrics.get(name, float("-inf")), float(value))
    return metrics


def token_weights(
    samples: Sequence[Sample], *, reduction: str, rollouts: int, constant_divisor: float
) -> list[float]:
    """What each trained token of a sample weighs in its update's loss, one number a sample.

    ``rollouts`` is R, the rollouts of the update: with or without a signal, but with a reward.
    T_r are the trained tokens of a rollout over all its samples, T_s those of one sample.

    * ``rollout-mean``: 1 / (R T_r), each rollout weighs 1/R however it was cut into samples;
    * ``token-mean``: 1 / (sum of all T_r), as DAPO (arXiv:2503.14476);
    * ``sequence-mean``: 1 / (samples * T_s), depends on how the harness cuts;
    * ``constant``: 1 / (R constant_divisor), as Dr. GRPO (arXiv:2503.20783).

    Raises ValueError for an unknown reduction.
    """
    trained = [sample.trained_tokens for sample in samples]
    of_rollout: Counter[str] = Counter()
    for sample, tokens in zip(samples, trained, strict=True):
        of_rollout[sample.rollout_id] += tokens
    if reduction == "rollout-mean":
        divisors = [rollouts * of_rollout[sample.rollout_id] for sample in samples]
    elif reduction == "token-mean":
        divisors = [sum(trained)] * len(samples)
    elif reduction == "sequence-mean":
        divisors = [len(samples) * tokens for tokens in trained]
    elif reduction == "constant":
        return [1 / (rollouts * constant_divisor)] * len(samples)
    else:
        raise ValueError(
            f"loss reduction is {reduction!r}: choose rollout-mean, token-mean, "
            "sequence-mean or constant."
        )
    return [1 / divisor if divisor else 0.0 for divisor in divisors]
