"""What a rollout engine was busy with, counted at each of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Sums and maxima over the steps since the last look; a step makes a token for each request."""

    steps: int = 0
    running: int = 0
    """Sum over steps of the requests that ran."""
    most_running: int = 0
    most_waiting: int = 0
    kv_cache: float | None = None
    """Largest share of the KV cache that was in use; None: the engine can't tell, as below."""
    prefix_queries: int | None = None
    """Tokens of prompts that were looked up in the prefix cache."""
    prefix_hits: int | None = None
    """Those of them that were found."""
    preemptions: int | None = None
    """Requests that had to make room and began again."""

    def note(self, *, running: int, waiting: int, kv_cache: float | None = None) -> None:
        """Count one step."""
        self.steps += 1
        self.running += running
        self.most_running = max(self.most_running, running)
        self.most_waiting = max(self.most_waiting, waiting)
        if kv_cache is not None:
            self.kv_cache = max(kv_cache, self.kv_cache or 0.0)


def engine_metrics(engines: Sequence[EngineStats]) -> dict[str, float]:
    """`engine/*` of all engines of a run; empty when none did anything."""
    active = [one for one in engines if one.steps]
    if not active:
        return {}
    metrics = {
        "engine/running_mean": sum(one.running for one in active)
        / sum(one.steps for one in active),
        "engine/running_max": float(max(one.most_running for one in active)),
        "engine/waiting_max": float(max(one.most_waiting for one in active)),
    }
    caches = [one.kv_cache for one in active if one.kv_cache is not None]
    if caches:
        metrics["engine/kv_cache_max"] = max(caches)
    queries = sum(one.prefix_queries or 0 for one in active)
    if queries:
        metrics["engine/prefix_hit_rate"] = sum(one.prefix_hits or 0 for one in active) / queries
    preemptions = [one.preemptions for one in active if one.preemptions is not None]
    if preemptions:
        metrics["engine/preemptions"] = float(sum(preemptions))
    return metrics
