"""Every loss against plain Python loops written from its paper, its gradient against differences.

The references take the current log-probs twice: `lp` moves, `frozen` is what a stop-gradient holds
still. So central differences in `lp` are the gradient of the surrogate as its paper defines it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.core.inputs import LossInputs, LossOutputs
from rlx.core.ragged import Tensor
from rlx.plugins.losses.cispo import cispo
from rlx.plugins.losses.clip_cov import clip_cov
from rlx.plugins.losses.dppo_kl import dppo_kl
from rlx.plugins.losses.dppo_tv import dppo_tv
from rlx.plugins.losses.gmpo import gmpo
from rlx.plugins.losses.gspo import gspo
from rlx.plugins.losses.kl_cov import kl_cov
from rlx.plugins.losses.ppo import ppo
from rlx.plugins.losses.reinforce import reinforce
from rlx.plugins.losses.sapo import sapo
from rlx.testing.inputs import loss_inputs


@dataclass(frozen=True)
class Data:
    lp: list[float]
    old: list[float]
    adv: list[float]
    lengths: list[int]

    def spans(self) -> list[range]:
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        return [range(a, a + n) for a, n in zip(starts, self.lengths, strict=True)]


def inputs_of(data: Data) -> LossInputs:
    return loss_inputs(
        logprobs=data.lp, old_logprobs=data.old, advantages=data.adv, lengths=data.lengths
    )


def surrogate(loss: Any, x: LossInputs, **params: Any) -> Tensor:
    out = loss(x, **params)
    return out.per_token if isinstance(out, LossOutputs) else out


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def rho(new: float, old: float) -> float:
    return math.exp(clip(new - old, -20, 20))


Reference = Callable[..., list[float]]


def tokenwise(formula: Callable[..., float]) -> Reference:
    """A reference that looks at one token at a time: formula(lp, frozen, old, A, **params)."""

    def reference(d: Data, frozen: list[float], **params: Any) -> list[float]:
        return [
            formula(lp, fr, old, a, **params)
            for lp, fr, old, a in zip(d.lp, frozen, d.old, d.adv, strict=True)
        ]

    return reference


@tokenwise
def ref_ppo(
    lp: float, frozen: float, old: float, a: float, clip_low: float = 0.2, clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> float:  # fmt: skip
    r = rho(lp, old)
    value = min(r * a, clip(r, 1 - clip_low, 1 + clip_high) * a)
    if dual_clip is not None and a < 0:
        value = max(value, dual_clip * a)
    return -value


@tokenwise
def ref_cispo(
    lp: float, frozen: float, old: float, a: float, clip_low: float = 1.0, clip_high: float = 0.28
) -> float:
    return -clip(rho(frozen, old), 1 - clip_low, 1 + clip_high) * a * lp


@tokenwise
def ref_reinforce(lp: float, frozen: float, old: float, a: float) -> float:
    return -a * lp


@tokenwise
def ref_sapo(
    lp: float, frozen: float, old: float, a: float, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> float:
    tau = tau_pos if a > 0 else tau_neg
    return -4 / tau / (1 + math.exp(-tau * (rho(lp, old) - 1))) * a


def trust_region(lp: float, frozen: float, old: float, a: float, far: bool) -> float:
    ratio = rho(frozen, old)
    away = ratio > 1 if a > 0 else ratio < 1
    return 0.0 if far and away else -rho(lp, old) * a


@tokenwise
def ref_dppo_tv(lp: float, frozen: float, old: float, a: float, delta: float = 0.15) -> float:
    far = abs(math.exp(frozen) - math.exp(old)) > delta
    return trust_region(lp, frozen, old, a, far)


@tokenwise
def ref_dppo_kl(lp: float, frozen: float, old: float, a: float, delta: float = 0.05) -> float:
    p, q = math.exp(old), math.exp(frozen)
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    return trust_region(lp, frozen, old, a, kl > delta)


def ref_gspo(
    d: Data, frozen: list[float], clip_low: float = 3e-4, clip_high: float = 4e-4
) -> list[float]:
    out = []
    for span in d.spans():
        for t in span:
            s = math.exp(clip(sum(frozen[i] - d.old[i] for i in span) / len(span), -20, 20))
            s_t = s * math.exp(d.lp[t] - frozen[t])
            out.append(-min(s_t * d.adv[t], clip(s_t, 1 - clip_low, 1 + clip_high) * d.adv[t]))
    return out


def ref_gmpo(
    d: Data, frozen: list[float], clip_low: float = 0.4, clip_high: float = 0.4
) -> list[float]:
    out = []
    for span in d.spans():
        logs = []
        for t in span:
            sign = 1 if d.adv[t] >= 0 else -1
            log_ratio = d.lp[t] - d.old[t]
            logs.append(sign * min(sign * log_ratio, sign * clip(log_ratio, -clip_low, clip_high)))
        out += [-d.adv[t] * math.exp(sum(logs) / len(logs)) for t in span]
    return out


def chosen_by_covariance(d: Data, fraction: float, low: float, high: float) -> set[int]:
    mean_lp, mean_adv = sum(d.old) / len(d.old), sum(d.adv) / len(d.adv)
    cov = [(o - mean_lp) * (a - mean_adv) for o, a in zip(d.old, d.adv, strict=True)]
    in_band = sorted((c for c in cov if low < c < high), reverse=True)
    count = max(1, int(fraction * len(cov)))
    least = in_band[:count][-1] if in_band else math.inf
    return {i for i, c in enumerate(cov) if low < c < high and c >= least}


def ref_clip_cov(
    d: Data, frozen: list[float], fraction: float = 2e-4, cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> list[float]:  # fmt: skip
    out = ref_ppo(d, frozen)
    for i in chosen_by_covariance(d, fraction, cov_low, cov_high):
        out[i] = 0.0
    return out


def ref_kl_cov(
    d: Data, frozen: list[float], fraction: float = 2e-4, kl_coef: float = 1.0
) -> list[float]:
    chosen = chosen_by_covariance(d, fraction, 0.0, math.inf)
    return [
        -rho(lp, old) * a + (kl_coef * abs(lp - old) if i in chosen else 0.0)
        for i, (lp, old, a) in enumerate(zip(d.lp, d.old, d.adv, strict=True))
    ]


COV = {"fraction": 0.3, "cov_low": 0.05, "cov_high": 2.0}
REFERENCES: list[tuple[Any, Reference, dict[str, Any]]] = [
    (ppo, ref_ppo, {}),
    (ppo, ref_ppo, {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}),
    (gspo, ref_gspo, {}),
    (gspo, ref_gspo, {"clip_low": 0.3, "clip_high": 0.1}),
    (cispo, ref_cispo, {}),
    (cispo, ref_cispo, {"clip_low": 0.2, "clip_high": 1.0}),
    (reinforce, ref_reinforce, {}),
    (gmpo, ref_gmpo, {}),
    (gmpo, ref_gmpo, {"clip_low": 0.1, "clip_high": 0.2}),
    (sapo, ref_sapo, {}),
    (sapo, ref_sapo, {"tau_pos": 2.0, "tau_neg": 0.5}),
    (dppo_tv, ref_dppo_tv, {}),
    (dppo_tv, ref_dppo_tv, {"delta": 0.01}),
    (dppo_kl, ref_dppo_kl, {}),
    (dppo_kl, ref_dppo_kl, {"delta": 0.001}),
    (clip_cov, ref_clip_cov, COV),
    (kl_cov, ref_kl_cov, {"fraction": 0.3, "kl_coef": 0.7}),
]
IDS = [f"{loss.__name__}-{params}" for loss, _, params in REFERENCES]
LOSSES = [ppo, gspo, cispo, reinforce, gmpo, sapo, dppo_tv, dppo_kl, clip_cov, kl_cov]


@st.composite
def ragged_lengths(draw: st.DrawFn) -> list[int]:
    lengths = draw(st.lists(st.sampled_from([0, 1, 1, 2, 4]), min_size=1, max_size=4))
    return lengths if sum(lengths) else [*lengths, 1]


@st.composite
def datasets(draw: st.DrawFn) -> Data:
    lengths = draw(ragged_lengths())

    def numbers(low: float, high: float) -> list[float]:
        n = sum(lengths)
        return draw(st.lists(st.floats(low, high), min_size=n, max_size=n))

    # Eighths: ranks and signs then come out the same however a sum is rounded.
    adv = [round(a * 8) / 8 for a in numbers(-3, 3)]
    return Data(numbers(-5, -0.01), numbers(-5, -0.01), adv, lengths)


def random_data(seed: int, lengths: Sequence[int] = (3, 0, 1, 5, 2)) -> Data:
    """Ratios on both sides of every bound, and no value on a kink."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    old = -3 * torch.rand(n, generator=generator, dtype=torch.float64) - 0.2
    lp = old + 0.4 * torch.randn(n, generator=generator, dtype=torch.float64)
    adv = torch.randn(n, generator=generator, dtype=torch.float64)
    return Data(lp.clamp(max=-0.01).tolist(), old.tolist(), adv.tolist(), list(lengths))


