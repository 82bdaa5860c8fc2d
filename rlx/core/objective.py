"""From a loss's surrogate per action token to the scalar that is differentiated, and its metrics.

objective = aggregate(w · surrogate + β·k − c·H), with the correction weight w, the KL to the
reference k and the entropy H. Denominators are counts of the whole optimizer step, so the shares
of its micro-batches and ranks add up to the same loss, whatever the packing.

Legend: B rollouts, N action tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from rlx.core.component import tags_of
from rlx.core.errors import ComponentError, UsageError, did_you_mean
from rlx.core.guards import unchanged
from rlx.core.inputs import CorrectionInputs, LossInputs, LossOutputs, Ragged
from rlx.core.kl import kl_penalty
from rlx.core.ragged import Tensor

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
Loss: TypeAlias = Callable[[LossInputs], "Tensor | LossOutputs"]
Correction: TypeAlias = Callable[[CorrectionInputs], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """What the core adds to a loss."""

    aggregation: str
    """One of `AGGREGATIONS`."""
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in_loss: bool = True
    """False: KL is in the reward, here it is only measured."""
    entropy_coef: float = 0.0
    sequence_norm: int = 1
    """Constant length of `seq-mean-token-sum-norm`: `max_new_tokens`."""
    old_from_rollout: bool = False
    """`old_logprobs` are the engine's own: the mismatch is then measured on `logprobs`."""


class Reduction(Protocol):
    """The settings that say how [N] becomes a scalar."""

    @property
    def aggregation(self) -> str: ...

    @property
    def sequence_norm(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts over the whole optimizer step: all micro-batches, all ranks."""

    tokens: int
    """Action tokens."""
    sequences: int
    """Rollouts, those without action tokens included."""


@dataclass(slots=True)
class MetricSums:
    """Additive parts of metrics: a metric is Σ sums / Σ counts, or the maximum of maxima.

    All tensors are detached scalars on the device of the inputs. The keys depend on the settings
    and on which inputs are given, not on the data, so every micro-batch and rank has the same.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: MetricSums | Objective) -> None:
        """Merge another micro-batch (or rank, or optimizer step) into this one."""
        for mine, theirs in ((self.sums, other.sums), (self.counts, other.counts)):
            for name, value in theirs.items():
                mine[name] = mine[name] + value if name in mine else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)

    def pack(self) -> tuple[Tensor, Tensor]:
        """Two flat float64 tensors for all-reduce: the first with SUM, the second with MAX."""
        additive = [*_in_order(self.sums), *_in_order(self.counts)]
        return _stack(additive), _stack(_in_order(self.maxima))

    def unpack(self, additive: Tensor, maxima: Tensor) -> None:
        """Take over reduced tensors in the layout of `pack`."""
        values = iter(additive)
        for target in (self.sums, self.counts):
            for name in sorted(target):
                target[name] = next(values)
        for name, value in zip(sorted(self.maxima), maxima, strict=True):
            self.maxima[name] = value

    def metrics(self) -> dict[str, float]:
        """The finished metrics by name."""
        return finalize_metrics(self.sums, self.counts, self.maxima)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One micro-batch's share of the optimizer step."""

    loss: Tensor
    """Scalar with gradient; shares of all micro-batches and ranks *add up* to the step's loss."""
    per_token: Tensor
    """[N] without gradient: what was reduced to `loss`."""
    sums: dict[str, Tensor]
    counts: dict[str, Tensor]
    maxima: dict[str, Tensor]


