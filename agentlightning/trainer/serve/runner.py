"""Runs a transformers model over many sequences at once, with keys and values in one pool.

Shapes: T tokens of a step over all sequences, B decoded sequences, L longest context among
them, H query heads, G key-value heads, D head size, N rows of the pool, V vocabulary.

A step is one flat row of tokens: the newest token of each decoded sequence and pieces of
prompts. All layers but attention see no sequences at all, so mixing them costs nothing;
attention is given to transformers as a custom attention function that writes to the pool
and reads each sequence's rows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from agentlightning.errors import ModelError
from agentlightning.trainer.serve.cache import Ids, Rows
from agentlightning.trainer.serve.packed import PackedLinear, pack_linears

_ATTENTION = "agentlightning_pool"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence to compute: ``ids`` are its last ones, ``rows`` are all of its
    context's, those of ``ids`` included."""

    ids: Ids
    rows: Rows


@dataclass(frozen=True, slots=True)
class _Decode:
    start: int
    stop: int
    rows_BL: torch.Tensor
    bias_B11L: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    start: int
    stop: int
    rows_L: torch.Tensor
    bias_TL: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Step:
    """What the attention function needs of one step."""

    pool: torch.Tensor
    rows_T: torch.Tensor
    decodes: tuple[_Decode, ...]
    prefills: tuple[_Prefill, ...]