@pytest.mark.parametrize(("loss", "reference", "params"), REFERENCES, ids=IDS)
def test_loss_equals_its_reference(loss: Any, reference: Reference, params: Any) -> None:
    # Ranks of nearly equal covariances depend on rounding; take generic values there.
    ranks = loss in (clip_cov, kl_cov)
    generic = st.builds(random_data, st.integers(0, 2**32), ragged_lengths())

    @settings(max_examples=100 if ranks else 40)
    @given(generic if ranks else datasets())
    def check(data: Data) -> None:
        found = surrogate(loss, inputs_of(data), **params)
        expected = reference(data, data.lp, **params)
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)

    check()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("loss", "reference", "params"), REFERENCES, ids=IDS)
def test_gradient_equals_central_differences(
    loss: Any, reference: Reference, params: Any, seed: int
) -> None:
    data = random_data(seed)
    weights = [math.cos(i) for i in range(len(data.lp))]
    x = inputs_of(data)
    (surrogate(loss, x, **params) * torch.tensor(weights, dtype=torch.float64)).sum().backward()

    def total(lp: list[float]) -> float:
        moved = Data(lp, data.old, data.adv, data.lengths)
        values = reference(moved, data.lp, **params)
        return sum(w * v for w, v in zip(weights, values, strict=True))

    step = 1e-6
    expected = []
    for i in range(len(data.lp)):
        up, down = list(data.lp), list(data.lp)
        up[i] += step
        down[i] -= step
        expected.append((total(up) - total(down)) / (2 * step))
    assert x.logprobs.grad is not None
    assert x.logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_log_ratios_leave_value_and_gradient_finite(loss: Any, dtype: torch.dtype) -> None:
    logprobs = torch.tensor([-1e4, -1e-4, -1e4, -0.5, 0.0, -1.0, -2.0, -1.0], dtype=dtype)
    old = torch.tensor([-1e-4, -1e4, -1e4, 0.0, -1e4, -torch.inf, torch.nan, -1.0], dtype=dtype)
    for sign in (1.0, -1.0):
        leaf = logprobs.clone().requires_grad_()
        x = loss_inputs(
            logprobs=leaf,
            old_logprobs=old,
            advantages=sign * torch.tensor([1, -1, 2, 0, 3, -1, 1, 1], dtype=dtype),
            lengths=[2, 3, 0, 3],
        )
        out = surrogate(loss, x)
        out.sum().backward()
        assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert out.isfinite().all()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_gradient_is_the_policy_gradient(loss: Any) -> None:
    data = random_data(0)
    advantages = [1.5] * 3 + [-0.5] + [0.75] * 5 + [-2.0] * 2
    x = loss_inputs(logprobs=data.old, advantages=advantages, lengths=data.lengths)
    params = {"cov_low": 1e9, "cov_high": 1e10} if loss is clip_cov else {}
    params = {"kl_coef": 0.0} if loss is kl_cov else params
    surrogate(loss, x, **params).sum().backward()
    assert x.logprobs.grad is not None
    assert torch.allclose(x.logprobs.grad, -x.advantages)