def policy_objective(
    x: LossInputs,
    *,
    loss: Loss,
    correction: Correction | None,
    settings: ObjectiveSettings,
    denominators: Denominators,
) -> Objective:
    """One micro-batch's share of the policy's loss, with the additive parts of its metrics.

    `loss` and `correction` are bound components; no correction is computed without
    `x.rollout_logprobs`. Log-probs of −∞ or NaN from the engine leave value and gradient finite.

    Raises:
        ComponentError: the loss or the correction returned another shape than [N].
    """
    finite_old = torch.where(x.old_logprobs.isfinite(), x.old_logprobs, x.logprobs.detach())
    x = x.replace(old_logprobs=finite_old)
    with unchanged(x, loss, "loss"):
        outputs = loss(x)
    if not isinstance(outputs, LossOutputs):
        outputs = LossOutputs(outputs)
    surrogate = _checked(outputs.per_token, x, loss, "loss")
    metrics = _Metrics(x)
    weights = _correction_weights(x, correction, settings, metrics)
    # Selecting, not multiplying, keeps a masked token's surrogate out of value and gradient.
    per_token = torch.where(weights > 0, weights * surrogate, torch.zeros_like(surrogate))
    if x.has("ref_logprobs"):
        kl = kl_penalty(x.logprobs, x.ref_logprobs, settings.kl_estimator)
        metrics.mean("policy/kl_ref", kl)
        if settings.kl_in_loss and settings.kl_coef:
            per_token = per_token + settings.kl_coef * kl
    if x.has("entropy"):
        metrics.mean("policy/entropy", x.entropy)
        if settings.entropy_coef:
            per_token = per_token - settings.entropy_coef * x.entropy
    total = aggregate(per_token, x, settings, denominators)
    metrics.policy(total, outputs, surrogate, denominators)
    return Objective(
        loss=total,
        per_token=per_token.detach(),
        sums=metrics.sums,
        counts=metrics.counts,
        maxima=metrics.maxima,
    )


def aggregate(
    per_token: Tensor, x: Ragged, settings: Reduction, denominators: Denominators
) -> Tensor:
    """Reduce [N] to this micro-batch's share of the step's scalar.

    `token-mean`: Σ_t / tokens. `seq-mean-token-mean`: Σ_b mean_t / sequences, where a rollout of
    several segments is one b.
    `seq-mean-token-sum-norm`: Σ_t / (sequences · sequence_norm) (Dr. GRPO, arXiv:2503.20783).
    """
    sequences = max(denominators.sequences, 1)
    if settings.aggregation == "token-mean":
        return per_token.sum() / max(denominators.tokens, 1)
    if settings.aggregation == "seq-mean-token-mean":
        return _rollout_means(per_token, x) / sequences
    if settings.aggregation == "seq-mean-token-sum-norm":
        return per_token.sum() / (sequences * max(settings.sequence_norm, 1))
    raise UsageError(
        f"There is no aggregation '{settings.aggregation}'.",
        where="algorithm.aggregation",
        fix=did_you_mean(settings.aggregation, AGGREGATIONS) or f"one of {', '.join(AGGREGATIONS)}",
    )


def _rollout_means(per_token: Tensor, x: Ragged) -> Tensor:
    """Sum of the rollouts' means over their tokens, as far as their segments are in `x`."""
    if not x.has("rollout_lengths"):
        return x.sequence_mean(per_token).sum()
    return (x.sequence_sum(per_token) / x.rollout_lengths.clamp(min=1)).sum()


def finalize_metrics(
    sums: Mapping[str, Tensor], counts: Mapping[str, Tensor], maxima: Mapping[str, Tensor]
) -> dict[str, float]:
    """Finished metrics from parts summed (or maximised) over micro-batches and ranks."""
    names, largest = sorted(sums), sorted(maxima)
    totals = _stack([sums[name] for name in names]).tolist()
    numbers = _stack([counts[name] for name in names]).tolist()
    out = {
        name: total / number if number else 0.0
        for name, total, number in zip(names, totals, numbers, strict=True)
    }
    return {**out, **dict(zip(largest, _stack(_in_order(maxima)).tolist(), strict=True))}


def _correction_weights(
    x: LossInputs, correction: Correction | None, settings: ObjectiveSettings, metrics: _Metrics
) -> Tensor:
    ones = torch.ones_like(x.advantages)
    if not x.has("rollout_logprobs"):
        return ones
    metrics.mismatch(settings)
    if correction is None:
        return ones
    c = CorrectionInputs(
        lengths=x.lengths,
        rollout_lengths=x.get("rollout_lengths"),
        group=x.get("group"),
        turn=x.get("turn"),
        old_logprobs=x.old_logprobs.detach(),
        rollout_logprobs=x.rollout_logprobs.detach(),
        metadata=x.metadata,
    )
    with unchanged(c, correction, "correction"):
        answer = correction(c)
    weights = _checked(answer, x, correction, "correction").detach()
    weights = torch.where(weights.isfinite() & (weights > 0), weights, torch.zeros_like(weights))
    metrics.correction(c, correction, weights)
    return weights


