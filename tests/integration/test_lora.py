"""Learners with adapters: what they learn, what they publish, what they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import (
    learner_arguments,
    permuted,
    random_batch,
    read_weights,
    relative_difference,
    save,
    sent_by,
    started,
    write_model,
)
from objective_cases import OBJECTIVES, gradient_of, others_of, rows_for, started_objective
from test_value_learner import started as started_critic
from test_value_learner import value_batch
from transformers import AutoModelForCausalLM

from rlx.core.config import LoraConfig
from rlx.core.engine.learner.learner import PolicyLearner
from rlx.core.engine.learner.lora import Adapter
from rlx.core.engine.learner.merge import merge_adapter
from rlx.core.engine.learner.scorer import Scorer
from rlx.core.errors import EngineError, UsageError

pytestmark = pytest.mark.engine
LORA = LoraConfig(rank=4)
SPLIT = {"token_budget": 64, "row_tokens": 48}
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def own_parameters(learner: Any) -> Weights:
    """Copies of what is trained."""
    named = learner._training.model.adapter_parameters()
    return {name: value.float().numpy().copy() for name, value in named}


def change(learner: PolicyLearner, steps: int = 1) -> Weights:
    before = own_parameters(learner)
    for step in range(steps):
        assert learner.update([random_batch(step)], step=step) is not None
    after = own_parameters(learner)
    return {name: after[name] - before[name] for name in before}


def gradients(learner: Any, update: Any) -> Weights:
    """Gradient of one update, whose step is not taken (ZeRO 0)."""
    found: Weights = {}
    held = learner._training.model

    def keep(rate: float) -> float:
        for name, parameter in held.adapter.own_parameters():
            found[name] = parameter.grad.numpy().copy()
        held.discard()
        return 0.0

    held.step = keep
    update()
    del held.step
    return found


def moved(adapter: Adapter, scale: float = 0.1) -> None:
    """Adapters that change something, as they do not at first."""
    torch.manual_seed(0)
    with torch.no_grad():
        for _, parameter in adapter.own_parameters():
            parameter.add_(torch.randn_like(parameter) * scale)


# ------------------------------------------------------------------------------- gradients


def test_gradient_is_that_of_plain_peft(model: str) -> None:
    """The adapters' gradient of Σ advantage · log π by peft alone, one sequence at a time."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    learner = started_objective(model, "sft", lora=LORA)
    moved(learner._training.model.adapter)
    rows = rows_for("sft")
    found = gradients(learner, lambda: learner.update(rows, step=0))

    plain = AutoModelForCausalLM.from_pretrained(model).double()
    peft = get_peft_model(plain, PeftConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    state = {
        f"base_model.model.{name}": value
        for name, value in learner._training.model.adapter_parameters()
    }
    assert not peft.load_state_dict(state, strict=False).unexpected_keys
    begin = action = 0
    total = torch.zeros((), dtype=torch.float64)
    for length, count in zip(rows.lengths, rows.action_lengths, strict=True):
        tokens = torch.from_numpy(rows.tokens[begin : begin + length]).long()
        places = torch.from_numpy(rows.action_positions[action : action + count])
        logprobs = peft(tokens[None]).logits[0].log_softmax(-1)
        total = total - logprobs[places - 1, tokens[places]].sum()
        begin, action = begin + length, action + count
    (total / rows.action_count).backward()
    theirs = {
        name.removeprefix("base_model.model."): parameter.grad.float().numpy()
        for name, parameter in peft.named_parameters()
        if parameter.grad is not None
    }
    assert relative_difference(found, theirs) < 1e-5


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packing_does_not_change_the_gradient_of_an_objective(model: str, name: str) -> None:
    batch = rows_for(name)
    found = []
    for sizes in ({}, SPLIT):
        learner = started_objective(model, name, lora=LORA, **sizes)
        moved(learner._training.model.adapter)
        gradient, _ = gradient_of(learner, batch, others_of(name, batch))
        assert all(".lora_" in key or "modules_to_save" in key for key in gradient)
        found.append(gradient)
    assert relative_difference(*found) < 1e-5


def test_head_of_a_reward_model_is_trained_whole(model: str) -> None:
    learner = started_objective(model, "rm", lora=LORA)
    gradient, _ = gradient_of(learner, rows_for("rm"), None)
    head = [value for name, value in gradient.items() if name.startswith("model.score.")]
    assert len(head) == 1
    assert np.abs(head[0]).max() > 0


def test_critic_has_adapters_and_a_head_that_is_trained_whole(model: str, tmp_path: Path) -> None:
    learner = started_critic(model, lora=LORA)
    batch = value_batch()
    held = learner._training.model
    assert {
        name.split(".")[0] for name, p in held.module.named_parameters() if p.requires_grad
    } == {
        "model",
        "head",
    }
    before = {name: p.detach().clone() for name, p in held.module.named_parameters()}
    for step in range(3):  # from a head of zeros nothing reaches the adapters at first
        assert learner.update([batch], step=step) is not None
    changed = {
        name for name, p in held.module.named_parameters() if not torch.equal(p, before[name])
    }
    assert "head.weight" in changed
    assert all(".lora_" in name for name in changed - {"head.weight"})
    assert len(changed) == 1 + 2 * 14
    save(learner, str(tmp_path))
    resumed = started_critic(model, lora=LORA, seed=3)
    resumed.load(str(tmp_path))
    assert (resumed.score(batch) == learner.score(batch)).all()


@pytest.mark.parametrize(
    "changes", [{"zero_stage": 2}, {"zero_stage": 3}, {"gradient_checkpointing": True}]
)
def test_loss_curve_is_that_of_zero_0(model: str, changes: dict[str, Any]) -> None:
    """Three steps with a switch to the reference and back after each."""
    curves = []
    for options in ({}, changes):
        learner = started(model, lora=LORA, **options)
        for step in range(3):
            learner.update([random_batch(step)], step=step)
            learner.score(random_batch(), as_it_started=True)
        curves.append(own_parameters(learner))
    assert relative_difference(*reversed(curves)) < 5e-4


def test_order_of_rollouts_does_not_matter(model: str) -> None:
    first, second = started(model, lora=LORA, **SPLIT), started(model, lora=LORA, **SPLIT)
    for learner in (first, second):
        moved(learner._training.model.adapter)
    batch = random_batch()
    ours = gradients(first, lambda: first.update([batch], step=0))
    theirs = gradients(second, lambda: second.update([permuted(batch, 3)], step=0))
    assert relative_difference(ours, theirs) < 1e-5


# ------------------------------------------------------------------------ the two together


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rank": 64},
        {"rslora": True, "alpha": 3.0},
        {"dora": True},
        {"target_modules": ["q_proj", "down_proj"]},
    ],
    ids=["all", "full rank", "rslora", "dora", "some"],
)
def test_merged_weights_do_what_adapters_do(
    model: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    base = AutoModelForCausalLM.from_pretrained(model)
    frozen = {name: value.clone() for name, value in base.state_dict().items()}
    tokens = torch.arange(3, 30)[None]
    before = base(tokens).logits
    adapter = Adapter(base, LoraConfig(**{"rank": 4, **settings}))
    assert (base(tokens).logits - before).abs().max() < 1e-4
    moved(adapter)
    with_adapters = base(tokens).logits
    assert (with_adapters - before).abs().max() > 0.1

    merged = AutoModelForCausalLM.from_pretrained(model)
    weights = {weight.name: weight.compute() for weight in adapter.whole_weights()}
    assert weights.keys() == dict(merged.named_parameters()).keys()
    merged.load_state_dict(weights, strict=False)
    assert (merged(tokens).logits - with_adapters).abs().max() < 1e-4

    adapter.save(dict(adapter.own_parameters()), tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "whole")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert all((exported.state_dict()[name] == merged.state_dict()[name]).all() for name in frozen)

    after = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items()}
    assert all((after[name] == value).all() for name, value in frozen.items())
    with adapter.switched_off():
        assert (base(tokens).logits == before).all()


