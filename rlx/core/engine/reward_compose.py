"""From the replies of several rewards to one number per rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.core.config import RewardPolicy, short_names
from rlx.core.engine.interfaces import RewardReply
from rlx.core.rewards import RewardInputs

_TAKEN = ("mean", "std", "failed")
"""`reward/<name>` that the core logs itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """The reward of one rollout."""

    reward: float
    """Weighted sum of the parts, clipped unless rewards are normalised."""
    parts: Mapping[str, float]
    """Score by part name, before weights; rewards that don't apply are missing."""
    metrics: Mapping[str, float]
    notes: Mapping[str, str] = field(default_factory=dict)
    """By part name, of the rewards that left one."""
    errors: tuple[str, ...] = ()
    """One text for each reward that failed; `parts` has the policy's default in its place."""


class RewardComposer:
    """Weights, clips and names what the rewards of one rollout replied."""

    def __init__(self, rewards: Sequence[tuple[Any, float]], policy: RewardPolicy) -> None:
        self.names = part_names([ref.name for ref, _ in rewards])
        self.weights = {name: weight for name, (_, weight) in zip(self.names, rewards, strict=True)}
        self._policy = policy

    def compose(self, sample: RewardInputs, replies: Sequence[RewardReply]) -> Composed:
        """Return one rollout's reward from its replies, in the order of the rewards."""
        parts: dict[str, float] = {}
        metrics: dict[str, float] = {}
        errors: list[str] = []
        for name, reply in zip(self.names, replies, strict=True):
            if reply.error is not None:
                errors.append(reply.error)
                parts[name] = self._policy.default
            elif reply.score is not None:
                parts[name] = reply.score
            metrics.update({f"reward/{name}/{key}": value for key, value in reply.parts.items()})
            metrics.update({f"{name}/{key}": value for key, value in reply.metrics.items()})
        reward = sum(self.weights[name] * score for name, score in parts.items())
        if self.names and not parts:
            # A function without a return statement looks just like this: not a silent 0.
            errors.append(
                f"no reward applies to this sample: {', '.join(self.names)} returned None\n"
                + sample.describe()
            )
            reward = self._policy.default
        # Normalised rewards are clipped after that, batch by batch.
        if (clip := self._policy.clip) is not None and self._policy.normalize == "none":
            reward = max(-clip, min(clip, reward))
        notes = {
            name: reply.note for name, reply in zip(self.names, replies, strict=True) if reply.note
        }
        return Composed(
            reward=reward, parts=parts, metrics=metrics, notes=notes, errors=tuple(errors)
        )


def part_names(names: Sequence[str]) -> list[str]:
    """Return a short name for each reward, as metrics and tables show it; duplicates get a number.

    >>> part_names(["right", "my.pkg:style", "rewards/file.py:style", "dist/right", "trl.py"])
    ['right', 'style', 'style_2', 'right_2', 'trl']
    """
    return short_names(names, taken=_TAKEN)