class _Metrics(MetricSums):
    """Collects the metric parts of one micro-batch."""

    def __init__(self, x: LossInputs) -> None:
        super().__init__()
        self.x = x

    def mean(self, name: str, values: Tensor, *, over: int | None = None) -> None:
        """A mean over the values (or over `over` of them)."""
        count = values.numel() if over is None else over
        self.sums[name] = values.detach().sum()
        self.counts[name] = self.sums[name].new_tensor(float(count))

    @torch.no_grad()
    def policy(
        self, total: Tensor, outputs: LossOutputs, surrogate: Tensor, denominators: Denominators
    ) -> None:
        x, tokens = self.x, self.x.token_count
        self.sums["policy/loss"] = total.detach()
        # Shares of one optimizer step sum to its loss, and their counts to 1.
        self.counts["policy/loss"] = total.new_tensor(tokens / max(denominators.tokens, 1))
        ratio, log_ratio = x.ratio.detach(), x.log_ratio.detach()
        self.mean("policy/ratio_mean", ratio)
        self.mean("policy/kl_old", ratio - 1 - log_ratio)
        self._clip_rate(surrogate)
        for key, value in outputs.metrics.items():
            value = value.detach().to(ratio.dtype)
            if value.ndim == 0:
                value = value.expand(tokens)
            self.mean(f"policy/{key}", value)

    def _clip_rate(self, surrogate: Tensor) -> None:
        """Share of the action tokens with an advantage that get no gradient from the surrogate."""
        x = self.x
        if not (x.logprobs.requires_grad and surrogate.requires_grad):
            return
        with torch.enable_grad():
            scalar = surrogate.sum()
        (gradient,) = torch.autograd.grad(scalar, x.logprobs, retain_graph=True, allow_unused=True)
        silent = torch.ones_like(x.advantages) if gradient is None else (gradient == 0)
        self.mean("policy/clip_rate", (silent & (x.advantages != 0)).to(x.advantages.dtype))

    @torch.no_grad()
    def mismatch(self, settings: ObjectiveSettings) -> None:
        x = self.x
        learner = x.logprobs if settings.old_from_rollout else x.old_logprobs
        gap = learner.detach() - x.rollout_logprobs
        finite = gap.isfinite()
        gap = torch.where(finite, gap, torch.zeros_like(gap))
        size = gap.abs()
        self.mean("mismatch/logprob_abs_mean", size)
        self.maxima["mismatch/logprob_abs_max"] = size.max() if size.numel() else size.sum()
        self.mean("mismatch/kl", kl_penalty(torch.zeros_like(gap), gap, "k3"))
        self.mean("mismatch/nonfinite_rate", (~finite).to(gap.dtype))

    @torch.no_grad()
    def correction(self, c: CorrectionInputs, correction: Correction, weights: Tensor) -> None:
        masked = weights == 0
        clipped = ~masked & (weights != _unclipped(c, correction, weights))
        self.mean("correction/masked_rate", masked.to(weights.dtype))
        self.mean("correction/clipped_rate", clipped.to(weights.dtype))


def _unclipped(c: CorrectionInputs, correction: Correction, weights: Tensor) -> Tensor:
    """What the weights would be without bounds: the tag `ratio` is token, sequence or none."""
    tags = getattr(correction, "tags", None) or tags_of(correction)
    kind = tags.extra.get("ratio", "token")
    if kind == "none":
        return weights
    return c.sequence_ratio if kind == "sequence" else c.ratio


def _checked(values: Any, x: LossInputs, component: Any, kind: str) -> Tensor:
    name = getattr(component, "name", getattr(component, "__name__", repr(component)))
    if isinstance(values, Tensor) and values.shape == (x.token_count,):
        return values
    got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
    raise ComponentError(
        f"The {kind} '{name}' returned {got}; it must return one value per action token, "
        f"[N] = [{x.token_count}] (the core reduces)."
    )


def _in_order(values: Mapping[str, Tensor]) -> list[Tensor]:
    return [values[name] for name in sorted(values)]


def _stack(values: list[Tensor]) -> Tensor:
    if not values:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([value.to(torch.float64) for value in values])