def test_peft_itself_reads_an_exported_adapter_and_merges_it_likewise(
    model: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    learner = started(model, lora=LORA)
    change(learner)
    learner.export(str(tmp_path / "adapter"), adapter=True)
    learner.export(str(tmp_path / "whole"))
    base = AutoModelForCausalLM.from_pretrained(model)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-6
    scored = started(str(tmp_path / "whole")).score(random_batch())
    assert np.abs(scored - learner.score(random_batch())).max() < 1e-4


@pytest.mark.parametrize("stage", [0, 3])
def test_publication_leaves_out_what_did_not_change(model: str, stage: int) -> None:
    """Neighbours of changed tensors go with them: engines keep q, k and v in one."""
    lora = LoraConfig(rank=2, target_modules=["q_proj"])
    learner = started(model, lora=lora, zero_stage=stage)
    learner.update([random_batch()], step=0)
    _, everything = sent_by(learner, 1)
    sent, part = sent_by(learner, 1, base=1)
    assert sent is not None
    assert {name.split(".", 3)[-1] for name in part} == {
        f"self_attn.{name}_proj.weight" for name in "qkvo"
    }
    assert len(everything) > len(part)
    assert all(torch.equal(part[name], everything[name]) for name in part)


@pytest.mark.parametrize("stage", [0, 3])
def test_adapter_switched_off_is_the_reference_model(model: str, stage: int) -> None:
    learner = started(model, lora=LORA, zero_stage=stage)
    batch = random_batch()
    arguments = learner_arguments(model)
    scorer = Scorer(model=model, settings=arguments["settings"], temperature=0.8, threads=1)
    scorer.start()
    reference = scorer.score(batch)
    for step in range(2):
        learner.update([batch], step=step)
        assert np.abs(learner.score(batch, as_it_started=True) - reference).max() < 1e-5
    assert np.abs(learner.score(batch) - reference).max() > 0.1


# -------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    "changes",
    [{}, {"zero_stage": 3}, pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow)],
)
def test_resumed_training_goes_on_bit_by_bit(
    model: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    lora = LoraConfig(rank=4, dropout=0.2)
    learner = started(model, lora=lora, **changes)
    change(learner, 2)
    save(learner, str(tmp_path / "policy"))
    size = sum(path.stat().st_size for path in (tmp_path / "policy").iterdir())
    assert size < Path(model, "model.safetensors").stat().st_size
    change(learner, 2)
    resumed = started(model, lora=lora, seed=7, **changes)
    resumed.load(str(tmp_path / "policy"))
    change(resumed, 2)
    ours, theirs = read_weights(learner), read_weights(resumed)
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_dropout_is_on_while_learning_only(model: str) -> None:
    learner = started(model, lora=LoraConfig(rank=4, dropout=0.5))
    batch = random_batch()
    change(learner)
    assert (learner.score(batch) == learner.score(batch)).all()
    result = learner.update([batch], step=1)
    assert result is not None
    assert result.logprobs is not None
    fresh = started(model, lora=LoraConfig(rank=4))
    change(fresh)
    plain = fresh.update([batch], step=1)
    assert plain is not None
    assert plain.logprobs is not None
    assert np.abs(fresh.score(batch) - learner.score(batch)).max() > 0
    assert np.abs(result.logprobs - plain.logprobs).max() > 0.05


# ------------------------------------------------------------------------------------- errors


def test_unknown_module_names_say_what_there_is(model: str) -> None:
    with pytest.raises(EngineError, match="did you mean 'q_proj'"):
        started(model, lora=LoraConfig(rank=2, target_modules=["q_prj"]))
    with pytest.raises(EngineError, match="is tied"):
        started(model, lora=LoraConfig(rank=2, modules_to_save=["lm_head"]))


def test_adapter_of_another_base_is_refused(model: str, tmp_path: Path) -> None:
    started(model, lora=LORA).export(str(tmp_path / "adapter"), adapter=True)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(path.read_text().replace(model, "embedded"))
    with pytest.raises(UsageError, match="can't be loaded"):
        merge_adapter(tmp_path / "adapter", tmp_path / "whole")
    (tmp_path / "adapter" / "config.json").unlink()
    with pytest.raises(UsageError, match="does not fit its base"):
        merge_adapter(tmp_path / "adapter", tmp_path / "whole")
    path.write_text(path.read_text().replace('"embedded"', '"./nowhere"'))
    with pytest.raises(UsageError, match="no model folder"):
        merge_adapter(tmp_path / "adapter", tmp_path / "whole")


def test_adapter_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(UsageError, match="IA3"):
        merge_adapter(tmp_path, tmp_path / "whole")
    with pytest.raises(UsageError, match="can't be read"):
        merge_adapter(tmp_path / "nothing", tmp_path / "whole")
