"""One rank: the update does not depend on how it was computed, and nothing of it is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import (
    TIS,
    changed_by,
    learner_arguments,
    permuted,
    random_batch,
    read_weights,
    relative_difference,
    save,
    saved_state,
    sent_by,
    started,
    without_old_logprobs,
    write_model,
)
from safetensors.torch import load_file, save_file

from rlx.core.config import LearnerConfig
from rlx.core.engine.batches import take
from rlx.core.engine.learner.packing import make_micro_batches
from rlx.core.engine.learner.schedule import learning_rate
from rlx.core.errors import ComponentError, EngineError, UsageError
from rlx.core.inputs import LossInputs
from rlx.core.objective import ObjectiveSettings
from rlx.core.references import ComponentRef

pytestmark = pytest.mark.engine
TOLERANCE = 5e-5
"""Of the norm of an update. Adam's first step divides each gradient by its own size, so that the
rounding of the smallest gradients shows; the gradients themselves agree to 1e-6."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: str) -> dict[str, np.ndarray]:
    """What one update changes, in one micro-batch."""
    return changed_by(started(model), [random_batch()])


def spoilt(x: LossInputs) -> torch.Tensor:
    """A loss that is NaN on the third action token of the rollout with 5 action tokens or more."""
    surrogate = -x.advantages * x.logprobs
    spot = torch.zeros_like(surrogate)
    spot[2] = torch.nan
    return surrogate + spot


def spiked(x: LossInputs) -> torch.Tensor:
    """A finite loss whose gradient on the first action token is not."""
    zero = (x.logprobs[:1] - x.logprobs[:1].detach()).abs()
    return torch.cat([zero.sqrt(), x.logprobs[1:]])


def failing(x: LossInputs) -> torch.Tensor:
    raise ValueError("no such thing")


def component(name: str) -> ComponentRef:
    return ComponentRef(kind="losses", name=name, target=f"{__file__}:{name}")


def micro_batch_count(**settings: Any) -> int:
    return len(make_micro_batches(random_batch(), **settings))


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (2, {"token_budget": 160, "row_tokens": 64}),
        (6, {"token_budget": 48, "row_tokens": 48}),
        (14, {"token_budget": 16, "row_tokens": 8}),
    ],
)
def test_update_does_not_depend_on_the_number_of_micro_batches(
    model: str, reference: dict[str, np.ndarray], count: int, settings: dict[str, int]
) -> None:
    assert micro_batch_count(**settings) == count
    assert micro_batch_count(token_budget=4096, row_tokens=64) == 1
    changed = changed_by(started(model, **settings), [random_batch()])
    assert relative_difference(changed, reference) < TOLERANCE


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_sequence_aggregations_do_not_depend_on_micro_batches_either(
    model: str, aggregation: str
) -> None:
    objective = ObjectiveSettings(aggregation=aggregation, kl_coef=0.05, sequence_norm=32)
    whole = changed_by(started(model, objective=objective), [random_batch()])
    split = changed_by(started(model, objective=objective, token_budget=48), [random_batch()])
    assert relative_difference(split, whole) < TOLERANCE


@pytest.mark.parametrize("seed", [1, 2])
def test_update_does_not_depend_on_the_order_of_the_rollouts(
    model: str, reference: dict[str, np.ndarray], seed: int
) -> None:
    changed = changed_by(started(model, token_budget=128), [permuted(random_batch(), seed)])
    assert relative_difference(changed, reference) < TOLERANCE


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"zero_stage": 2, "token_budget": 48},
        {"zero_stage": 3, "token_budget": 48},
        {"gradient_checkpointing": True},
        {"logprob_chunk": 16},
        {"zero_stage": 3, "logprob_chunk": 16, "gradient_checkpointing": True},
    ],
)
def test_zero_stages_and_recomputation_make_the_same_update(
    model: str, reference: dict[str, np.ndarray], settings: dict[str, Any]
) -> None:
    changed = changed_by(started(model, **settings), [random_batch()])
    assert relative_difference(changed, reference) < TOLERANCE