@pytest.mark.parametrize("loss", LOSSES)
def test_inputs_are_not_mutated(loss: Any) -> None:
    data = random_data(1)
    x = inputs_of(data)
    surrogate(loss, x).sum().backward()
    assert x.logprobs.tolist() == data.lp
    assert x.old_logprobs.tolist() == data.old
    assert x.advantages.tolist() == data.adv


@pytest.mark.parametrize("loss", LOSSES)
def test_rollouts_without_action_tokens_are_answered_with_none(loss: Any) -> None:
    x = loss_inputs(logprobs=[], old_logprobs=[], advantages=[], lengths=[0, 0])
    out = surrogate(loss, x)
    assert out.shape == (0,)
    out.sum().backward()


def test_ppo_closed_forms() -> None:
    x = loss_inputs(
        logprobs=[math.log(0.6), math.log(0.6), math.log(0.2), math.log(0.2)],
        old_logprobs=[math.log(0.3), math.log(0.3), math.log(0.4), math.log(0.4)],
        advantages=[1.0, -1.0, 1.0, -1.0],
    )
    out = ppo(x, clip_high=0.28)
    assert out.tolist() == pytest.approx([-1.28, 2.0, -0.5, 0.8])
    assert ppo(x, dual_clip=1.5)[1].item() == pytest.approx(1.5)
    out.sum().backward()
    assert x.logprobs.grad is not None
    assert x.logprobs.grad.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0])


