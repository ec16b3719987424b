"""Draws tokens from logits and reports the log-probability of what was really drawn from.

Shapes: B rows, V vocabulary, K candidates.

The distribution is softmax(logits / temperature), restricted by top_k and then top_p over
the renormalised rest, as vLLM's processed mode. Temperature 0 is greedy: the most likely
token, with its log-probability at temperature 1, top_k and top_p left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request samples. ``top_k`` <= 0 and ``top_p`` = 1 keep every token.

    ``top_logprobs`` is how many alternatives are reported with each token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def restricted(self) -> bool:
        return not self.greedy and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled token, its log-probability, and the likeliest alternatives in order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def draw(
    logits_BV: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> list[Drawn]:
    """One token a row. ``uniforms`` are in [0, 1), one a row, so a row's draw depends on its
    own random numbers and not on its batch mates."""
    logprobs_BV = processed_logprobs(logits_BV, samplings)
    tokens_B = _inverse_cdf(logprobs_BV, uniforms)
    if any(s.greedy for s in samplings):
        greedy_B = torch.tensor([s.greedy for s in samplings], device=tokens_B.device)
        tokens_B = torch.where(greedy_B, logprobs_BV.argmax(-1), tokens_B)
    chosen_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    tops = _alternatives(logprobs_BV, [s.top_logprobs for s in samplings])
    return [
        Drawn(token, logprob, top)
        for token, logprob, top in zip(tokens_B.tolist(), chosen_B.tolist(), tops, strict=True)
    ]


def processed_logprobs(logits_BV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Float32 log-probabilities that each row is drawn from; -inf where it cannot be drawn."""
    logits_BV = logits_BV.to(
        torch.float32, copy=any(s.logit_bias or s.restricted for s in samplings)
    )
    for row, sampling in enumerate(samplings):
        for token, bias in sampling.logit_bias.items():
            logits_BV[row, token] += bias
    if any(s.temperature not in (0, 1) for s in samplings):
        divisors = [s.temperature or 1.0 for s in samplings]
        logits_BV = logits_BV / torch.tensor(divisors, device=logits_BV.device)[:, None]
    rows = [row for row, s in enumerate(samplings) if s.restricted]
    if rows:
        logits_BV[rows] = _restrict(logits_BV[rows], [samplings[row] for row in rows])
    return torch.log_softmax(logits_BV, -1)


def _restrict(logits_BV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Sorting the whole vocabulary is the slow part, so the likeliest are tried first: they do
    wherever top_k, or top_p of the probability, lies among them."""
    size, device = logits_BV.shape[-1], logits_BV.device
    ks = [s.top_k if 0 < s.top_k < size else size for s in samplings]
    first = max(k if k < size else min(_CANDIDATES, size) for k in ks)
    k_B1 = torch.tensor(ks, device=device)[:, None]
    p_B1 = torch.tensor([s.top_p for s in samplings], device=device)[:, None]
    for count in (first, size):
        sorted_BK, order_BK = logits_BV.topk(count, -1)
        rank_K = torch.arange(count, device=device)
        sorted_BK = sorted_BK.masked_fill(rank_K >= k_B1, -torch.inf)
        within_B1 = sorted_BK.logsumexp(-1, keepdim=True)
        total_B1 = torch.where(k_B1 < size, within_B1, logits_BV.logsumexp(-1, keepdim=True))
        probs_BK = (sorted_BK - total_B1).exp()
        upto_BK = probs_BK.cumsum(-1)
        if ((k_B1 <= count) | (upto_BK[:, -1:] >= p_B1)).all():
            break
    # A token stays while those before it have less than top_p: the likeliest always stays.
    outside_BK = (upto_BK - probs_BK >= p_B1) & (p_B1 < 1) & (rank_K > 0)
    kept_BK = sorted_BK.masked_fill(outside_BK, -torch.inf)
    return torch.full_like(logits_BV, -torch.inf).scatter(1, order_BK, kept_BK)


def _inverse_cdf(logprobs_BV: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    cdf_BV = logprobs_BV.exp().cumsum(-1)
    total_B = cdf_BV[:, -1]
    target_B = torch.tensor(uniforms, device=cdf_BV.device, dtype=torch.float32) * total_B
    # Strictly below the total, so that the last step of the CDF is always found.
    target_B = torch.minimum(target_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(cdf_BV, target_B[:, None], right=True)[:, 0]


def _alternatives(
    logprobs_BV: torch.Tensor, counts: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
    rows = [row for row, count in enumerate(counts) if count]
    if rows:
        values, ids = logprobs_BV[rows].topk(max(counts), -1)
        for row, row_values, row_ids in zip(rows, values.tolist(), ids.tolist(), strict=True):
            tops[row] = tuple(zip(row_ids, row_values, strict=True))[: counts[row]]
    return tops
