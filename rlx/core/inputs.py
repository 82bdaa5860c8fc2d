"""What estimators, losses and corrections are given, and what they may give back.

Legend: B rollouts, N action tokens, M action tokens of the whole optimizer step. Every per-token
tensor is flat over action tokens [N]; `lengths [B]` (zeros allowed) says whose they are, and the
helpers reach sequences and groups, so that no component pads or masks. bfloat16 and float16 inputs
are computed in float32; float32 and float64 are kept.
"""

# ruff: noqa: RUF009 - the descriptors below are the fields' storage, shared on purpose

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Self

import torch

from rlx.core import ragged
from rlx.core.errors import ComponentError
from rlx.core.ragged import Tensor

LOG_RATIO_LIMIT = 20.0


class MissingInputError(ComponentError, AttributeError):
    """A component read an input that nobody computed, because it is not in its `requires`."""


class _Optional:
    """Descriptor of a field that is None until somebody asks for it; reading None is an error."""

    def __init__(self, hint: str) -> None:
        self.hint = hint

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return None  # what the dataclass takes as the default
        value = instance.__dict__.get(self.name)
        if value is None:
            raise MissingInputError(
                f"x.{self.name} was not computed for this component. {self.hint}"
            )
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.name] = value


def _requires(tag: str) -> Any:
    return _Optional(f'Ask for it: @rlx.component(requires={{"{tag}"}}).')


