"""Whether two configurations of `rlx generate` make the same samples."""

from __future__ import annotations

from typing import Any

from rlx.core.config import RunConfig

_SAMPLING = ("model", "seed", "agent", "rewards", "reward", "data")
_ROLLOUT = (
    "engine",
    "max_new_tokens",
    "max_turns",
    "max_response_tokens",
    "temperature",
    "top_p",
    "top_k",
    "dtype",
    "context_length",
)
_FREE = {("data", "max_samples"), ("data", "shuffle"), ("reward", "workers")}
"""More rows are more tasks; those that are done stay."""


def first_difference(before: RunConfig, now: RunConfig) -> str | None:
    """The first setting that shapes a sample and is not what it was; None when all are."""
    old, new = _shaping(before), _shaping(now)
    return next((key for key in old if old[key] != new[key]), None)


def _shaping(config: RunConfig) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    keys: dict[str, Any] = {}
    for section in _SAMPLING:
        value = tree[section]
        if isinstance(value, dict) and section in ("data", "reward"):
            own = {name: item for name, item in value.items() if (section, name) not in _FREE}
            keys |= {f"{section}.{name}": item for name, item in own.items()}
        else:
            keys[section] = value
    keys |= {f"rollout.{name}": tree["rollout"][name] for name in _ROLLOUT}
    keys |= {f"generate.{name}": tree["generate"][name] for name in ("samples", "temperature")}
    return keys
