"""Rows → logprobs of their trained tokens, without a [rows × tokens × vocabulary] tensor.

Only positions whose next token is trained go through the language model head, a chunk at a
time, and a chunk's logits are computed again in the backward pass. The tokens that all rows
begin with are computed once: the others attend to them through the key-value cache, which
carries gradients.

Shape letters: B rows, T tokens of the longest row, N trained tokens of all rows, C of a chunk,
H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from agentlightning.types import Tokens

_CHUNK_TOKENS = 256
_LEAST_SHARED = 16
"""Shorter common beginnings cost more to share than to repeat."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the tokens were sampled; logprobs are of that distribution.

    Logits are divided by ``temperature``, then only the ``top_k`` largest stay (-1: all), then
    the smallest set that holds ``top_p`` of the probability. A recorded token always stays:
    rounding may have moved it over an edge.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows padded on the right, with the places of their trained tokens.

    ``positions_N`` index the flattened [B × T] tokens after the ``shared`` first ones: where
    ``targets_N`` are predicted. No attention mask is needed: under causal attention nothing
    attends to padding that stands on its right, and no output at padding is read.
    """

    ids_BT: Tensor
    positions_N: Tensor
    targets_N: Tensor
    shared: int


def pad_rows(
    ids: Sequence[Tokens], trained: Sequence[Sequence[int]], *, share: bool = True
) -> PaddedRows:
    """``trained[b]`` lists the positions (ascending, from 1) of row b's trained tokens.

    What stands after the last token that predicts a trained one is left out.
    """
    first = min(positions[0] for positions in trained)
    inputs = [row[: positions[-1]] for row, positions in zip(ids, trained, strict=True)]
    shared = min(_common_length(inputs), first - 1) if share and len(ids) > 1 else 0
    if shared < _LEAST_SHARED:
        shared = 0
    longest = max(map(len, inputs))
    ids_BT = torch.zeros(len(ids), longest, dtype=torch.long)
    for row, tokens in enumerate(inputs):
        ids_BT[row, : len(tokens)] = torch.tensor(tokens)
    width = longest - shared
    places = [
        (row * width + position - 1 - shared, ids[row][position])
        for row, positions in enumerate(trained)
        for position in positions
    ]
    positions_N, targets_N = torch.tensor(places, dtype=torch.long).unbind(1)
    return PaddedRows(ids_BT, positions_N, targets_N, shared)


def trained_logprobs(
    backbone: Any, head_VH: Tensor, rows: PaddedRows, sampler: Sampler
) -> tuple[Tensor, Tensor]:
    """Logprobs (with gradient) and entropies (without), each [N], fp32, in nats."""
    hidden_NH = hidden_states(backbone, rows).flatten(0, 1)[rows.positions_N]
    outputs = [
        checkpoint(_head, hidden_CH, head_VH, targets_C, sampler, use_reentrant=False)
        for hidden_CH, targets_C in zip(
            torch.split(hidden_NH, _CHUNK_TOKENS),
            torch.split(rows.targets_N, _CHUNK_TOKENS),
            strict=True,
        )
    ]
    logprobs, entropies = zip(*outputs, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def hidden_states(backbone: Any, rows: PaddedRows) -> Tensor:
    """[B, T - shared, H]: the last hidden states after the shared tokens."""
    if not rows.shared:
        output = backbone(input_ids=rows.ids_BT, use_cache=False)
    else:
        cache = DynamicCache(config=backbone.config)
        backbone(input_ids=rows.ids_BT[:1, : rows.shared], cache=cache, use_cache=True)
        cache.batch_repeat_interleave(len(rows.ids_BT))
        output = backbone(input_ids=rows.ids_BT[:, rows.shared :], cache=cache, use_cache=True)
    hidden: Tensor = output.last_hidden_state
    return hidden


def can_share(config: Any) -> bool:
    """Whether the cache of a prefix holds all that later tokens see: full attention only."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"} and not getattr(config, "sliding_window", None)


def _common_length(rows: Sequence[Tokens]) -> int:
    """Tokens that all rows begin with: those of the first and the last in order."""
    low, high = min(rows), max(rows)
    pairs = enumerate(zip(low, high, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(low), len(high)))


def _head(
    hidden_CH: Tensor, head_VH: Tensor, targets_C: Tensor, sampler: Sampler
) -> tuple[Tensor, Tensor]:
    logits_CV = (hidden_CH @ head_VH.T).float() / sampler.temperature
    if sampler.top_k > 0 or sampler.top_p < 1:
        logits_CV = logits_CV.masked_fill(~_kept(logits_CV, targets_C, sampler), -torch.inf)
    target_C = logits_CV.gather(1, targets_C[:, None]).squeeze(1)
    normaliser_C = logits_CV.logsumexp(1)
    with torch.no_grad():
        probabilities_CV = (logits_CV - normaliser_C[:, None]).exp()
        entropy_C = normaliser_C - (probabilities_CV * logits_CV).nan_to_num_(nan=0.0).sum(1)
    return target_C - normaliser_C, entropy_C


@torch.no_grad()
def _kept(logits_CV: Tensor, targets_C: Tensor, sampler: Sampler) -> Tensor:
    ordered_CV, order_CV = logits_CV.sort(dim=1, descending=True)
    if sampler.top_k > 0:
        ordered_CV[:, sampler.top_k :] = -torch.inf
    probabilities_CV = ordered_CV.softmax(1)
    before_CV = probabilities_CV.cumsum(1) - probabilities_CV
    keep_CV = (before_CV < sampler.top_p) & ordered_CV.isfinite()
    kept_CV = torch.zeros_like(keep_CV).scatter(1, order_CV, keep_CV)
    return kept_CV.scatter(1, targets_C[:, None], True)
