"""What vLLM's scheduler is busy with, read where it keeps it.

vLLM's own statistics are made for a server: switched on, they cost time for every token of every
request. What is read here is a handful of attributes a step; where a version of vLLM has them
elsewhere, the numbers are missing and nothing else is.
"""

from __future__ import annotations

from typing import Any

from rlx.core.engine.rollout.stats import EngineStats


class SchedulerReader:
    """Counts the steps of an in-process `LLMEngine`."""

    def __init__(self, engine: Any) -> None:
        core = getattr(engine.engine_core, "engine_core", None)
        self._scheduler: Any = getattr(core, "scheduler", None)
        self._cache: Any = getattr(self._scheduler, "kv_cache_manager", None)
        self._stats = EngineStats()
        if self._cache is not None and hasattr(self._cache, "prefix_cache_stats"):
            from vllm.v1.metrics.stats import PrefixCacheStats

            # The counts for this cache alone; everything else that `log_stats` does stays off.
            self._cache.prefix_cache_stats = PrefixCacheStats()
            self._cache.log_stats = True

    def note(self, finished: int) -> None:
        """Count the step that just ended `finished` requests."""
        if self._scheduler is None:
            return
        running, waiting = self._scheduler.get_request_counts()
        usage = getattr(self._cache, "usage", None)
        self._stats.note(running=running + finished, waiting=waiting, kv_cache=usage)

    def take(self) -> EngineStats:
        """What was counted since the last call."""
        stats, self._stats = self._stats, EngineStats()
        prefix = getattr(self._cache, "make_prefix_cache_stats", lambda: None)()
        if prefix is not None:
            stats.prefix_queries, stats.prefix_hits = prefix.queries, prefix.hits
            stats.preemptions = prefix.preempted_requests
        return stats
