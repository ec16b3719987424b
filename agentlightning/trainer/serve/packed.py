"""bf16 linear layers whose weights are kept in oneDNN's own order.

torch reorders a bf16 weight in every call on the CPU, which costs up to two thirds of it at
the batch sizes of decoding. The operators that avoid it are not part of torch's public
interface, so they are used only where a trial shows that they are there and right.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

_PACKED_FOR_ROWS = 32


class PackedLinear(nn.Module):
    """``linear`` with its weight kept a second time; :meth:`pack` it again when it changes."""

    def __init__(self, linear: nn.Linear, operators: Any) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._operators = operators
        self.pack()

    def pack(self) -> None:
        reorder = self._operators._reorder_linear_weight
        self._packed = reorder(self.weight.detach(), _PACKED_FOR_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._operators._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return out


def pack_linears(model: nn.Module, *, operators: Any = torch.ops.mkldnn) -> bool:
    """Packs all linear layers of a bf16 model on the CPU in place; False, and the model as it
    was, where this torch cannot."""
    if not _works(operators):
        logger.warning("this torch has no packed bf16 products: decoding will be slower")
        return False
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child, operators))
    return True


@torch.inference_mode()
def _works(operators: Any) -> bool:
    """Whether one small product, after a change of the weight too, equals torch's own."""
    linear = nn.Linear(64, 48, dtype=torch.bfloat16)
    x = torch.linspace(-1, 1, 192, dtype=torch.bfloat16).view(1, 3, 64)
    try:
        packed = PackedLinear(linear, operators)
        linear.weight.neg_()
        packed.pack()
        return torch.allclose(packed(x), linear(x), rtol=0.02, atol=0.02)
    except (AttributeError, RuntimeError, TypeError):
        return False
