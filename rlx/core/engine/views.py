"""What hooks are shown of a step: arrays that can't be written to, mappings that are copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.core.rollouts import Group, Rollout, Task, TrainBatch


def shown_groups(groups: Sequence[Group]) -> list[Group]:
    """Groups for observers: what they do to them, training doesn't see."""
    return [_group(group) for group in groups]


def shown_batch(batch: TrainBatch) -> TrainBatch:
    """The batch with arrays that can't be written to."""
    return dataclasses.replace(batch, **_read_only(batch))


def _group(group: Group) -> Group:
    task = _task(group.task)
    return dataclasses.replace(
        group,
        task=task,
        rollouts=tuple(_rollout(rollout, task) for rollout in group.rollouts),
        greedy=None if group.greedy is None else _rollout(group.greedy, task),
    )


def _task(task: Task) -> Task:
    return dataclasses.replace(task, columns=dict(task.columns), **_read_only(task))


def _rollout(rollout: Rollout, task: Task) -> Rollout:
    return dataclasses.replace(
        rollout,
        task=task,
        parts=dict(rollout.parts),
        metrics=dict(rollout.metrics),
        **_read_only(rollout),
    )


def _read_only(value: Any) -> dict[str, Any]:
    """Views of a dataclass's arrays; the arrays themselves stay writable."""
    views: dict[str, Any] = {}
    for item in dataclasses.fields(value):
        array = getattr(value, item.name)
        if isinstance(array, np.ndarray):
            views[item.name] = array.view()
            views[item.name].flags.writeable = False
    return views
