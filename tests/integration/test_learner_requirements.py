"""Settings that need an accelerator are refused on a CPU, and sleeping changes no update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import random_batch, read_weights, started, write_model

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner import requirements
from rlx.core.engine.learner.requirements import check_settings
from rlx.core.errors import UsageError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"offload_optimizer": True}, "learner.offload_optimizer: true needs an accelerator"),
        ({"sleep": True}, "learner.sleep: true needs an accelerator"),
        ({"liger": True}, "'liger_kernel', which is not installed"),
        ({"attention": "flash_attention_3"}, "'flash_attn_interface', which is not installed"),
    ],
)
def test_what_a_cpu_lacks_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_settings(LearnerConfig(**settings), CPU)


def test_offloading_needs_a_sharded_optimizer() -> None:
    with pytest.raises(UsageError, match="sharded"):
        check_settings(LearnerConfig(sleep=True, zero_stage=0), GPU)
    check_settings(LearnerConfig(sleep=True, offload_optimizer=True), GPU)


def test_flash_attention_shares_no_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: object())
    settings = LearnerConfig(attention="flash_attention_2", shared_prefix="on")
    with pytest.raises(UsageError, match="can't share prefixes"):
        check_settings(settings, GPU)
    with pytest.raises(UsageError, match="needs an accelerator"):
        check_settings(settings, CPU)


@pytest.mark.engine
def test_sleeping_between_updates_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls are those of an accelerator; on a CPU DeepSpeed moves within the same memory."""
    monkeypatch.setattr(requirements, "_need_accelerator", lambda *_: None)
    model = write_model(tmp_path)
    seen = []
    for sleep in (False, True):
        learner = started(model, zero_stage=2, sleep=sleep)
        for step in range(2):
            assert learner.update([random_batch(step)], step=step) is not None
        seen.append(read_weights(learner))
    for name, weights in seen[0].items():
        np.testing.assert_array_equal(seen[1][name], weights)