def test_update_equals_one_written_out_in_plain_torch(model: str) -> None:
    """On policy, without KL and entropy, PPO's gradient is that of −A·log-prob."""
    from transformers import AutoModelForCausalLM

    batch = dataclasses.replace(without_old_logprobs(random_batch()), ref_logprobs=None)
    # Without mismatch the correction's weights are 1.
    plain: Any = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0)
    before = {name: value.detach().clone() for name, value in plain.named_parameters()}
    parts = []
    for index in range(batch.sequence_count):
        single = take(batch, np.array([index]))
        tokens = torch.from_numpy(single.tokens).long()
        at = torch.from_numpy(single.action_positions)
        logits = plain(input_ids=tokens[None]).logits[0] / 0.8
        parts.append(logits.log_softmax(-1)[at - 1, tokens[at]])
    logprobs = torch.cat(parts)
    (-(torch.from_numpy(batch.advantages) * logprobs).mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()

    batch = dataclasses.replace(batch, rollout_logprobs=logprobs.detach().numpy())
    learner = started(model, objective=ObjectiveSettings(aggregation="token-mean"))
    changed = changed_by(learner, [batch])
    truth = {n: (p.detach() - before[n]).numpy() for n, p in plain.named_parameters()}
    assert relative_difference(changed, truth) < 1e-4
    result = started(model, objective=ObjectiveSettings(aggregation="token-mean")).update(
        [batch], step=0
    )
    assert result is not None
    assert result.metrics["policy/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert result.metrics["mismatch/logprob_abs_max"] < 1e-5
    np.testing.assert_allclose(result.logprobs, logprobs.detach().numpy(), atol=1e-5)


def test_same_batch_and_seed_give_bitwise_the_same_update(
    model: str, reference: dict[str, np.ndarray]
) -> None:
    again = changed_by(started(model), [random_batch()])
    assert all((again[name] == reference[name]).all() for name in reference)


def test_metrics_are_those_of_the_whole_batch(model: str) -> None:
    whole = started(model).update([random_batch()], step=0)
    split = started(model, token_budget=48).update([random_batch()], step=0)
    assert whole is not None
    assert split is not None
    assert {
        "policy/loss",
        "policy/ratio_mean",
        "policy/kl_ref",
        "policy/entropy",
        "policy/grad_norm",
        "policy/lr",
        "mismatch/logprob_abs_mean",
        "correction/clipped_rate",
    } <= set(whole.metrics)
    for name, value in whole.metrics.items():
        assert split.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    np.testing.assert_allclose(split.logprobs, whole.logprobs, atol=1e-5)


def test_on_policy_step_has_ratio_one(model: str) -> None:
    result = started(model).update([without_old_logprobs(random_batch())], step=0)
    assert result is not None
    assert result.metrics["policy/ratio_mean"] == 1.0
    assert result.metrics["policy/kl_old"] == 0.0


def test_minibatches_are_optimizer_steps_of_their_own(model: str) -> None:
    batch = random_batch()
    halves = [take(batch, np.arange(0, 7)), take(batch, np.arange(7, 14))]
    together = started(model, epochs=2)
    result = together.update([*halves, *halves], step=0)
    apart = started(model)
    for half in [*halves, *halves]:
        apart.update([half], step=0)
    assert result is not None
    assert result.logprobs.shape == (batch.action_count,)
    first = together._training.model.module.state_dict()
    second = apart._training.model.module.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert together._training.updates == 4


def test_several_steps_without_old_logprobs_are_refused(model: str) -> None:
    batch = without_old_logprobs(random_batch())
    with pytest.raises(EngineError, match="old log-probs"):
        started(model).update([batch, batch], step=0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate_warms_up_and_decays(schedule: Any, expected: list[float]) -> None:
    settings = LearnerConfig(lr=1.0, warmup_steps=2, schedule=schedule)
    rates = [learning_rate(settings, taken, 6) for taken in range(6)]
    assert rates == pytest.approx(expected, abs=1e-6)


def test_scheduled_rate_reaches_the_optimizer(model: str) -> None:
    learner = started(model, warmup_steps=10, lr=1e-2)
    before = learner._training.model.module.model.lm_head.weight.detach().clone()
    result = learner.update([random_batch()], step=0)
    assert result is not None
    assert result.metrics["policy/lr"] == pytest.approx(1e-3)
    moved = (learner._training.model.module.model.lm_head.weight - before).abs().max()
    # Adam's first step moves each weight by the rate.
    assert float(moved.detach()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_aborted_update_leaves_no_trace(
    model: str, reference: dict[str, np.ndarray], settings: dict[str, Any]
) -> None:
    learner = started(model, token_budget=48, **settings)
    before = read_weights(learner)
    forward, calls = learner._training.model.forward, []

    def abort_on_third(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            thread = threading.Thread(target=learner.abort)
            thread.start()
            thread.join()
        return forward(*args, **kwargs)

    learner._training.model.forward = abort_on_third  # type: ignore[method-assign]
    assert learner.update([random_batch()], step=0) is None
    assert len(calls) == 3
    after = read_weights(learner)
    assert all((before[name] == after[name]).all() for name in before)
    learner._training.model.forward = forward  # type: ignore[method-assign]
    assert relative_difference(changed_by(learner, [random_batch()]), reference) < TOLERANCE


def test_abort_after_the_first_optimizer_step_comes_too_late(model: str) -> None:
    learner = started(model)
    step = learner._training.model.step

    def abort_after(rate: float) -> float:
        norm = step(rate)
        learner.abort()
        return norm

    learner._training.model.step = abort_after  # type: ignore[method-assign]
    assert learner.update([random_batch(), random_batch()], step=0) is not None
    assert learner._training.updates == 2


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("spoilt", "the loss's gradient is nan|the loss is nan"),
        ("spiked", "the loss's gradient is (nan|inf) at action token 0"),
        ("failing", "ValueError: no such thing"),
    ],
)
@pytest.mark.parametrize("stage", [0, 2])
def test_broken_loss_is_named_and_changes_nothing(
    model: str, reference: dict[str, np.ndarray], loss: str, message: str, stage: int
) -> None:
    learner = started(model, loss=component(loss), zero_stage=stage, token_budget=160)
    with pytest.raises(ComponentError, match=message):
        learner.update([random_batch()], step=0)
    healthy = started(model)
    learner._loss = healthy._loss
    assert relative_difference(changed_by(learner, [random_batch()]), reference) < TOLERANCE


def test_non_finite_advantage_is_found_by_rollout_and_token(model: str) -> None:
    batch = random_batch()
    assert batch.advantages is not None
    advantages = batch.advantages.copy()
    start = int(batch.action_lengths[:6].sum())
    advantages[start + 4] = np.nan
    with pytest.raises(ComponentError, match=r"action token 4 .* of rollout 6 \(group 3\)"):
        started(model).update([dataclasses.replace(batch, advantages=advantages)], step=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_non_finite_gradient_of_the_weights_is_not_applied(model: str, stage: int) -> None:
    learner = started(model, zero_stage=stage)
    before = read_weights(learner)
    backward = learner._training.model.backward

    def overflow(loss: torch.Tensor, *, last: bool) -> None:
        backward(loss * float("inf"), last=last)

    learner._training.model.backward = overflow  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="gradient's norm"):
        learner.update([random_batch()], step=0)
    after = read_weights(learner)
    assert all((before[name] == after[name]).all() for name in before)


def test_non_finite_weights_are_an_engine_error(model: str) -> None:
    learner = started(model)
    with torch.no_grad():
        learner._training.model.module.model.lm_head.weight[3] = torch.nan
    with pytest.raises(EngineError, match="the model's log-prob is nan at action token"):
        learner.update([random_batch()], step=0)


def test_sent_weights_carry_checkpoint_names(model: str) -> None:
    from safetensors.torch import load_file

    sent, arrived = sent_by(started(model), 7)
    assert sent is not None
    assert sent.version == 7
    assert sent.bytes == sum(tensor.nbytes for tensor in arrived.values())
    original = load_file(Path(model) / "model.safetensors")
    assert arrived.keys() == original.keys()
    assert all(torch.equal(arrived[name], original[name]) for name in original)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_export_loads_in_transformers_and_speaks_as_the_learner(
    model: str, tmp_path: Path, stage: int
) -> None:
    from transformers import AutoModelForCausalLM

    learner = started(model, zero_stage=stage)
    learner.update([random_batch()], step=0)
    learner.export(str(tmp_path))
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = read_weights(learner)
    exported = {name: value.detach().numpy() for name, value in loaded.named_parameters()}
    assert all((exported[name] == weights[name]).all() for name in weights)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]


RESUME = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from learner_cases import random_batch, read_weights, started
import numpy as np
learner = started({model!r}, **{settings!r})
learner.load({folder!r})
for step in (2, 3):
    result = learner.update([random_batch(step)], step=step)
np.savez({out!r}, lr=result.metrics["policy/lr"], **read_weights(learner))
"""


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_new_process_resumes_bit_by_bit(model: str, tmp_path: Path, stage: int) -> None:
    settings = {"zero_stage": stage, "schedule": "linear", "warmup_steps": 3}
    learner = started(model, **settings)
    for step in (0, 1):
        learner.update([random_batch(step)], step=step)
    save(learner, str(tmp_path / "checkpoint"))
    for step in (2, 3):
        result = learner.update([random_batch(step)], step=step)
    assert result is not None
    weights = read_weights(learner)
    code = RESUME.format(
        here=str(Path(__file__).parent),
        model=model,
        settings=settings,
        folder=str(tmp_path / "checkpoint"),
        out=str(tmp_path / "resumed.npz"),
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
    resumed = np.load(tmp_path / "resumed.npz")
    assert float(resumed["lr"]) == result.metrics["policy/lr"]
    assert all((resumed[name] == weights[name]).all() for name in weights)


def test_checkpoint_carries_the_random_state(model: str, tmp_path: Path) -> None:
    learner = started(model)
    save(learner, str(tmp_path))
    expected = (torch.rand(3), np.random.rand(3))
    learner.load(str(tmp_path))
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(3) == expected[1]).all()


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 3), (3, 1)])
def test_bfloat16_resumes_under_another_zero_stage(
    model: str, tmp_path: Path, theirs: int, ours: int
) -> None:
    """The float32 weights are taken over bit by bit; bfloat16 ones are made of them."""
    learner = started(model, zero_stage=theirs, dtype="bfloat16")
    learner.update([random_batch(0)], step=0)
    save(learner, tmp_path / "theirs")
    other = started(model, zero_stage=ours, dtype="bfloat16")
    other.load(str(tmp_path / "theirs"))
    expected = read_weights(learner)
    assert all((value == expected[name]).all() for name, value in read_weights(other).items())
    save(other, tmp_path / "ours")
    expected = saved_state(tmp_path / "theirs")
    found = saved_state(tmp_path / "ours")
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)


def test_what_is_held_is_the_state_of_that_moment(model: str, tmp_path: Path) -> None:
    learner = started(model)
    learner.update([random_batch(0)], step=0)
    save(learner, tmp_path / "then")
    learner.hold(copy=True, export=True)
    expected = read_weights(learner)
    learner.update([random_batch(1)], step=1)
    asyncio.run(learner.write_held(str(tmp_path / "held"), str(tmp_path / "model")))
    then, held = saved_state(tmp_path / "then"), saved_state(tmp_path / "held")
    assert all((then[name] == held[name]).all() for name in then)
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert all((value.numpy() == expected[name]).all() for name, value in exported.items())
    with pytest.raises(EngineError, match="nothing is held"):
        asyncio.run(learner.write_held(str(tmp_path / "again"), None))


def test_checkpoint_before_the_first_step_is_resumed(model: str, tmp_path: Path) -> None:
    """Adam has no moments yet: they are made as Adam makes them."""
    learner = started(model)
    save(learner, tmp_path)
    expected = changed_by(learner, [random_batch()])
    fresh = started(model)
    fresh.load(str(tmp_path))
    found = changed_by(fresh, [random_batch()])
    assert all((found[name] == expected[name]).all() for name in expected)


def test_checkpoint_of_another_model_is_refused(model: str, tmp_path: Path) -> None:
    save(started(model), tmp_path / "checkpoint")
    facts = json.loads((tmp_path / "checkpoint" / "learner.json").read_text())
    name = next(iter(facts["parameters"]))
    facts["parameters"][name] = [3, 3]
    (tmp_path / "checkpoint" / "learner.json").write_text(json.dumps(facts))
    with pytest.raises(EngineError, match=rf"1 parameters differ.*{name}: \[3, 3\] there"):
        started(model).load(str(tmp_path / "checkpoint"))


def test_checkpoint_of_another_format_is_refused(model: str, tmp_path: Path) -> None:
    (tmp_path / "learner.json").write_text(json.dumps({"world": 1, "zero_stage": 0, "updates": 3}))
    with pytest.raises(EngineError, match="another version of rlx"):
        started(model).load(str(tmp_path))


@pytest.mark.parametrize("harm", ["shard-0.safetensors is gone", "a piece is gone"])
def test_checkpoint_that_is_not_whole_is_refused(model: str, tmp_path: Path, harm: str) -> None:
    save(started(model), tmp_path)
    shard = tmp_path / "shard-0.safetensors"
    if harm == "a piece is gone":
        pieces = load_file(shard)
        dropped = next(name for name in pieces if name.endswith("/fp32"))
        del pieces[dropped]
        save_file(pieces, shard)
    else:
        shard.unlink()
    with pytest.raises(EngineError, match=r"not whole|shard 0 can't be read"):
        started(model).load(str(tmp_path))


def test_folder_without_checkpoint_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no learner checkpoint"):
        started(model).load(str(tmp_path))


def test_bfloat16_keeps_a_float32_master_copy(tmp_path: Path) -> None:
    """Steps far below bfloat16's resolution add up to visible ones."""
    model = write_model(tmp_path / "m", dtype="bfloat16")
    learner = started(model, dtype="auto", lr=1e-5)
    before = read_weights(learner)
    assert learner._training.model.stage == 1
    for step in range(60):
        learner.update([random_batch()], step=step)
    after = read_weights(learner)
    moved = np.mean([(after[name] != before[name]).mean() for name in before])
    assert moved > 0.2


def test_starting_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's bfloat16 optimizer would report the machine's memory on the user's terminal."""
    started(write_model(tmp_path / "m", dtype="bfloat16"), dtype="bfloat16")
    assert capfd.readouterr().out == ""


def test_bfloat16_micro_batches_accumulate_in_float32(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", dtype="bfloat16")
    whole = started(model, dtype="bfloat16").update([random_batch()], step=0)
    split = started(model, dtype="bfloat16", token_budget=16).update([random_batch()], step=0)
    assert whole is not None
    assert split is not None
    norms = [result.metrics["policy/grad_norm"] for result in (whole, split)]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_bfloat16_without_master_copy_is_refused(model: str) -> None:
    with pytest.raises(UsageError, match="ZeRO stage 0"):
        started(model, dtype="bfloat16", zero_stage=0)


def test_weight_decay_spares_norms(model: str) -> None:
    learner = started(model, weight_decay=0.5, lr=1e-3)
    batch = random_batch()
    assert batch.advantages is not None
    still = dataclasses.replace(
        without_old_logprobs(batch), advantages=np.zeros_like(batch.advantages), ref_logprobs=None
    )
    learner._objective = ObjectiveSettings(aggregation="token-mean")
    before = read_weights(learner)
    learner.update([still], step=0)
    after = read_weights(learner)
    for name, value in before.items():
        factor = 1.0 if "norm" in name else 1 - 1e-3 * 0.5
        np.testing.assert_allclose(after[name], value * factor, rtol=1e-6)


def test_correction_reference_is_used(model: str) -> None:
    tight = ComponentRef(**{**_fields(TIS), "params": {"low": 0.99, "high": 1.01}})
    result = started(model, correction=tight).update([random_batch()], step=0)
    assert result is not None
    assert result.metrics["correction/clipped_rate"] > 0.5


def _fields(ref: ComponentRef) -> dict[str, Any]:
    return {item.name: getattr(ref, item.name) for item in dataclasses.fields(ref)}


def test_foreign_process_group_of_one_is_reused(model: str) -> None:
    import torch.distributed as dist

    started(model)
    group = dist.group.WORLD
    learner = started(model)
    assert dist.group.WORLD is group
    learner.stop()
    assert dist.is_initialized()


def test_process_group_of_another_size_is_refused(model: str) -> None:
    started(model)
    from rlx.core.engine.learner.learner import PolicyLearner

    with pytest.raises(EngineError, match="can't become rank 1 of 2"):
        PolicyLearner(**learner_arguments(model, rank=1, world=2)).start()


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_the_update_does_not_depend_on_how_segments_are_packed(
    model: str, aggregation: str
) -> None:
    """Two segments a rollout: in one micro-batch, or far apart; denominators count rollouts."""
    alone = random_batch()
    half = alone.sequence_count // 2
    batch = dataclasses.replace(
        alone, segments=np.full(half, 2), group=np.arange(half), rewards=np.zeros(half)
    )
    objective = ObjectiveSettings(aggregation=aggregation, sequence_norm=32)

    def change(part: Any, **settings: Any) -> dict[str, np.ndarray]:
        return changed_by(started(model, objective=objective, **settings), [part])

    whole = change(batch)
    assert relative_difference(change(batch, token_budget=16), whole) < 2 * TOLERANCE
    gap = relative_difference(change(alone), whole)
    assert gap == 0 if aggregation == "token-mean" else gap > 100 * TOLERANCE