class ModelRunner:
    """A causal language model and its key-value pool."""

    def __init__(
        self, folder: Path, *, dtype: torch.dtype, device: torch.device, pool_rows: int
    ) -> None:
        AttentionInterface.register(_ATTENTION, _pool_attention)
        self.device, self._dtype = device, dtype
        self.model = load_model(folder, dtype).to(device).eval()
        self.model.set_attn_implementation(_ATTENTION)
        config = self.model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.max_context = _max_context(config)
        if device.type == "cpu" and dtype == torch.bfloat16 and torch.backends.mkldnn.enabled:
            pack_linears(self.model)
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # Not zeroed: a row is read only after it was written, and costs no memory before.
        self._pool = torch.empty(
            (config.num_hidden_layers, pool_rows, 2, heads, size), dtype=dtype, device=device
        )

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Computes the segments; logits [segments, V] after each one's last token."""
        order = sorted(range(len(segments)), key=lambda i: _attention_class(segments[i]))
        ordered = [segments[i] for i in order]
        ids_T = np.concatenate([s.ids for s in ordered])
        positions_T = np.concatenate(
            [np.arange(len(s.rows) - len(s.ids), len(s.rows)) for s in ordered]
        )
        last = np.cumsum([len(s.ids) for s in ordered]) - 1
        hidden_TE = self.model.base_model(
            input_ids=self._tensor(ids_T.astype(np.int64))[None],
            position_ids=self._tensor(positions_T)[None],
            use_cache=False,
            pool_step=self._step(ordered),
        ).last_hidden_state[0]
        back = np.empty(len(order), np.int64)
        back[order] = last
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden_TE[self._tensor(back)])
        return logits

    @torch.inference_mode()
    def copy_weights(self, source: nn.Module) -> None:
        """Overwrites the weights in place with ``source``'s; raises ModelError and changes
        nothing where names or shapes differ."""
        ours, theirs = dict(self.model.named_parameters()), dict(source.named_parameters())
        wrong = sorted(ours.keys() ^ theirs.keys()) or sorted(
            name for name in ours if ours[name].shape != theirs[name].shape
        )
        if wrong:
            raise ModelError(
                f"weights: {len(wrong)} tensors do not fit the served model, the first is "
                f"{wrong[0]!r}. Publish weights of the same architecture and size."
            )
        for name, parameter in ours.items():
            parameter.copy_(theirs[name])
        for module in self.model.modules():
            if isinstance(module, PackedLinear):
                module.pack()

    def load_aside(self, folder: Path) -> nn.Module:
        """Other weights of this architecture, loaded beside the ones that serve."""
        source: nn.Module = load_model(folder, self._dtype)
        return source

    def _tensor(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    def _step(self, ordered: Sequence[Segment]) -> _Step:
        decodes, prefills = [], []
        start = index = 0
        while index < len(ordered):
            kind = _attention_class(ordered[index])
            stop_index = index + 1
            if kind[0] == 0:
                while stop_index < len(ordered) and _attention_class(ordered[stop_index]) == kind:
                    stop_index += 1
                decodes.append(self._decode(start, ordered[index:stop_index]))
                start += stop_index - index
            else:
                prefills.append(self._prefill(start, ordered[index]))
                start += len(ordered[index].ids)
            index = stop_index
        rows_T = np.concatenate([s.rows[len(s.rows) - len(s.ids) :] for s in ordered])
        return _Step(self._pool, self._tensor(rows_T), tuple(decodes), tuple(prefills))

    def _decode(self, start: int, segments: Sequence[Segment]) -> _Decode:
        lengths_B = np.array([len(s.rows) for s in segments])
        rows_BL = np.empty((len(segments), lengths_B.max()), np.int64)
        for row, segment in zip(rows_BL, segments, strict=True):
            row[: len(segment.rows)] = segment.rows
            # A weight of 0 does not hide a NaN: padding reads a row that was written, its own.
            row[len(segment.rows) :] = segment.rows[0]
        outside_BL = np.arange(rows_BL.shape[1]) >= lengths_B[:, None]
        bias_BL = torch.zeros(outside_BL.shape, dtype=self._dtype, device=self.device)
        bias_BL.masked_fill_(self._tensor(outside_BL), -torch.inf)
        return _Decode(
            start, start + len(segments), self._tensor(rows_BL), bias_BL[:, None, None, :]
        )

    def _prefill(self, start: int, segment: Segment) -> _Prefill:
        new, context = len(segment.ids), len(segment.rows)
        bias_TL = None
        if context > new:
            bias_TL = torch.full((new, context), -torch.inf, dtype=self._dtype, device=self.device)
            bias_TL.triu_(context - new + 1)
        return _Prefill(start, start + new, self._tensor(segment.rows), bias_TL)


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """The model of ``folder`` on the CPU; a tensor that the files lack is a ModelError."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"model: {folder} cannot be loaded: {error}. Give a folder with config.json and "
            "safetensors of a causal language model."
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"model: {folder} lacks {len(missing)} tensors, the first is {missing[0]!r}. "
            "Export the whole model, not only what changed."
        )
    return model


def _max_context(config: Any) -> int:
    """Longest context that full attention is right for."""
    bounds = [config.max_position_embeddings, getattr(config, "sliding_window", None)]
    return min(int(bound) for bound in bounds if bound)


def _attention_class(segment: Segment) -> tuple[int, int]:
    """Segments of one class share an attention call: decoded ones of like length, so that
    padding to the longest at most doubles the work. Prompt pieces go one by one."""
    if len(segment.ids) > 1:
        return 1, 0
    return 0, max(8, len(segment.rows).bit_length())


def _pool_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    pool_step: _Step,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: query [1, H, T, D], key and value [1, G, T, D] → [1, T, H, D]."""
    pool_N2GD = pool_step.pool[module.layer_idx]  # type: ignore[index]
    pool_N2GD.index_copy_(0, pool_step.rows_T, torch.cat((key, value)).permute(2, 0, 1, 3))
    query_THD = query[0].transpose(0, 1)
    out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
    for decode in pool_step.decodes:
        part = slice(decode.start, decode.stop)
        out_THD[part] = _decode_attention(query_THD[part], pool_N2GD, decode, scaling)
    for prefill in pool_step.prefills:
        part = slice(prefill.start, prefill.stop)
        kv_L2GD = pool_N2GD.index_select(0, prefill.rows_L)
        out_HTD = scaled_dot_product_attention(
            query[:, :, part],
            kv_L2GD[None, :, 0].transpose(1, 2),
            kv_L2GD[None, :, 1].transpose(1, 2),
            attn_mask=prefill.bias_TL,
            is_causal=prefill.bias_TL is None,
            scale=scaling,
            enable_gqa=True,
        )[0]
        out_THD[part] = out_HTD.transpose(0, 1)
    return out_THD[None], None


def _decode_attention(
    query_BHD: torch.Tensor, pool_N2GD: torch.Tensor, decode: _Decode, scaling: float | None
) -> torch.Tensor:
    """The query heads of a key-value head stand as its query positions: no head is copied."""
    B, L = decode.rows_BL.shape
    _, _, G, D = pool_N2GD.shape
    kv_BL2GD = pool_N2GD.index_select(0, decode.rows_BL.flatten()).view(B, L, 2, G, D)
    out = scaled_dot_product_attention(
        query_BHD.reshape(B, G, -1, D),
        kv_BL2GD[:, :, 0].transpose(1, 2),
        kv_BL2GD[:, :, 1].transpose(1, 2),
        attn_mask=decode.bias_B11L,
        scale=scaling,
    )
    return out.reshape(query_BHD.shape)
