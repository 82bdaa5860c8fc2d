"""Generated batches: group sizes, lengths and rewards that shrink to something readable.

Legend: B rollouts, N action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from rlx.core.ragged import Tensor

_REWARDS = (0.0, 1.0, 0.5, -1.0, 2.0, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The shape of a batch and its rewards; per-token numbers follow from `seed`."""

    group: tuple[int, ...]
    """[B]."""
    rewards: tuple[float, ...]
    """[B]."""
    lengths: tuple[int, ...]
    """[B], action tokens."""
    seed: int = 0

    def __str__(self) -> str:
        return (
            f"rewards={list(self.rewards)}, group={list(self.group)}, "
            f"lengths={list(self.lengths)}, seed={self.seed}"
        )

    @property
    def tokens(self) -> int:
        """N."""
        return sum(self.lengths)

    def numbers(self, name: str, low: float, high: float) -> Tensor:
        """Return [N] float64 numbers that belong to the batch, the same at every call."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + sum(map(ord, name)) % 997)
        drawn = torch.rand(self.tokens, generator=generator, dtype=torch.float64)
        return low + (high - low) * drawn

    def turns(self) -> Tensor:
        """Return [N] int64: rollouts of three tokens and more have two turns."""
        parts = [
            torch.tensor([0] * (n - n // 2) + [1] * (n // 2) if n > 2 else [0] * n)
            for n in self.lengths
        ]
        return torch.cat([part.to(torch.int64) for part in parts])

    def split(self, values: Tensor) -> list[Tensor]:
        """Split [N] by rollout."""
        return list(torch.split(values, list(self.lengths)))

    def permute_tokens(self, values: Tensor, order: Sequence[int]) -> Tensor:
        """Return [N] with whole rollouts in another order."""
        pieces = self.split(values)
        return torch.cat([pieces[index] for index in order])

    def relabelled(self, ids: dict[int, int]) -> Batch:
        return replace(self, group=tuple(ids[group] for group in self.group))


@st.composite
def batches(
    draw: Any,
    *,
    group_sizes: tuple[int, int] = (2, 3),
    lengths: tuple[int, int] = (1, 4),
    constant: bool = False,
) -> Batch:
    """Draw one to three groups of neighbouring rollouts.

    Args:
        group_sizes: smallest and largest G.
        lengths: smallest and largest number of action tokens.
        constant: all rewards of a group are equal; else each group has at least two different.
    """
    group: list[int] = []
    rewards: list[float] = []
    for index in range(draw(st.integers(1, 3))):
        size = draw(st.integers(*group_sizes))
        if constant:
            drawn = [draw(st.sampled_from(_REWARDS))] * size
        else:
            drawn = [draw(st.sampled_from(_REWARDS)) for _ in range(size)]
            if size > 1 and len(set(drawn)) == 1:
                drawn[-1] = drawn[0] + 1.0
        group += [index] * size
        rewards += drawn
    return Batch(
        group=tuple(group),
        rewards=tuple(rewards),
        lengths=tuple(draw(st.integers(*lengths)) for _ in group),
        seed=draw(st.integers(0, 20)),
    )


def ordinary() -> SearchStrategy[Batch]:
    """Batches without any special case: what other rules are tried on."""
    return batches()


def one_rollout_groups() -> SearchStrategy[Batch]:
    """Batches with groups of one rollout; sizes above one occur, too."""
    return batches(group_sizes=(1, 2)).filter(
        lambda batch: any(batch.group.count(index) == 1 for index in batch.group)
    )


def constant_rewards() -> SearchStrategy[Batch]:
    """Batches in which all rollouts of a group have the same reward."""
    return batches(constant=True)


def empty_actions() -> SearchStrategy[Batch]:
    """Batches in which at least one rollout has no action token."""
    return batches(lengths=(0, 3)).filter(lambda batch: 0 in batch.lengths)


def orders(batch: Batch) -> SearchStrategy[list[int]]:
    """Return permutations of the rollouts."""
    return st.permutations(range(len(batch.group)))


def require(condition: Any, problem: str) -> None:
    """Raise `Broken` unless the condition holds."""
    from rlx.testing.violations import Broken

    if not condition:
        raise Broken(problem)


def shown(values: Tensor) -> str:
    """Return a tensor as a short list."""
    numbers = [float(f"{value:.6g}") for value in values.detach().flatten().tolist()[:12]]
    return f"{numbers}{' …' if values.numel() > 12 else ''}"


def close(first: Tensor, second: Tensor) -> bool:
    """Say whether two tensors agree up to the rounding that another order of sums makes."""
    return first.shape == second.shape and torch.allclose(
        first.double(), second.double(), rtol=1e-7, atol=1e-9, equal_nan=True
    )


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that are no longer what they were."""
    return [
        name
        for name, value in before.items()
        if isinstance(value, torch.Tensor) and not torch.equal(value, after[name])
    ]


def snapshot(x: Any) -> dict[str, Any]:
    """Copy the tensors that an inputs object was given."""
    found: dict[str, Any] = {}
    for name, value in vars(x).items():
        if isinstance(value, torch.Tensor):
            found[name] = value.detach().clone()
        elif isinstance(value, dict):
            found |= {
                f"{name}[{key!r}]": item.detach().clone()
                for key, item in value.items()
                if isinstance(item, torch.Tensor)
            }
    return found
