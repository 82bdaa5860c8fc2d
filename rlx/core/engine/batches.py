"""From groups of rollouts to the flat arrays of a `TrainBatch`, and shares of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
    positions = [part for rollout in rollouts for part in _action_positions(rollout)]
    segments = np.array([len(rollout.segments) for rollout in rollouts], np.int64)
    lengths = [length for rollout in rollouts for length in _segment_lengths(rollout)]
    return TrainBatch(
        tokens=_concatenate([rollout.tokens for rollout in rollouts], np.int32),
        lengths=np.array(lengths, np.int64),
        action_lengths=np.array([len(position) for position in positions], np.int64),
        action_positions=_concatenate(positions, np.int64),
        turn=_concatenate([_turns(rollout) for rollout in rollouts], np.int64),
        group=np.array(group_index, np.int64),
        rollout_logprobs=_concatenate([rollout.logprobs for rollout in rollouts], np.float32),
        rewards=np.array([total_reward(rollout) for rollout in rollouts], np.float64),
        token_rewards=_concatenate([_token_rewards(rollout) for rollout in rollouts], np.float64),
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


def _segment_lengths(rollout: Rollout) -> np.ndarray:
    return np.diff([*rollout.segments, len(rollout.tokens)])


def _action_positions(rollout: Rollout) -> list[np.ndarray]:
    """Positions of each segment's action tokens, counted from where the segment begins."""
    starts = np.array(rollout.segments)
    parts: list[list[np.ndarray]] = [[] for _ in starts]
    for span in rollout.spans:
        segment = int(np.searchsorted(starts, span.start, side="right")) - 1
        parts[segment].append(np.arange(span.start, span.stop) - starts[segment])
    return [np.concatenate(part) if part else np.zeros(0, np.int64) for part in parts]


def _turns(rollout: Rollout) -> np.ndarray:
    return np.repeat(np.arange(len(rollout.spans)), [len(span) for span in rollout.spans])


def _token_rewards(rollout: Rollout) -> np.ndarray:
    rewards = np.zeros(rollout.action_count)
    end = 0
    for span in rollout.spans:
        end += len(span)
        if len(span):
            rewards[end - 1] += span.reward
    if len(rewards):
        rewards[-1] += rollout.reward
    return rewards
