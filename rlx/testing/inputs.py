"""Build the inputs of estimators, losses and corrections from plain lists or tensors.

Lists of numbers become float64 tensors, tensors keep their dtype: float64 in, float64 out.
Legend: B rollouts, N action tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from rlx.core.errors import UsageError
from rlx.core.inputs import CorrectionInputs, EstimatorInputs, LossInputs
from rlx.core.ragged import Tensor

Numbers: TypeAlias = Sequence[float] | Tensor


def estimator_inputs(
    *,
    rewards: Numbers,
    group: Numbers | None = None,
    lengths: Numbers | None = None,
    token_rewards: Numbers | None = None,
    turn: Numbers | None = None,
    parts: Mapping[str, Numbers] | None = None,
    part_weights: Mapping[str, float] | None = None,
    greedy_rewards: Numbers | None = None,
    metadata: Mapping[str, Any] | None = None,
    **per_token: Numbers,
) -> EstimatorInputs:
    """A batch for an estimator.

    Args:
        rewards: [B].
        group: [B]; unset: one group.
        lengths: [B] action tokens per rollout; unset: one each.
        token_rewards: [N]; unset: each rollout's reward on its last action token.
        turn: [N]; unset: a single turn.
        parts: reward components by name, each [B].
        part_weights: their weights, 1 where unset.
        greedy_rewards: [B].
        metadata: passed on.
        per_token: `values`, `old_logprobs`, `ref_logprobs`, `rollout_logprobs`, `kl_rewards`,
            `entropy`, each [N]; `logprobs` is the same as `old_logprobs` unless given.

    Raises:
        UsageError: a tensor's length does not fit `lengths`.

    >>> x = estimator_inputs(rewards=[1.0, 0.0], lengths=[2, 1])
    >>> x.token_rewards.tolist(), x.group_mean(x.rewards).tolist()
    ([0.0, 1.0, 0.0], [0.5, 0.5])
    """
    rewards = _floats(rewards)
    B = rewards.shape[0]
    lengths = torch.ones(B, dtype=torch.int64) if lengths is None else _integers(lengths)
    N = int(lengths.sum())
    if "old_logprobs" in per_token:
        per_token = {"logprobs": per_token["old_logprobs"], **per_token}
    optional: dict[str, Any] = {name: _floats(values) for name, values in per_token.items()}
    if parts is not None:
        optional["parts"] = {name: _floats(part) for name, part in parts.items()}
    if greedy_rewards is not None:
        optional["greedy_rewards"] = _floats(greedy_rewards)
    x = EstimatorInputs(
        rewards=rewards,
        lengths=lengths,
        group=torch.zeros(B, dtype=torch.int64) if group is None else _integers(group),
        turn=torch.zeros(N, dtype=torch.int64) if turn is None else _integers(turn),
        token_rewards=_on_last_token(rewards, lengths)
        if token_rewards is None
        else _floats(token_rewards),
        part_weights=part_weights or {},
        metadata=metadata or {},
        **optional,
    )
    _check(x, B, ("group", "lengths", "greedy_rewards"), "rollouts")
    _check(x, N, ("token_rewards", "kl_rewards", "turn", *per_token), "action tokens")
    return x


def loss_inputs(
    *,
    logprobs: Numbers,
    advantages: Numbers,
    old_logprobs: Numbers | None = None,
    lengths: Numbers | None = None,
    group: Numbers | None = None,
    turn: Numbers | None = None,
    metadata: Mapping[str, Any] | None = None,
    **per_token: Numbers,
) -> LossInputs:
    """A micro-batch for a loss.

    Args:
        logprobs: [N]; a list becomes a leaf that requires a gradient, a tensor stays as it is.
        advantages: [N].
        old_logprobs: [N]; unset: exactly on policy.
        lengths: [B] action tokens per rollout; unset: one rollout.
        group: [B]; unset: one group.
        turn: [N]; unset: a single turn.
        metadata: passed on.
        per_token: `rollout_logprobs`, `ref_logprobs`, `entropy`, each [N], and
            `step_old_logprobs`, `step_advantages`, each [M].

    Raises:
        UsageError: a tensor's length does not fit `lengths`.
    """
    given = isinstance(logprobs, Tensor)
    logprobs = _floats(logprobs) if given else _floats(logprobs).requires_grad_()
    N = logprobs.shape[0]
    lengths = torch.tensor([N]) if lengths is None else _integers(lengths)
    B = lengths.shape[0]
    x = LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() if old_logprobs is None else _floats(old_logprobs),
        advantages=_floats(advantages),
        lengths=lengths,
        group=torch.zeros(B, dtype=torch.int64) if group is None else _integers(group),
        turn=torch.zeros(N, dtype=torch.int64) if turn is None else _integers(turn),
        metadata=metadata or {},
        **{name: _floats(values) for name, values in per_token.items()},
    )
    _check(x, B, ("group",), "rollouts")
    own = ("old_logprobs", "advantages", "turn", "rollout_logprobs", "ref_logprobs", "entropy")
    _check(x, N, own, "action tokens")
    _check_total(lengths, N)
    return x


def correction_inputs(
    *,
    old_logprobs: Numbers,
    rollout_logprobs: Numbers,
    lengths: Numbers | None = None,
    group: Numbers | None = None,
    turn: Numbers | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> CorrectionInputs:
    """A micro-batch for a correction: log-probs [N] of the learner and of the engine.

    Args:
        old_logprobs: [N], the learner's.
        rollout_logprobs: [N], the engine's.
        lengths: [B] action tokens per rollout; unset: one rollout.
        group: [B]; unset: one group.
        turn: [N]; unset: a single turn.
        metadata: passed on.

    Raises:
        UsageError: a tensor's length does not fit `lengths`.
    """
    old = _floats(old_logprobs)
    N = old.shape[0]
    lengths = torch.tensor([N]) if lengths is None else _integers(lengths)
    B = lengths.shape[0]
    x = CorrectionInputs(
        old_logprobs=old,
        rollout_logprobs=_floats(rollout_logprobs),
        lengths=lengths,
        group=torch.zeros(B, dtype=torch.int64) if group is None else _integers(group),
        turn=torch.zeros(N, dtype=torch.int64) if turn is None else _integers(turn),
        metadata=metadata or {},
    )
    _check(x, B, ("group",), "rollouts")
    _check(x, N, ("rollout_logprobs", "turn"), "action tokens")
    _check_total(lengths, N)
    return x


def _floats(values: Numbers) -> Tensor:
    if isinstance(values, Tensor):
        return values
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _integers(values: Numbers) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.tensor(list(values))
    return tensor.to(torch.int64)


def _on_last_token(rewards: Tensor, lengths: Tensor) -> Tensor:
    tokens = rewards.new_zeros(int(lengths.sum()))
    some = lengths > 0
    return tokens.index_put((lengths.cumsum(0)[some] - 1,), rewards[some])


def _check(x: Any, count: int, names: Sequence[str], what: str) -> None:
    for name in names:
        value = x.get(name)
        if isinstance(value, Tensor) and value.shape != (count,):
            raise UsageError(
                f"{name} has shape {list(value.shape)}, but there are {count} {what}.",
                fix=f"give one value for each of the {what}",
            )


def _check_total(lengths: Tensor, count: int) -> None:
    if int(lengths.sum()) != count:
        raise UsageError(
            f"lengths add up to {int(lengths.sum())}, but there are {count} action tokens.",
            fix="lengths holds the number of action tokens of each rollout",
        )
