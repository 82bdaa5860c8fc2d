"""Linear layers by oneDNN give what `nn.Linear` gives, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rlx.core.engine import float32_linear
from rlx.core.engine.float32_linear import quicken

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_linear, "_helps", lambda: True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 50, 12), (7, 12), (12,), (0, 12)])
def test_values_and_gradients_are_those_of_the_layer(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    quick = nn.Linear(12, 20, bias=bias)
    exact = copy.deepcopy(quick).double()
    assert quicken(quick) == 1
    x, upstream = torch.randn(shape), torch.randn(*shape[:-1], 20)
    found = []
    for layer, dtype in ((quick, torch.float32), (exact, torch.float64)):
        given = x.detach().clone().to(dtype).requires_grad_()
        y = layer(given)
        y.backward(upstream.to(dtype))
        found.append([y.detach(), given.grad, *(one.grad for one in layer.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_without_a_gradient_it_is_the_same() -> None:
    layer = nn.Linear(12, 20)
    x = torch.randn(5, 12)
    plain = layer(x).detach()
    quicken(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain)


def test_a_frozen_weight_gets_no_gradient_and_passes_one_on() -> None:
    layer = nn.Linear(12, 20).requires_grad_(False)
    quicken(layer)
    x = torch.randn(5, 12, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(5, 12))


def test_a_copy_has_its_own_weights() -> None:
    layer = nn.Linear(12, 20)
    quicken(layer)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
        assert not other(torch.randn(3, 12)).any()
        assert layer(torch.randn(3, 12)).all()


def test_other_dtypes_and_classes_stay_what_they_are() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(12, 20).bfloat16(), Special(12, 20), nn.Conv1d(2, 2, 1))
    assert quicken(model) == 0
    layer = nn.Linear(12, 20)
    quicken(layer)
    assert layer.bfloat16()(torch.randn(3, 12).bfloat16()).dtype == torch.bfloat16


def test_a_processor_that_gains_nothing_keeps_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_linear, "_helps", lambda: False)
    assert quicken(nn.Linear(12, 20)) == 0
