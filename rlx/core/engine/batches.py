"""From groups of rollouts to the flat arrays of a `TrainBatch`, and shares of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from rlx.core.flat import ragged_indices
from rlx.core.rollouts import Group, Rollout, TrainBatch

_PER_TOKEN = ("tokens",)
_PER_SEQUENCE = ("lengths", "action_lengths")
_PER_ROLLOUT = ("group", "rewards", "segments", "names", "greedy_rewards")


def make_batch(groups: Sequence[Group]) -> TrainBatch:
    """Lay the rollouts of `groups` one after the other, each segment a sequence."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    group_index = [index for index, group in enumerate(groups) for _ in group.rollouts]
    tokens = _concatenate([rollout.tokens for rollout in rollouts], np.int32)
    segments = np.array([len(rollout.segments) for rollout in rollouts], np.int64)
    offsets = _offsets([len(rollout.tokens) for rollout in rollouts])
    # On the axis of all tokens; a segment without tokens begins where the next one does.
    starts = np.repeat(offsets, segments) + _numbers(one.segments for one in rollouts)
    turns = _turns(rollouts, offsets, starts)
    return TrainBatch(
        tokens=tokens,
        lengths=np.diff(starts, append=len(tokens)),
        action_lengths=turns.action_lengths,
        action_positions=turns.positions,
        turn=turns.of_each_token(),
        group=np.array(group_index, np.int64),
        rollout_logprobs=_concatenate([rollout.logprobs for rollout in rollouts], np.float32),
        rewards=np.array([total_reward(rollout) for rollout in rollouts], np.float64),
        token_rewards=_token_rewards(rollouts, turns),
        segments=segments if (segments != 1).any() else None,
        names=np.array([rollout_name(rollout) for rollout in rollouts], np.str_),
        greedy_rewards=_greedy_rewards(groups),
    )


def rollout_name(rollout: Rollout) -> str:
    """What messages call it."""
    return f"group {rollout.group_id}, rollout {rollout.index}, task {rollout.task.id}"


def _greedy_rewards(groups: Sequence[Group]) -> np.ndarray | None:
    if not groups or any(group.greedy is None for group in groups):
        return None
    rewards = [total_reward(group.greedy) for group in groups if group.greedy is not None]
    return np.repeat(np.array(rewards, np.float64), [len(group.rollouts) for group in groups])


def total_reward(rollout: Rollout) -> float:
    """The rollout's own reward and those of its turns."""
    return rollout.reward + sum(span.reward for span in rollout.spans)


def take(batch: TrainBatch, rollouts: np.ndarray) -> TrainBatch:
    """The sub-batch of the given rollouts, in the given order."""
    sequences = rollouts if batch.segments is None else ragged_indices(batch.segments, rollouts)
    tokens = ragged_indices(batch.lengths, sequences)
    actions = ragged_indices(batch.action_lengths, sequences)
    chosen: dict[str, np.ndarray | None] = {}
    for item in dataclasses.fields(batch):
        values = getattr(batch, item.name)
        if values is None:
            chosen[item.name] = None
        elif item.name in _PER_TOKEN:
            chosen[item.name] = values[tokens]
        elif item.name in _PER_SEQUENCE:
            chosen[item.name] = values[sequences]
        elif item.name in _PER_ROLLOUT:
            chosen[item.name] = values[rollouts]
        else:
            chosen[item.name] = values[actions]
    return TrainBatch(**chosen)  # type: ignore[arg-type]


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return (
        np.concatenate([np.asarray(array, dtype) for array in arrays])
        if arrays
        else np.zeros(0, dtype)
    )


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each of runs of these lengths begins, one after the other."""
    return np.cumsum(lengths, dtype=np.int64) - np.array(lengths, np.int64)


def _numbers(parts: Iterable[Iterable[int]]) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(parts), np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Turns:
    """The turns of all rollouts, one after the other."""

    index: np.ndarray
    """[t] int64, within the rollout."""
    rollout: np.ndarray
    """[t] int64."""
    lengths: np.ndarray
    """[t] int64, action tokens."""
    positions: np.ndarray
    """[N] int64, of the action tokens, each from where its segment begins."""
    action_lengths: np.ndarray
    """[S] int64, action tokens of each segment."""

    def of_each_token(self) -> np.ndarray:
        """[N] int64, the index of the turn that an action token is of."""
        if not self.index.any():
            # Zeros that nobody has written take no memory, and getting memory is most of the work.
            return np.zeros(len(self.positions), np.int64)
        return np.repeat(self.index, self.lengths)


def _turns(rollouts: Sequence[Rollout], offsets: np.ndarray, starts: np.ndarray) -> _Turns:
    """
    Args:
        offsets: [B], where each rollout begins on the axis of all tokens.
        starts: [S], where each segment does.
    """
    count = np.array([len(rollout.spans) for rollout in rollouts], np.int64)
    rollout = np.repeat(np.arange(len(rollouts)), count)
    first = _numbers((span.start for span in one.spans) for one in rollouts)
    lengths = _numbers((span.stop for span in one.spans) for one in rollouts) - first
    first += offsets[rollout]
    segment = np.searchsorted(starts, first, side="right") - 1
    action_lengths = np.zeros(len(starts), np.int64)
    np.add.at(action_lengths, segment, lengths)
    positions = np.repeat(first - starts[segment] - _offsets(lengths), lengths)
    positions += np.arange(len(positions))
    return _Turns(
        index=np.arange(len(rollout)) - np.repeat(_offsets(count), count),
        rollout=rollout,
        lengths=lengths,
        positions=positions,
        action_lengths=action_lengths,
    )


def _token_rewards(rollouts: Sequence[Rollout], turns: _Turns) -> np.ndarray:
    """[N] float64: each turn's reward on its last token, the rollout's own on its very last."""
    real = turns.lengths > 0
    last, rollout = np.cumsum(turns.lengths)[real] - 1, turns.rollout[real]
    rewards = np.zeros(int(turns.lengths.sum()))
    own = np.array([span.reward for one in rollouts for span in one.spans], np.float64)
    rewards[last] = own[real]
    ends = np.flatnonzero(np.diff(rollout, append=-1))
    whole = np.array([one.reward for one in rollouts], np.float64)
    rewards[last[ends]] += whole[rollout[ends]]
    return rewards
