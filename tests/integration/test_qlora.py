"""Adapters beside weights in 4 bits: what is trained is right, and what is published is the same.

Runs where bitsandbytes is installed (`pip install 'rlx[qlora]'`); it computes on CPUs, too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from learner_cases import random_batch, relative_difference, started, write_model
from test_lora import gradients, moved
from whole_runs import metrics, run

from rlx.core.config import LoraConfig
from rlx.core.engine.learner.merge import merge_adapter

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.engine
QLORA = LoraConfig(rank=4, quantization="nf4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def test_gradient_is_that_of_the_rounded_weights(model: str, tmp_path: Path) -> None:
    """Also after passes without gradient, for which bitsandbytes has kernels of their own."""
    learner = started(model, lora=QLORA)
    learner.export(str(tmp_path / "rounded"))
    plain = started(str(tmp_path / "rounded"), lora=LoraConfig(rank=4))
    batch = random_batch()
    assert np.abs(learner.score(batch) - plain.score(batch)).max() < 1e-4
    assert np.abs(learner.score(batch) - started(model).score(batch)).max() > 0.05
    for one in (learner, plain):
        moved(one._training.model.adapter)
    ours = gradients(learner, lambda: learner.update([batch], step=0))
    theirs = gradients(plain, lambda: plain.update([batch], step=0))
    assert relative_difference(ours, theirs) < 1e-4


def test_checkpoint_export_and_merge_are_what_was_trained(model: str, tmp_path: Path) -> None:
    learner = started(model, lora=QLORA, zero_stage=2)
    batch = random_batch()
    learner.update([batch], step=0)
    learner.save(str(tmp_path / "policy"))
    learner.export(str(tmp_path / "whole"))
    learner.export(str(tmp_path / "adapter"), adapter=True)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    now = learner.score(batch)
    for folder in ("whole", "merged"):
        assert np.abs(started(str(tmp_path / folder)).score(batch) - now).max() < 1e-4
    resumed = started(model, lora=QLORA, zero_stage=2, seed=5)
    resumed.load(str(tmp_path / "policy"))
    assert (resumed.score(batch) == now).all()


@pytest.mark.slow
def test_engine_has_the_rounded_weights_from_the_first_step(workspace: Path) -> None:
    """A whole run (about 20 s)."""
    words = "--runtime inline --engine transformers --steps 2 --groups 4 --group-size 4"
    lora = "--lora-rank 4 --set learner.lora.quantization=nf4 --lr 1e-2 --kl-coef 0.1"
    run(
        workspace,
        f"train --model tiny --data data.jsonl --reward mypkg:digits --max-new-tokens 8 {words} "
        f"{lora} --output r".split(),
    )
    for record in metrics(workspace / "r"):
        assert record["mismatch/logprob_abs_mean"] < 1e-4
        assert record["step"] > 1 or record["policy/kl_ref"] < 1e-4
