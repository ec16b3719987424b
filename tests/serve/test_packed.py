from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from agentlightning.trainer.serve.packed import PackedLinear, pack_linears

pytestmark = pytest.mark.slow


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8, bias=False)).bfloat16()


def wrong(*_: Any) -> torch.Tensor:
    return torch.zeros(1, 3, 48, dtype=torch.bfloat16)


def refused(*_: Any) -> torch.Tensor:
    raise RuntimeError("expected 5 arguments")


@pytest.mark.parametrize(
    "operators",
    [
        SimpleNamespace(),
        SimpleNamespace(_reorder_linear_weight=refused, _linear_pointwise=refused),
        SimpleNamespace(_reorder_linear_weight=wrong, _linear_pointwise=wrong),
    ],
    ids=["missing", "of another signature", "of another result"],
)
def test_where_torch_cannot_pack_the_model_stays_as_it_was(operators: Any) -> None:
    model = layers()
    assert not pack_linears(model, operators=operators)
    assert [type(layer) for layer in model.children()] == [nn.Linear, nn.Tanh, nn.Linear]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_packed_layers_give_what_plain_ones_give() -> None:
    model, x = layers(), torch.randn(1, 5, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        plain = model(x)
        assert pack_linears(model)
        assert sum(isinstance(layer, PackedLinear) for layer in model.children()) == 2
        torch.testing.assert_close(model(x), plain, rtol=0.02, atol=0.02)
