"""Rollouts as JSON: what `rollouts/` holds, for people and for `rlx train --replay`.

A record says what happened, turn by turn. A *complete* one has under `exact` what training needs to
be repeated: token ids, log-probs, spans and rewards, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.core.engine.batches import total_reward
from rlx.core.rollouts import Group, Rollout, Span, Task, TrainBatch

Decode = Callable[[Sequence[int]], str]


def rollout_records(
    groups: Sequence[Group],
    batch: TrainBatch,
    logprobs: np.ndarray,
    *,
    decode: Decode,
    limit: int | None,
) -> list[dict[str, Any]]:
    """What `rollouts/` holds of a step.

    Args:
        logprobs: [N] the learner's, before the step.
        decode: token ids as text, special tokens shown.
        limit: rollouts, taken from different groups first; None: complete records of all of them,
            the greedy ones included.
    """
    lengths = batch.rollout_action_lengths
    ends = np.cumsum(lengths)
    gaps = np.abs(logprobs - batch.rollout_logprobs)
    assert batch.advantages is not None
    flat = [(group, rollout) for group in groups for rollout in group.rollouts]
    order = sorted(range(len(flat)), key=lambda i: (flat[i][1].index, i))[:limit]
    records = []
    for i in sorted(order):
        tokens = slice(ends[i] - lengths[i], ends[i])
        group, rollout = flat[i]
        record = _record(group, rollout, gaps[tokens], batch.advantages[tokens], decode)
        records.append(record if limit is not None else {**record, "exact": _exact(rollout)})
    if limit is None:
        none = np.zeros(0)
        records += [
            {**_record(group, group.greedy, none, none, decode), "exact": _exact(group.greedy)}
            | {"greedy": True}
            for group in groups
            if group.greedy is not None
        ]
    return records


def _record(
    group: Group, rollout: Rollout, gaps: np.ndarray, advantages: np.ndarray, decode: Decode
) -> dict[str, Any]:
    record = {
        "group": group.id,
        "index": rollout.index,
        "task": rollout.task.id,
        "prompt": rollout.task.prompt,
        "response": rollout.text,
        "label": rollout.task.label,
        "reward": total_reward(rollout),
        "parts": dict(rollout.parts),
        "advantage": _mean(advantages),
        "logprob_gap": _mean(gaps),
        "tokens": rollout.action_count,
        "turns": len(rollout.spans),
        "finish_reason": rollout.finish_reason,
        "version": rollout.version,
    }
    if rollout.notes:
        record["notes"] = dict(rollout.notes)
    if rollout.error is not None:
        record["error"] = rollout.error
    if len(rollout.spans) > 1 or len(rollout.segments) > 1 or not _begins_with_task(rollout):
        record["episode"] = list(_pieces(rollout, gaps, advantages, decode))
    return record


def _begins_with_task(rollout: Rollout) -> bool:
    """Not where an agent asked something of its own."""
    prompt = rollout.task.tokens
    return rollout.tokens[: len(prompt)].tolist() == [*prompt]


def _pieces(
    rollout: Rollout, gaps: np.ndarray, advantages: np.ndarray, decode: Decode
) -> Iterator[dict[str, Any]]:
    """The rollout's tokens in order: what was sampled, and what came between."""
    at, action = len(rollout.task.tokens), 0
    starts = set(rollout.segments[1:])
    if not _begins_with_task(rollout):
        at, starts = 0, {0, *starts}
    for turn, span in enumerate(rollout.spans):
        begins = [start for start in starts if at <= start <= span.start]
        for start in sorted(begins):
            if start > at:
                yield _other(rollout, at, start, "observation", decode)
            at = start
        if span.start > at:
            kind = "prompt" if begins else "observation"
            yield _other(rollout, at, span.start, kind, decode)
        mine = slice(action, action + len(span))
        yield {
            "kind": "action",
            "turn": turn,
            "text": decode(rollout.tokens[span.start : span.stop].tolist()),
            "tokens": len(span),
            "reward": span.reward,
            "advantage": _mean(advantages[mine]),
            "logprob_gap": _mean(gaps[mine]),
            "version": span.version,
            "finish_reason": span.finish_reason,
        }
        at, action = span.stop, action + len(span)


def _other(rollout: Rollout, start: int, stop: int, kind: str, decode: Decode) -> dict[str, Any]:
    text = decode(rollout.tokens[start:stop].tolist())
    return {"kind": kind, "text": text, "tokens": stop - start}


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _exact(rollout: Rollout) -> dict[str, Any]:
    return {
        "tokens": rollout.tokens.tolist(),
        "prompt_length": len(rollout.task.tokens),
        # the shortest text that gives the same float32
        "logprobs": [float(str(value)) for value in rollout.logprobs],
        "spans": [
            [span.start, span.stop, span.version, span.finish_reason, span.reward]
            + ([list(span.versions)] if span.versions else [])
            for span in rollout.spans
        ],
        "segments": list(rollout.segments),
        "reward": rollout.reward,
        "metrics": dict(rollout.metrics),
        "source": rollout.task.source,
        "columns": dict(rollout.task.columns),
    }


def groups_of(records: Sequence[Mapping[str, Any]]) -> list[Group]:
    """The groups that complete records are of. Raises KeyError or TypeError for other records."""
    by_group: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        by_group.setdefault(record["group"], []).append(record)
    groups = []
    for number, mine in by_group.items():
        greedy = [_rollout(record) for record in mine if record.get("greedy")]
        rollouts = [_rollout(record) for record in mine if not record.get("greedy")]
        groups.append(
            Group(
                id=number,
                task=rollouts[0].task,
                rollouts=rollouts,
                greedy=greedy[0] if greedy else None,
            )
        )
    return groups


def _rollout(record: Mapping[str, Any]) -> Rollout:
    exact = record["exact"]
    tokens = np.array(exact["tokens"], dtype=np.int32)
    return Rollout(
        task=Task(
            id=record["task"],
            prompt=record["prompt"],
            tokens=tokens[: exact["prompt_length"]].tolist(),
            label=record["label"],
            source=exact["source"],
            columns=exact["columns"],
        ),
        group_id=record["group"],
        index=record["index"],
        tokens=tokens,
        spans=[_span(*values) for values in exact["spans"]],
        logprobs=np.array(exact["logprobs"], dtype=np.float32),
        text=record["response"],
        finish_reason=record["finish_reason"],
        reward=exact["reward"],
        parts=record["parts"],
        metrics=exact["metrics"],
        notes=record.get("notes", {}),
        error=record.get("error"),
        segments=exact["segments"],
    )


def _span(
    start: int,
    stop: int,
    version: int,
    finish_reason: Any,
    reward: float,
    versions: Sequence[Sequence[int]] = (),
) -> Span:
    return Span(
        start=start,
        stop=stop,
        version=version,
        finish_reason=finish_reason,
        reward=reward,
        versions=[(item[0], item[1]) for item in versions],
    )
