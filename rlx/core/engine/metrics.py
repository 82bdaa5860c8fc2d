"""The step's numbers that the driver computes (names: docs/metrics.md)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.core.engine.batches import total_reward
from rlx.core.evaluation import CUT_OFF
from rlx.core.rollouts import Group, Rollout, TrainBatch


def rollout_metrics(groups: Sequence[Group], *, by_source: bool = False) -> dict[str, float]:
    """`reward/*`, `rollout/*`, `group/*` and the means of extra metrics of one batch.

    Args:
        by_source: `source/<name>/*` too, for a run with several data sources.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array([total_reward(rollout) for rollout in rollouts])
    spreads = np.array([_spread(group) for group in groups])
    metrics = {
        # first, so that none takes the place of a number of rlx's own
        **_means("", (rollout.metrics for rollout in rollouts)),
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "rollout/length_mean": np.mean([rollout.action_count for rollout in rollouts]),
        "rollout/truncated_rate": np.mean([r.finish_reason in CUT_OFF for r in rollouts]),
        "rollout/turns_mean": np.mean([len(rollout.spans) for rollout in rollouts]),
        **_segment_metrics(rollouts),
        "group/std_mean": spreads.mean(),
        "group/all_same_rate": (spreads == 0).mean(),
        **_means("reward/", (rollout.parts for rollout in rollouts)),
        **_endings(rollouts),
        **_greedy_metrics(groups),
        **(_source_metrics(groups) if by_source else {}),
    }
    return {name: float(value) for name, value in metrics.items()}


def _segment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Only where a rollout has several: everywhere else they would be 1."""
    counts = [len(rollout.segments) for rollout in rollouts]
    return {"rollout/segments_mean": float(np.mean(counts))} if max(counts, default=1) > 1 else {}


def _endings(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Share of the rollouts that ended in another way than by the model's own stop or length."""
    reasons = Counter(rollout.finish_reason for rollout in rollouts)
    return {
        f"rollout/ended/{reason}": count / len(rollouts)
        for reason, count in sorted(reasons.items())
        if reason not in ("stop", "length")
    }


def _greedy_metrics(groups: Sequence[Group]) -> dict[str, float]:
    rewards = [total_reward(group.greedy) for group in groups if group.greedy is not None]
    if not rewards:
        return {}
    return {"rollout/greedy": float(len(rewards)), "reward/greedy_mean": float(np.mean(rewards))}


def _source_metrics(groups: Sequence[Group]) -> dict[str, float]:
    by_name: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_name[group.task.source].append(group)
    found: dict[str, float] = {}
    for name, mine in sorted(by_name.items()):
        rollouts = [rollout for group in mine for rollout in group.rollouts]
        found[f"source/{name}/share"] = len(mine) / len(groups)
        found[f"source/{name}/reward_mean"] = float(np.mean([total_reward(r) for r in rollouts]))
        found[f"source/{name}/length_mean"] = float(np.mean([r.action_count for r in rollouts]))
    return found


def advantage_metrics(batch: TrainBatch) -> dict[str, float]:
    assert batch.advantages is not None
    values = batch.advantages.astype(np.float64)
    if not len(values):
        return {"advantage/mean": 0.0, "advantage/std": 0.0}
    return {"advantage/mean": float(values.mean()), "advantage/std": float(values.std())}


def _spread(group: Group) -> float:
    rewards = [total_reward(rollout) for rollout in group.rollouts]
    return 0.0 if len(set(rewards)) == 1 else float(np.std(rewards))


def _means(prefix: str, items: Any) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for item in items:
        for name, value in item.items():
            values[prefix + name].append(float(value))
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}


def merge(*parts: Mapping[str, float]) -> dict[str, float]:
    merged: dict[str, float] = {}
    for part in parts:
        merged.update(part)
    return merged
