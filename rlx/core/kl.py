"""Divergence from the reference model: estimators k1, k2, k3, the reward form, the coefficient.

With d = logprob − ref_logprob of the sampled token (John Schulman, "Approximating KL divergence",
2020): k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, all clamped to ±10. Legend: N action tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rlx.core import ragged
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.ragged import Tensor

KL_LIMIT = 10.0
_EXPONENT_LIMIT = 20.0
ESTIMATORS = ("k1", "k2", "k3")


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) on the policy's own samples: [N] -> [N].

    As values, k1 and k3 are unbiased and k3 and k2 are never negative. As terms *in the loss* on
    policy, the gradient that counts is another matter: k2's, d·∇logprob, is the unbiased gradient
    of the reverse KL; k1's, ∇logprob, has expectation 0 and regularises nothing; k3's,
    (1 − exp(−d))·∇logprob, is that of the forward KL. In the reward k1 is the usual choice.

    Raises:
        UsageError: `estimator` is not k1, k2 or k3.
    """
    d = (logprobs - ref_logprobs).nan_to_num(
        nan=0.0, posinf=_EXPONENT_LIMIT, neginf=-_EXPONENT_LIMIT
    )
    if estimator == "k1":
        k = d
    elif estimator == "k2":
        k = d**2 / 2
    elif estimator == "k3":
        d = d.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
        k = (-d).exp() - 1 + d
    else:
        raise UsageError(
            f"There is no KL estimator '{estimator}'.",
            where="kl.estimator",
            fix=did_you_mean(estimator, ESTIMATORS) or f"one of {', '.join(ESTIMATORS)}",
        )
    return k.clamp(-KL_LIMIT, KL_LIMIT)


def kl_rewards(logprobs: Tensor, ref_logprobs: Tensor, *, coef: float, estimator: str) -> Tensor:
    """−β·k on each action token, without gradient: [N] -> [N]."""
    return -coef * kl_penalty(logprobs.detach(), ref_logprobs.detach(), estimator)


def kl_reward_to_go(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Undiscounted return-to-go of the KL reward within each rollout: [N] -> [N]."""
    return ragged.discounted_sum(rewards, lengths, 1.0)


class KLController(Protocol):
    """Holds the coefficient β and moves it after each training step."""

    @property
    def coef(self) -> float: ...

    def update(self, kl: float, rollouts: int) -> float:
        """Take the step's mean `policy/kl_ref` and its number of rollouts; return the new β."""
        ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: Mapping[str, float]) -> None: ...


class FixedKL:
    """β stays what the configuration says, also when a resumed run's says another one."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, rollouts: int) -> float:
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        pass


class AdaptiveKL(FixedKL):
    """coef ← coef·(1 + clip(kl/target − 1, ±0.2)·n/horizon), n rollouts (arXiv:1909.08593).

    n/horizon counts as 1 at most: a step of more than five horizons would turn β negative.
    """

    def __init__(self, coef: float, *, target: float, horizon: int) -> None:
        super().__init__(coef)
        self.start = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, rollouts: int) -> float:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(rollouts / self.horizon, 1.0)
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"start": self.start, "coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with the β that was reached; with the configured one where that is a new one."""
        if state.get("start") == self.start:
            self.coef = float(state["coef"])


def kl_controller(kind: str, *, coef: float, target: float, horizon: int) -> KLController:
    """The controller named in `kl.controller`; one at 0 never moves."""
    return AdaptiveKL(coef, target=target, horizon=horizon) if kind == "adaptive" else FixedKL(coef)