def _given(hint: str) -> Any:
    return _Optional(hint)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Ragged:
    """Structure that all inputs share: B sequences on one axis of N action tokens."""

    _per_token: ClassVar[str] = "turn"

    lengths: Tensor
    """[B] int64, action tokens per rollout; may be 0."""
    group: Tensor = _given("These inputs carry no group index.")
    """[B] int64, rollouts of the same task share it."""
    turn: Tensor = _given("These inputs carry no turn index.")
    """[N] int64, index of the token's turn within its rollout."""
    rollout_lengths: Tensor = _given("Every rollout is one sequence: see `lengths`.")
    """[B] int64, action tokens of the whole rollout that a sequence is a segment of; given to
    losses and corrections, whose sequences are segments, where a rollout has several."""

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                self.__dict__[name] = ragged.at_least_float32(value)

    def __repr__(self) -> str:
        given = [f.name for f in fields(self) if self.__dict__.get(f.name) is not None]
        return f"{type(self).__name__}(B={self.sequence_count}, {', '.join(given)})"

    def has(self, name: str) -> bool:
        """Whether the optional field `name` was given."""
        return self.__dict__.get(name) is not None

    def get(self, name: str) -> Any:
        """The optional field `name`, or None when it was not given."""
        return self.__dict__.get(name)

    def replace(self, **changes: Any) -> Self:
        """Copy with some fields changed (absent fields stay absent)."""
        kept = {f.name: self.__dict__.get(f.name) for f in fields(self)}
        return type(self)(**{**kept, **changes})

    @property
    def token_count(self) -> int:
        """N."""
        tokens: Tensor = getattr(self, self._per_token)
        return tokens.shape[0]

    @property
    def sequence_count(self) -> int:
        """B."""
        return self.lengths.shape[0]

    @cached_property
    def sequence_index(self) -> Tensor:
        """[N] int64, the rollout of each action token."""
        return ragged.sequence_index(self.lengths, self.token_count)

    @cached_property
    def group_index(self) -> Tensor:
        """[B] int64, `group` renumbered 0 … P − 1."""
        return torch.unique(self.group, return_inverse=True)[1]

    def to_tokens(self, values: Tensor) -> Tensor:
        """Repeat each rollout's value on its action tokens: [B] -> [N]."""
        return values.index_select(0, self.sequence_index)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[N] -> [B]; 0 for a rollout without action tokens."""
        return ragged.segment_sum(values, self.sequence_index, self.sequence_count)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[N] -> [B]; 0 for a rollout without action tokens."""
        return self.sequence_sum(values) / self.lengths.clamp(min=1)

    def discounted_sum(self, values: Tensor, gamma: float = 1.0) -> Tensor:
        """Reverse discounted sum within each rollout: [N] -> [N]."""
        return ragged.discounted_sum(values, self.lengths, gamma)

    def next_token(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Value of the rollout's next action token, `fill` on its last: [N] -> [N]."""
        return ragged.next_token(values, self.lengths, fill)

    def group_sum(self, values: Tensor) -> Tensor:
        """Sum over each rollout's group: [B] -> [B]."""
        return ragged.group_sum(values, self.group_index)

    def group_mean(self, values: Tensor) -> Tensor:
        """Mean over each rollout's group: [B] -> [B]; exact for a constant group."""
        return ragged.group_mean(values, self.group_index)

    def group_std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation of each rollout's group: [B] -> [B]; 0 for one rollout."""
        return ragged.group_std(values, self.group_index)

    def group_max(self, values: Tensor) -> Tensor:
        """Largest value of each rollout's group: [B] -> [B]."""
        return ragged.group_max(values, self.group_index)

    @property
    def group_size(self) -> Tensor:
        """[B] int64, rollouts in each rollout's group."""
        return ragged.group_size(self.group_index)

    @property
    def group_count(self) -> int:
        """P, the number of groups."""
        return int(self.group_index.max()) + 1 if self.group_index.numel() else 0

    def leave_one_out_mean(self, values: Tensor) -> Tensor:
        """Mean of the group's other rollouts: [B] -> [B]; alone, a rollout gets its own value."""
        return ragged.leave_one_out_mean(values, self.group_index)

    def batch_mean(self, values: Tensor) -> Tensor:
        """Mean of all values, as a scalar."""
        return ragged.mean(values)

    def batch_std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation of all values, as a scalar; 0 of fewer than two."""
        return ragged.std(values)

    def whiten(self, values: Tensor, *, scale: bool = True) -> Tensor:
        """Centre; with `scale` also divide by sqrt(max(biased variance, 1e-8))."""
        return ragged.whiten(values, scale=scale)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EstimatorInputs(Ragged):
    """The batch of one training step, as an estimator sees it."""

    _per_token: ClassVar[str] = "token_rewards"

    rewards: Tensor
    """[B], outcome plus per-turn rewards, summed over the rollout (no KL in it)."""
    token_rewards: Tensor
    """[N], each reward on the last action token of its turn, plus `kl_rewards`."""
    kl_rewards: Tensor = _given("KL is not placed in the reward.")
    """[N], −β·k on each token; zeros when KL is not in the reward."""
    values: Tensor = _requires("values")
    """[N], the critic's value before each action token."""
    logprobs: Tensor = _requires("old_logprobs")
    """[N], under the policy that is about to be trained; the same as `old_logprobs`."""
    old_logprobs: Tensor = _requires("old_logprobs")
    """[N], under the weights before the step."""
    ref_logprobs: Tensor = _requires("ref_logprobs")
    """[N], under the reference model."""
    rollout_logprobs: Tensor = _given("The rollout engine reported no log-probs.")
    """[N], the engine's, of the distribution that was sampled from."""
    entropy: Tensor = _requires("entropy")
    """[N], of the tempered distribution."""
    parts: Mapping[str, Tensor] = _given("The rewards have no named parts.")
    """Each reward component's score by name, [B], before weights."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each part; a part that is not named has weight 1."""
    greedy_rewards: Tensor = _given(
        "Ask for one greedy rollout per task: @rlx.component(greedy=True)."
    )
    """[B], reward of the greedy rollout of the same task."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Ragged.__post_init__(self)
        if not self.has("kl_rewards"):
            self.__dict__["kl_rewards"] = torch.zeros_like(self.token_rewards)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LossInputs(Ragged):
    """One micro-batch, as a loss sees it. Rollouts are never split between micro-batches."""

    _per_token: ClassVar[str] = "logprobs"

    logprobs: Tensor
    """[N] with gradient, under the weights that are being trained."""
    old_logprobs: Tensor
    """[N], under the weights before the step; `logprobs.detach()` when exactly on policy."""
    advantages: Tensor
    """[N]."""
    rollout_logprobs: Tensor = _given("The rollout engine reported no log-probs.")
    """[N], the engine's, of the distribution that was sampled from."""
    ref_logprobs: Tensor = _requires("ref_logprobs")
    """[N], under the reference model."""
    entropy: Tensor = _requires("entropy")
    """[N], of the tempered distribution; with gradient when it is in the loss."""
    step_old_logprobs: Tensor = _requires("old_logprobs")
    """[M], `old_logprobs` of the whole optimizer step (all micro-batches and ranks), in any order;
    the same order as `step_advantages`. Without either, this micro-batch is the whole step."""
    step_advantages: Tensor = _given("")
    """[M], `advantages` of the whole optimizer step."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """`step`: number of the training step, for losses with state."""

    def __post_init__(self) -> None:
        Ragged.__post_init__(self)
        if not (self.has("step_old_logprobs") or self.has("step_advantages")):
            self.__dict__["step_old_logprobs"] = self.old_logprobs
            self.__dict__["step_advantages"] = self.advantages

    @property
    def log_ratio(self) -> Tensor:
        """[N] with gradient: logprobs − old_logprobs within ±20; 0 where that is not a number."""
        return bounded(self.logprobs - self.old_logprobs)

    @property
    def ratio(self) -> Tensor:
        """[N] with gradient: exp(log_ratio), always finite."""
        return self.log_ratio.exp()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CorrectionInputs(Ragged):
    """One micro-batch, as a correction of the engine/learner mismatch sees it; no gradients."""

    _per_token: ClassVar[str] = "old_logprobs"

    old_logprobs: Tensor
    """[N], the learner's."""
    rollout_logprobs: Tensor
    """[N], the engine's, of the distribution that was sampled from."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def log_ratio(self) -> Tensor:
        """[N]: old − rollout within ±20; a log-prob that is not a number counts as −∞."""
        rollout = torch.where(self.rollout_logprobs.isnan(), -torch.inf, self.rollout_logprobs)
        return bounded(self.old_logprobs - rollout).detach()

    @property
    def ratio(self) -> Tensor:
        """[N]: importance ratio of each token, learner over engine."""
        return self.log_ratio.exp()

    @property
    def sequence_ratio(self) -> Tensor:
        """[N]: importance ratio of the token's whole rollout, the product of its `ratio`."""
        return self.to_tokens(bounded(self.sequence_sum(self.log_ratio)).exp())

    @property
    def sequence_mean_ratio(self) -> Tensor:
        """[N]: geometric mean of `ratio` over the token's rollout."""
        return self.to_tokens(self.sequence_mean(self.log_ratio).exp())


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an estimator with a critic returns; plain estimators return a tensor."""

    advantages: Tensor
    """[B] or [N]."""
    returns: Tensor | None = None
    """[N], regression target of the critic."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """What a loss with metrics of its own returns; plain losses return a tensor."""

    per_token: Tensor
    """[N], the surrogate."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Logged as `policy/<key>`: [N] is averaged over action tokens, [B] over rollouts, a scalar
    over micro-batches by their action tokens. `clip_rate` replaces the core's own."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp to ±20 (±∞ included) and set NaN to 0; the gradient is 0 wherever that changed it."""
    limit = LOG_RATIO_LIMIT
    return log_ratio.nan_to_num(nan=0.0, posinf=limit, neginf=-limit).clamp(-limit, limit)
