"""When a batch is scored before it is trained on, and by whom."""

from __future__ import annotations

from typing import Any

import pytest

from rlx.core.config import RunConfig
from rlx.core.engine.workers import needs_old_logprobs

SEVERAL: dict[str, Any] = {"learner": {"epochs": 2}}
MINIBATCHES: dict[str, Any] = {"learner": {"minibatch_size": 32}}
KL_REWARD: dict[str, Any] = {"kl": {"coef": 0.1, "placement": "reward"}}
KL_LOSS: dict[str, Any] = {"kl": {"coef": 0.1}}


def needed(mode: str, changes: dict[str, Any], *requires: str) -> bool:
    config = RunConfig.model_validate({"algorithm": {"old_logprobs": mode}, **changes})
    return needs_old_logprobs(config, frozenset(requires))


@pytest.mark.parametrize("changes", [{}, SEVERAL, MINIBATCHES, KL_REWARD, KL_LOSS])
def test_recompute_always_scores_and_rollout_never(changes: dict[str, Any]) -> None:
    assert needed("recompute", changes)
    assert not needed("rollout", changes)
    assert not needed("rollout", changes, "old_logprobs")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, False), (SEVERAL, True), (MINIBATCHES, True), (KL_REWARD, True), (KL_LOSS, False)],
)
def test_auto_scores_where_the_update_itself_comes_too_late(
    changes: dict[str, Any], expected: bool
) -> None:
    assert needed("auto", changes) == expected
    assert needed("auto", changes, "old_logprobs")
