"""Runs an estimator and makes its answer what the learner needs: advantages per action token.

Legend: B rollouts, N action tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from rlx.core.component import tags_of
from rlx.core.errors import ComponentError, NonFiniteError
from rlx.core.guards import unchanged
from rlx.core.inputs import Advantages, EstimatorInputs
from rlx.core.kl import kl_reward_to_go, kl_rewards
from rlx.core.ragged import Tensor

Estimator: TypeAlias = Callable[[EstimatorInputs], "Tensor | Advantages"]

_PER_TOKEN = (
    "token_rewards",
    "kl_rewards",
    "turn",
    "values",
    "logprobs",
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "entropy",
)


def estimate(
    estimator: Estimator,
    x: EstimatorInputs,
    *,
    kl_coef: float = 0.0,
    kl_estimator: str = "k1",
    kl_in_reward: bool = False,
    require_finite: bool = True,
) -> Advantages:
    """Advantages [N] (and returns [N], when the estimator gives them), all finite if required.

    With `kl_in_reward`, −β·k is part of `x.token_rewards` and `x.kl_rewards`; an estimator that
    answers [B] speaks of outcomes only, and gets the return-to-go of −β·k added to its tokens.

    Raises:
        ComponentError: another shape than [B] or [N], or another type.
        NonFiniteError: a value is not finite; `token` is the first one's place on the axis [N].
        MissingInputError: the estimator read an input that it does not require.
    """
    if kl_in_reward and kl_coef:
        logprobs = x.old_logprobs if x.has("old_logprobs") else x.rollout_logprobs
        kl = kl_rewards(logprobs, x.ref_logprobs, coef=kl_coef, estimator=kl_estimator)
        x = x.replace(kl_rewards=kl, token_rewards=x.token_rewards + kl)
    with torch.no_grad():
        with unchanged(x, estimator, "estimator"):
            answer = _as_advantages(estimator(x), estimator)
        advantages = answer.advantages
        if _speaks_of_rollouts(advantages, estimator, x):
            advantages = x.to_tokens(advantages)
            if kl_in_reward and kl_coef:
                advantages = advantages + kl_reward_to_go(x.kl_rewards, x.lengths)
    if require_finite:
        _check_finite(advantages, "advantages", estimator)
    if answer.returns is not None:
        if answer.returns.shape != (x.token_count,):
            raise _wrong_shape(answer.returns, "returns", estimator, x, allowed="[N]")
        if require_finite:
            _check_finite(answer.returns, "returns", estimator)
    return Advantages(
        advantages, answer.returns, {**answer.metrics, **_group_metrics(estimator, x)}
    )


def _as_advantages(answer: Any, estimator: Estimator) -> Advantages:
    if isinstance(answer, Advantages):
        return answer
    if isinstance(answer, Tensor):
        return Advantages(answer)
    raise ComponentError(
        f"The estimator '{_name(estimator)}' returned {type(answer).__name__}; it must return a "
        "tensor [B] or [N], or rlx.Advantages(advantages, returns=…)."
    )


def _speaks_of_rollouts(advantages: Tensor, estimator: Estimator, x: EstimatorInputs) -> bool:
    """Whether the answer is [B]; checks that it is [B] or [N]."""
    B, N = x.sequence_count, x.token_count
    if advantages.ndim != 1 or advantages.shape[0] not in (B, N):
        raise _wrong_shape(advantages, "advantages", estimator, x, allowed="[B] or [N]")
    if B != N:
        return advantages.shape[0] == B
    if B == 0:
        return False
    # As many tokens as rollouts: ask again with every token twice, and see which axis grew.
    state = estimator.state_dict() if hasattr(estimator, "state_dict") else {}
    again = _as_advantages(estimator(_with_tokens_twice(x)), estimator).advantages
    if state:
        estimator.load_state_dict(state)  # type: ignore[attr-defined]
    return again.shape[0] == B


def _with_tokens_twice(x: EstimatorInputs) -> EstimatorInputs:
    twice = {name: x.get(name).repeat_interleave(2) for name in _PER_TOKEN if x.has(name)}
    return x.replace(lengths=x.lengths * 2, **twice)


def _check_finite(values: Tensor, what: str, estimator: Estimator) -> None:
    bad = ~values.isfinite()
    if bad.any():
        first = int(bad.nonzero()[0])
        raise NonFiniteError(
            f"The estimator '{_name(estimator)}' returned {what} with {int(bad.sum())} of "
            f"{values.numel()} values not finite (the first is {values[first].item()} at {first}).",
            token=first,
        )


def _wrong_shape(
    values: Tensor, what: str, estimator: Estimator, x: EstimatorInputs, *, allowed: str
) -> ComponentError:
    return ComponentError(
        f"The estimator '{_name(estimator)}' returned {what} of shape {list(values.shape)}; "
        f"expected {allowed} with B = {x.sequence_count} rollouts and N = {x.token_count} tokens."
    )


def _group_metrics(estimator: Estimator, x: EstimatorInputs) -> dict[str, float]:
    """Groups that were left with one rollout, where the estimator compares within groups."""
    tags = getattr(estimator, "tags", None) or tags_of(estimator)
    if "groups" not in tags.requires or not x.sequence_count:
        return {}
    return {"group/single": float((x.group_size == 1).sum())}


def _name(estimator: Estimator) -> str:
    return str(getattr(estimator, "name", getattr(estimator, "__name__", repr(estimator))))
