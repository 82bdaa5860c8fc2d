"""The numbers of an evaluation, from the groups that it produced.

    pass@k  =  mean over tasks of  1 − C(n − c, k) / C(n, k)

with n rollouts of a task, c of which pass. This is unbiased, unlike taking the best of k rollouts
once. Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code"
(arXiv:2107.03374), section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.core.rollouts import Group, Rollout

TOTAL = "total"
"""Name of the whole reward, where a part could be named."""
CUT_OFF = ("length", "max_tokens")
"""Finish reasons of rollouts that ran out of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Which score counts, and from where on a rollout passes."""

    part: str = TOTAL
    threshold: float = 1.0

    def score(self, rollout: Rollout) -> float | None:
        """The rollout's score; None when the reward doesn't apply to it."""
        if self.part == TOTAL:
            return rollout.reward + sum(span.reward for span in rollout.spans)
        return rollout.parts.get(self.part)

    def passes(self, score: float | None) -> bool:
        return score is not None and score >= self.threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceResult:
    """How the policy did on one source."""

    tasks: int
    """Tasks with at least one scored rollout."""
    failed: int
    """Tasks without any: their rewards failed, or did not apply."""
    rollouts: int
    mean: float
    """Mean score: over each task's rollouts, then over tasks. NaN when no task has a score."""
    mean_stderr: float
    """Standard error of `mean` over tasks; NaN for fewer than two."""
    pass_at: Mapping[int, float]
    """k → pass@k."""
    length_mean: float
    """Action tokens per rollout."""
    truncated_rate: float
    """Share of the rollouts that ran out of tokens."""
    parts: Mapping[str, float]
    """Mean of each reward, before weights."""

    def metrics(self, prefix: str) -> dict[str, float]:
        """The numbers by metric name (docs/metrics.md)."""
        found = {
            f"{prefix}/mean": self.mean,
            **{f"{prefix}/pass@{k}": value for k, value in self.pass_at.items()},
            f"{prefix}/length_mean": self.length_mean,
            f"{prefix}/truncated_rate": self.truncated_rate,
        }
        if len(self.parts) > 1:
            found |= {f"{prefix}/reward/{name}": value for name, value in self.parts.items()}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation found."""

    sources: Mapping[str, SourceResult]
    groups: Mapping[str, Sequence[Group]]
    """By source, in the order of the tasks."""
    scoring: Scoring
    failed_rewards: int
    """Rewards that raised, timed out or returned no number."""
    seconds: float

    @property
    def metrics(self) -> dict[str, float]:
        """`eval/<source>/…` and `eval/failed`."""
        found = {"eval/failed": float(self.failed_rewards)}
        for name, result in self.sources.items():
            found |= result.metrics(f"eval/{name}")
        return found

    def records(self) -> Iterator[dict[str, Any]]:
        """One object a rollout, for a file of samples."""
        for source, groups in self.groups.items():
            for group in groups:
                for rollout in group.rollouts:
                    yield _record(source, rollout, self.scoring)


def evaluated(
    groups: Mapping[str, Sequence[Group | None]],
    *,
    samples: int,
    scoring: Scoring,
    failed_rewards: int,
    seconds: float,
) -> Evaluation:
    """The results of the groups of each source; None stands for a group that was dropped."""
    kept = {name: [group for group in found if group] for name, found in groups.items()}
    return Evaluation(
        sources={
            name: summarise(
                kept[name],
                samples=samples,
                scoring=scoring,
                dropped=len(found) - len(kept[name]),
            )
            for name, found in groups.items()
        },
        groups=kept,
        scoring=scoring,
        failed_rewards=failed_rewards,
        seconds=seconds,
    )


def summarise(
    groups: Sequence[Group], *, samples: int, scoring: Scoring, dropped: int = 0
) -> SourceResult:
    """The result of one source.

    Args:
        groups: of G rollouts each.
        samples: n, for the values of k.
        dropped: tasks whose group was dropped.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = [
        [score for rollout in group.rollouts if (score := scoring.score(rollout)) is not None]
        for group in groups
    ]
    scored = [row for row in scores if row]
    means = [math.fsum(row) / len(row) for row in scored]
    counts = [(len(row), sum(map(scoring.passes, row))) for row in scored]
    return SourceResult(
        tasks=len(scored),
        failed=len(groups) - len(scored) + dropped,
        rollouts=len(rollouts),
        mean=_mean(means),
        mean_stderr=_standard_error(means),
        pass_at={
            k: _mean([pass_at_k(n, c, k) for n, c in counts if n >= k])
            for k in powers_of_two(samples)
        },
        length_mean=_mean([float(rollout.action_count) for rollout in rollouts]),
        truncated_rate=_mean([float(r.finish_reason in CUT_OFF) for r in rollouts]),
        parts=_part_means(rollouts),
    )


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k rollouts passes, drawn without replacement from n ≥ k
    rollouts of which c pass.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 ≤ c ≤ n and 1 ≤ k ≤ n; got n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, … up to `most`.

    >>> powers_of_two(6)
    [1, 2, 4]
    """
    return [2**i for i in range(most.bit_length())]


_LOWER = ("length_mean", "truncated_rate")


def metric_names(sources: Sequence[str], samples: int) -> list[str]:
    """The metrics that `checkpoint.best` may name."""
    passes = (f"pass@{k}" for k in powers_of_two(samples))
    names = ["mean", *passes, *_LOWER]
    return [f"eval/{source}/{name}" for source in sources for name in names]


def lower_is_better(metric: str) -> bool:
    """Whether the best checkpoint is the one where a metric of evaluation is lowest.

    >>> lower_is_better("eval/gsm8k/length_mean"), lower_is_better("eval/gsm8k/pass@4")
    (True, False)
    """
    return metric.rpartition("/")[2] in (*_LOWER, "loss", "nll")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def _part_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.parts)
    return {name: _mean([r.parts[name] for r in rollouts if name in r.parts]) for name in names}


def _record(source: str, rollout: Rollout, scoring: Scoring) -> dict[str, Any]:
    score = scoring.score(rollout)
    return {
        "source": source,
        "task": rollout.task.id,
        "index": rollout.index,
        "prompt": rollout.task.prompt,
        "response": rollout.text,
        "label": rollout.task.label,
        "score": score,
        "passed": scoring.passes(score),
        "reward": Scoring().score(rollout),
        "parts": dict(rollout.parts),
        **({"notes": dict(rollout.notes)} if rollout.notes else {}),
        "tokens": rollout.action_count,
        "turns": len(rollout.spans),
        "finish_reason": rollout.finish_reason,
    }