def test_gspo_gradient_is_that_of_its_sequence_objective() -> None:
    data = random_data(3)
    data = Data(data.lp, data.old, [1.0] * 3 + [-2.0] + [0.5] * 5 + [-1.0] * 2, data.lengths)
    x = inputs_of(data)
    wide = {"clip_low": 5.0, "clip_high": 50.0}
    x.sequence_mean(gspo(x, **wide)).sum().backward()
    leaf = x.logprobs.detach().clone().requires_grad_()
    sequence_ratio = x.sequence_mean(leaf - x.old_logprobs).exp()
    (-sequence_ratio * x.sequence_mean(x.advantages)).sum().backward()
    assert torch.allclose(x.logprobs.grad, leaf.grad)


def test_gspo_gives_all_tokens_of_a_rollout_the_same_ratio_in_float32() -> None:
    """At the size of its clip, 3e-4, rounding a sum with a log-prob of −15 would show."""
    old = torch.tensor([-15.3, -0.01, -3.7, -9.1], dtype=torch.float32)
    new = old + torch.tensor([2e-4, 1e-4, 0.0, 3e-4], dtype=torch.float32)
    x = loss_inputs(logprobs=new, old_logprobs=old, advantages=torch.ones(4), lengths=[4])
    found = gspo(x)
    assert found.dtype == torch.float32
    assert found.unique().numel() == 1
    assert -found[0].item() == pytest.approx((new - old).double().mean().exp().item(), abs=1e-7)


def test_divergence_bound_spares_a_rare_token_that_the_ratio_clip_silences() -> None:
    rare = {"logprobs": [math.log(3e-4)], "old_logprobs": [math.log(1e-4)], "advantages": [1.0]}
    for loss, grows in ((ppo, False), (dppo_tv, True), (dppo_kl, True)):
        x = loss_inputs(**rare)
        loss(x).sum().backward()
        assert (x.logprobs.grad.item() != 0) == grows


def test_divergence_bound_masks_only_moves_further_away() -> None:
    x = loss_inputs(
        logprobs=[math.log(0.9), math.log(0.9), math.log(0.3), math.log(0.3)],
        old_logprobs=[math.log(0.6)] * 4,
        advantages=[1.0, -1.0, 1.0, -1.0],
    )
    assert dppo_tv(x).tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])


def test_covariance_is_ranked_over_the_whole_step() -> None:
    own = {"logprobs": [-1.0, -2.0], "old_logprobs": [-1.0, -2.0], "advantages": [1.0, -1.0]}
    alone = kl_cov(loss_inputs(**own))
    assert alone.metrics["cov_penalty_rate"].tolist() == [True, True]
    step = {"step_old_logprobs": [-1.0, -2.0, 5.0], "step_advantages": [1.0, -1.0, 9.0]}
    within = kl_cov(loss_inputs(**own, **step))
    assert within.metrics["cov_penalty_rate"].tolist() == [False, False]


@pytest.mark.parametrize(("fraction", "chosen"), [(0.0, 0), (1e-6, 1), (0.5, 5), (1.0, 7)])
def test_fraction_of_covariance_losses_is_of_the_steps_tokens(fraction: float, chosen: int) -> None:
    """Seven of the eleven tokens have a positive covariance."""
    x = inputs_of(random_data(0))
    assert int(kl_cov(x, fraction=fraction).metrics["cov_penalty_rate"].sum()) == chosen
    wide = {"cov_low": 0.0, "cov_high": 1e9}
    assert int(clip_cov(x, fraction=fraction, **wide).metrics["cov_clip_rate"].sum()) == chosen


def test_constant_advantages_have_no_covariance_to_penalise() -> None:
    x = loss_inputs(logprobs=[-1.0, -2.0, -3.0], advantages=[1.0, 1.0, 1.0])
    assert not kl_cov(x, fraction=1.0).metrics["cov_penalty_rate"].any()
