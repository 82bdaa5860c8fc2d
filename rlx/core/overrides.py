"""What an agent may ask of a single engine call, and what it may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlx.core.errors import ComponentError, did_you_mean
from rlx.core.generation import Sampling
from rlx.core.stops import stop_token_ids

_PER_CALL = ("max_new_tokens", "stop_token_ids", "stop")
_FIXED = ("temperature", "top_p", "top_k")


def with_overrides(
    sampling: Sampling, overrides: Mapping[str, Any], tokenizer: Any
) -> tuple[Sampling, Sequence[str]]:
    """The run's sampling with a call's own options, and the texts that the reply stops at.

    Raises ComponentError for an option that would bend the log-probs, or that there is not.
    """
    if not overrides:
        return sampling, ()
    for name in overrides:
        if name in _FIXED:
            raise ComponentError(
                f"Episode.generate can't change {name}: the learner scores every action token "
                f"under the run's own (rollout.{name})"
            )
        if name not in _PER_CALL:
            hint = did_you_mean(name, _PER_CALL) or f"there are: {', '.join(_PER_CALL)}"
            raise ComponentError(f"Episode.generate has no option {name!r}; {hint}")
    changed = dict(overrides)
    given = changed.pop("stop", None) or ()
    stop = (given,) if isinstance(given, str) else tuple(word for word in given if word)
    if ids := stop_token_ids(stop, tokenizer):
        changed["stop_token_ids"] = (*changed.get("stop_token_ids", ()), *ids)
    return replace(sampling, **changed), stop
