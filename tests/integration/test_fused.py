"""Fused operations compute what the model's own do, forward and backward, or are not put in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import started
from prefix_cases import PLAIN, assert_same, grouped_batch, passes, write_architecture
from torch.nn import functional

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner import fused_ops
from rlx.core.engine.learner.fusing import fuse, fused_modules
from rlx.core.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x * cos[:, None] + turned * sin[:, None]


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def projected(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(gated(gate, up), weight)


ANGLES = torch.randn(1, 700, 4, generator=torch.Generator().manual_seed(1)).repeat(1, 1, 2)
CASES: dict[str, tuple[Any, Any, list[tuple[int, ...]]]] = {
    # More than one piece of rows.
    "norm": (lambda x, w: fused_ops.rms_norm(x, w, 1e-5), rms_norm, [(2, 700, 384), (384,)]),
    "rotation": (
        lambda x: fused_ops.rotated(x, ANGLES.cos().to(x.dtype), ANGLES.sin().to(x.dtype)),
        lambda x: rotated(x, ANGLES.cos().to(x.dtype), ANGLES.sin().to(x.dtype)),
        [(1, 3, 700, 8)],
    ),
    "gate": (fused_ops.gated, gated, [(2, 9, 40), (2, 9, 40)]),
    "projection": (fused_ops.gated_projection, projected, [(2, 9, 40), (2, 9, 40), (16, 40)]),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.01)])
@pytest.mark.parametrize("name", CASES)
def test_an_operation_and_its_gradients_are_the_plain_ones(
    name: str, dtype: str, tolerance: float
) -> None:
    ours, plain, shapes = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(getattr(torch, dtype)).requires_grad_() for shape in shapes]
    found, wanted = ours(*inputs), plain(*inputs)
    above = torch.randn(found.shape).to(found.dtype)
    pairs = [(found, wanted)]
    pairs += zip(
        torch.autograd.grad(found, inputs, above),
        torch.autograd.grad(wanted, inputs, above),
        strict=True,
    )
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert (one - other).float().norm() <= tolerance * other.float().norm()


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("settings", [{}, {"logprob_chunk": 16, "gradient_checkpointing": True}])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_fused_model_has_the_log_probs_and_gradients_of_the_plain_one(
    folder: Path, name: str, settings: dict[str, Any], entropy_gradient: bool
) -> None:
    model, batch = write_architecture(folder, name), grouped_batch(1)
    plain, _ = passes(model, batch, entropy_gradient=entropy_gradient, **PLAIN)
    fused, _ = passes(model, batch, entropy_gradient=entropy_gradient, fused="on", **settings)
    assert_same(fused, plain)


def loaded(folder: Path, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(write_architecture(folder, name))


@pytest.mark.parametrize(
    ("name", "count"),
    # Of each of two layers two norms (and those of queries and keys), a rotation and an activation.
    [("llama", 2 * 4 + 1), ("qwen3", 2 * 6 + 1), ("gpt2", 0)],
)
def test_layers_are_fused_where_they_compute_just_that(folder: Path, name: str, count: int) -> None:
    model = loaded(folder, name)
    fuse(model, LearnerConfig(), CPU)
    assert fused_modules(model) == count


def test_another_formula_is_left_alone(folder: Path) -> None:
    """Gemma's norm multiplies by 1 + w, and its activation is another one."""
    model = loaded(folder, "gemma2")
    fuse(model, LearnerConfig(), CPU)
    kinds = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    assert kinds == {"Gemma2Attention"}


def test_a_model_that_turns_out_otherwise_is_put_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(folder, "llama")
    monkeypatch.setattr("rlx.core.engine.learner.fusing.close", lambda *_: False)
    fuse(model, LearnerConfig(), CPU)
    assert not fused_modules(model)


def test_what_must_be_fused_and_cannot_is_an_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="no layers that rlx can fuse"):
        fuse(loaded(folder, "gpt2"), LearnerConfig(fused="on"), CPU)


@pytest.mark.parametrize(
    "settings", [LearnerConfig(fused="off"), LearnerConfig(liger=True)], ids=["off", "liger"]
)
def test_nothing_is_fused_unasked(folder: Path, settings: LearnerConfig) -> None:
    model = loaded(folder, "llama")
    fuse(model, settings, CPU)
    assert not fused_modules(model)


def test_adapters_train_beside_fused_layers(folder: Path) -> None:
    """What an adapter adds to a projection is not passed over."""
    model, batch = write_architecture(folder, "llama"), grouped_batch(2)
    norms = []
    for fused in ("on", "off"):
        learner = started(model, fused=fused, lora={"rank": 4}, lr=0.05)
        metrics = [learner.update([batch], step=step).metrics for step in range(3)]  # type: ignore[union-attr]
        norms.append([one["policy/grad_norm"] for one in metrics])
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)
