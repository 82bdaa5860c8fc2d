"""Names of the metrics that rlx itself writes, as far as they are fixed (`docs/metrics.md`).

Others have a part's, a source's or a role's name in them, or come from plugins.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_FAMILIES = {
    "reward": (
        "mean std running_mean running_std greedy_mean failed dropped_groups workers_replaced"
    ),
    "rollout": (
        "length_mean truncated_rate turns_mean segments_mean greedy engine_idle ready running"
    ),
    "agent": "failed dropped_groups observations_cut",
    "group": "std_mean all_same_rate",
    "sampler": "kept dropped skipped_too_long",
    "eval": "failed",
    "policy": (
        "loss ratio_mean clip_rate kl_old kl_ref kl_coef entropy grad_norm lr skipped_updates"
    ),
    "advantage": "mean std",
    "critic": (
        "loss value_mean return_mean explained_variance clip_rate grad_norm lr skipped_updates"
    ),
    "mismatch": "logprob_abs_mean logprob_abs_max kl",
    "correction": "clipped_rate masked_rate",
    "staleness": "mean max",
    "publish": "seconds gib gib_per_s",
    "memory": "object_store_gib object_store_written_gib",
    "engine": "running_mean running_max waiting_max kv_cache_max prefix_hit_rate preemptions",
    "faults": "engine_restarts reward_restarts learner_restarts rollbacks",
    "train": (
        "loss accuracy reward_margin reward_chosen reward_rejected reward_desirable "
        "reward_undesirable logprob_chosen logprob_rejected kl nll right_rate agreement "
        "grad_norm lr skipped_updates"
    ),
    "data": "epoch",
    "throughput": "rows_per_s tokens_per_s rollouts_per_s",
    "time": "step rollout reward score reference update publish eval checkpoint checkpoint_write",
    "checkpoint": "failed",
}
KNOWN = frozenset(
    f"{family}/{name}" for family, names in _FAMILIES.items() for name in names.split()
)
_CLOSE = 0.9
"""Likeness, 0 … 1, from which on a name is a misspelling and no metric of somebody else's."""


def misspelt(name: str, own: Iterable[str]) -> str | None:
    """The metric that was meant; None where the name is known, or may be a component's or plugin's.

    Args:
        own: names of components and plugins, which stand in names of their metrics.
    """
    if name in KNOWN or not set(own).isdisjoint(name.split("/")):
        return None
    if "/" not in name:  # every metric has a family
        # Of metrics that several models have, the policy's is meant.
        ordered = sorted(KNOWN, key=lambda one: (one.startswith("policy/"), one))
        last = {one.partition("/")[2]: one for one in ordered}
        found = difflib.get_close_matches(name, last, n=1, cutoff=0.6)
        return last[found[0]] if found else ""
    found = difflib.get_close_matches(name, KNOWN, n=1, cutoff=_CLOSE)
    return found[0] if found else None
