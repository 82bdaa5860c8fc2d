"""The values that travel through a run: tasks, rollouts, groups.

Legend: P tasks, G rollouts per group, B rollouts in the batch, S sequences (S = B unless a rollout
has several segments), N action tokens, T tokens.
This module imports NumPy and nothing heavier, because reward workers import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

FinishReason: TypeAlias = Literal[
    "stop", "length", "abort", "max_turns", "max_tokens", "timeout", "error"
]
Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One dataset row to solve."""

    id: str
    """Stable over a run and its resumes: `<source>/<row number>`."""
    prompt: str | Sequence[Message]
    """Text, or chat messages (`{"role": …, "content": …}`)."""
    tokens: Sequence[int]
    """The prompt as token ids, chat template applied: what the engine is given."""
    label: Any = None
    source: str = "data"
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The whole row, for rewards that need more than the label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The tokens that one engine call sampled: positions `start:stop` of the rollout's tokens."""

    start: int
    stop: int
    version: int
    """Policy version whose weights sampled them; of the first one where they changed meanwhile."""
    finish_reason: FinishReason
    reward: float = 0.0
    """Per-turn reward; the rollout's own reward is added on the last span's last token."""
    versions: Sequence[tuple[int, int]] = ()
    """(policy version, tokens) in order, where the weights changed meanwhile; else empty."""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def stretches(self) -> Sequence[tuple[int, int]]:
        """(policy version, tokens) of each stretch that one set of weights sampled."""
        return self.versions or ((self.version, len(self)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task: prompt, sampled tokens and observations as one token sequence.

    Where a prompt did not extend what came before it (a template or an agent that rewrites
    history), a new *segment* begins: a sequence of its own for the model, but the same rollout for
    rewards, groups, estimators and metrics.
    """

    task: Task
    group_id: int
    index: int
    """Position within the group: 0 … G − 1."""
    tokens: np.ndarray
    """[T] int32: prompt, then actions and observations in the order in which they happened; the
    segments one after the other."""
    spans: Sequence[Span]
    """Action spans in ascending order; every other position is prompt or observation."""
    logprobs: np.ndarray
    """[n] float32 of the sampled tokens, of the distribution that they were sampled from."""
    text: str
    """The response as text (special tokens skipped); actions and observations for multi-turn."""
    finish_reason: FinishReason
    reward: float = 0.0
    """Weighted sum of the parts, after clipping."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Reward by component name, before weights."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Extra numbers from rewards and the agent, averaged into the step's metrics."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What rewards say about their score, by reward; for people."""
    messages: Sequence[Message] = ()
    error: str | None = None
    """What the agent failed of, with the finish reason `error`."""
    segments: Sequence[int] = (0,)
    """Positions of `tokens` at which a segment begins; the first is 0, no span crosses one."""

    @property
    def action_count(self) -> int:
        return sum(len(span) for span in self.spans)

    @property
    def version(self) -> int:
        """Oldest policy version among the spans."""
        return min((span.version for span in self.spans), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task."""

    id: int
    task: Task
    rollouts: Sequence[Rollout]
    greedy: Rollout | None = None
    """One more attempt, greedy and not trained on, where the estimator asks for it."""

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The rollouts of one training step as flat arrays: what scorers and learners are given.

    Sequences lie one after the other on the token axis [T]; action tokens on the axis [N],
    in the order of the sequences. A rollout is one sequence, or as many as it has segments.
    """

    tokens: np.ndarray
    """[T] int32, all sequences concatenated."""
    lengths: np.ndarray
    """[S] int64, tokens per sequence."""
    action_lengths: np.ndarray
    """[S] int64, action tokens per sequence."""
    action_positions: np.ndarray
    """[N] int64, position of each action token *within its sequence* (≥ 1)."""
    turn: np.ndarray
    """[N] int64, index of the action token's turn within its rollout."""
    group: np.ndarray
    """[B] int64, group index 0 … P − 1."""
    rollout_logprobs: np.ndarray
    """[N] float32."""
    rewards: np.ndarray
    """[B] float64, outcome plus per-turn rewards of the rollout."""
    token_rewards: np.ndarray
    """[N] float64, each reward on the last action token of its turn (no KL in it)."""
    segments: np.ndarray | None = None
    """[B] int64, sequences of each rollout; None: one each, and S = B."""
    names: np.ndarray | None = None
    """[B] text, what messages call each rollout: `group 3, rollout 0, task gsm8k/17`."""
    greedy_rewards: np.ndarray | None = None
    """[B] float64, reward of the greedy rollout of the same task."""
    advantages: np.ndarray | None = None
    """[N] float32."""
    returns: np.ndarray | None = None
    """[N] float32, regression target of a critic."""
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    entropy: np.ndarray | None = None
    """[N] float32, of the policy before the step, where the estimator requires it."""
    values: np.ndarray | None = None
    """[N] float32, the critic's before the step."""

    @property
    def sequence_count(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def rollout_count(self) -> int:
        """B."""
        return len(self.rewards)

    @property
    def rollout_lengths(self) -> np.ndarray:
        """[B] int64, tokens per rollout."""
        return self._per_rollout(self.lengths)

    @property
    def rollout_action_lengths(self) -> np.ndarray:
        """[B] int64, action tokens per rollout."""
        return self._per_rollout(self.action_lengths)

    @property
    def rollout_of(self) -> np.ndarray:
        """[S] int64, the rollout of each sequence."""
        rollouts = np.arange(self.rollout_count)
        return rollouts if self.segments is None else np.repeat(rollouts, self.segments)

    def name(self, rollout: int) -> str:
        """What messages call a rollout."""
        if self.names is None:
            return f"rollout {rollout} (group {self.group[rollout]})"
        return f"the rollout ({self.names[rollout]})"

    @property
    def family(self) -> np.ndarray:
        """[S] int64, the group of each sequence: most of a group begin with the same prompt."""
        return self.group[self.rollout_of]

    @property
    def together(self) -> None:
        """No sequences need share a micro-batch."""
        return None

    def _per_rollout(self, values: np.ndarray) -> np.ndarray:
        """Sum over each rollout's sequences: [S] -> [B]."""
        if self.segments is None:
            return values
        sums = np.zeros(self.rollout_count, values.dtype)
        np.add.at(sums, self.rollout_of, values)
        return sums

    @property
    def action_count(self) -> int:
        return len(self.action_positions)
