"""Each rule of the preflight finds its mistake, and leaves a right configuration alone."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlx.core import preflight, preflight_critic, preflight_publication
from rlx.core.config import RunConfig
from rlx.core.errors import UsageError
from rlx.core.machine import Gpu
from rlx.core.models import ModelInfo
from rlx.core.preflight import Finding, check
from rlx.core.references import ComponentRef
from rlx.core.selection import Selection

INFO = ModelInfo(
    name="m",
    folder=None,
    architecture="LlamaForCausalLM",
    vocab_size=100,
    context_length=1024,
    dtype="float32",
    tied=True,
    hidden_size=64,
    layers=2,
    kv_width=32,
    parameters=1000,
    exact=True,
)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is installed, and there is no GPU."""
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: name)
    for module in (preflight, preflight_publication):
        monkeypatch.setattr(module, "find_gpus", lambda: ())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "x"


def selection(correction: str = "none", **required_by: tuple[str, ...]) -> Selection:
    reward = SimpleNamespace(name="math")
    target = f"rlx.plugins.corrections.{correction}:{correction}"
    return cast(
        "Selection",
        SimpleNamespace(
            requires=frozenset(required_by),
            required_by=required_by,
            rewards=((reward, 1.0),),
            loads=(),
            components=(),
            correction=ComponentRef(kind="corrections", name=correction, target=target, params={}),
        ),
    )


def run(
    folder: Path,
    changes: dict[str, Any] | None = None,
    *,
    chosen: Selection | None = None,
    info: ModelInfo = INFO,
    **more: Any,
) -> list[Finding]:
    config = RunConfig.model_validate({"output": folder, **(changes or {})})
    return check(config, chosen or selection(), info, **more)


def error(folder: Path, changes: dict[str, Any] | None = None, **more: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        run(folder, changes, **more)
    return caught.value


def replaced(**changes: Any) -> ModelInfo:
    from dataclasses import replace

    return replace(INFO, **changes)


def test_a_sound_configuration_has_no_findings(folder: Path) -> None:
    assert run(folder) == []


def test_one_rollout_per_group_is_refused_where_groups_are_compared(folder: Path) -> None:
    one = {"rollout": {"group_size": 1}}
    assert run(folder, one) == []
    caught = error(
        folder,
        one,
        chosen=selection(groups=("estimator 'e'",)),
        origins={"rollout.group_size": "--group-size"},
    )
    assert caught.what.startswith("estimator 'e' compares the rollouts")
    assert caught.where == "rollout.group_size (--group-size)"
    assert "--group-size 8" in str(caught.fix)


def test_who_wants_a_reward_model_needs_a_reward_that_has_one(folder: Path) -> None:
    caught = error(folder, chosen=selection(reward_model=("estimator 'e'", "loss 'l'")))
    assert "estimator 'e' and loss 'l' requires" in caught.what
    assert caught.where == "estimator"
    assert run(folder, chosen=selection(reward_model=("estimator 'e'", "reward 'model'"))) == []


@pytest.mark.parametrize(("size", "near"), [(7, "8"), (129, "128"), (1000, "128"), (100, "64")])
def test_minibatches_must_divide_the_batch(folder: Path, size: int, near: str) -> None:
    caught = error(folder, {"learner": {"minibatch_size": size}})
    assert "16 groups × 8 rollouts = 128" in caught.what
    assert near in str(caught.fix)


@pytest.mark.parametrize("size", [1, 32, 128])
def test_dividing_minibatches_pass(folder: Path, size: int) -> None:
    assert run(folder, {"learner": {"minibatch_size": size}}) == []


def test_every_rank_must_have_a_rollout(folder: Path) -> None:
    assert "idle" in error(folder, {"learner": {"minibatch_size": 2, "ranks": 4}}).what


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"rollout": {"max_new_tokens": 1024}}, "rollout.max_new_tokens"),
        ({"rollout": {"max_new_tokens": 64, "context_length": 64}}, "rollout.max_new_tokens"),
        ({"rollout": {"context_length": 2048}}, "rollout.context_length"),
        ({"data": {"max_prompt_tokens": 800}}, "data.max_prompt_tokens"),
        ({"rollout": {"max_response_tokens": 100}}, "rollout.max_response_tokens"),
    ],
)
def test_prompt_and_response_must_fit_the_context(
    folder: Path, changes: dict[str, Any], where: str
) -> None:
    assert error(folder, changes).where == where


def test_the_kv_cache_must_hold_one_sequence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = replaced(layers=64, kv_width=8192, context_length=8192, parameters=None)
    caught = error(folder, info=large)
    assert caught.where == "rollout.kv_cache_gib"
    assert "32.0" in str(caught.fix)  # 2 · 64 · 8192 · 4 bytes · 8192 tokens
    assert run(folder, {"rollout": {"kv_cache_gib": 32}}, info=large) == []
    assert run(folder, {"rollout": {"engine": "transformers"}}, info=large) == []
    monkeypatch.setattr(preflight, "find_gpus", lambda: (Gpu(name="g", memory=1),))
    assert run(folder, info=large) == []


def test_tensor_parallelism_needs_vllm_and_devices(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"rollout": {"tensor_parallel": 2}}
    assert run(folder, two) == []
    assert (
        "one device"
        in error(folder, {"rollout": {"tensor_parallel": 2, "engine": "transformers"}}).what
    )
    monkeypatch.setattr(preflight, "find_gpus", lambda: (Gpu(name="g", memory=1),))
    assert "there are 1" in error(folder, two).what


def test_several_vllm_engines_need_processes(folder: Path) -> None:
    two: dict[str, Any] = {"rollout": {"engines": 2}, "runtime": {"kind": "inline"}}
    assert "a process each" in error(folder, two).what
    assert run(folder, {**two, "rollout": {"engines": 2, "engine": "transformers"}}) == []
    assert run(folder, {"rollout": {"engines": 2}}) == []


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_cut_sampling_is_told_and_refused_where_it_breaks_ratios(
    folder: Path, cut: dict[str, Any]
) -> None:
    (finding,) = run(folder, {"rollout": cut})
    assert finding.level == "warning"
    assert "whole" in finding.what
    strict = {"rollout": cut, "algorithm": {"old_logprobs": "rollout"}}
    assert error(folder, strict).where == f"rollout.{next(iter(cut))}"


def test_a_correction_of_log_probs_that_are_the_engines_is_told(folder: Path) -> None:
    chosen = selection(correction="tis")
    assert run(folder, {"algorithm": {"old_logprobs": "recompute"}}, chosen=chosen) == []
    (finding,) = run(folder, {"algorithm": {"old_logprobs": "rollout"}}, chosen=chosen)
    assert (finding.level, finding.key) == ("warning", "algorithm.old_logprobs")
    assert "tis has no effect" in finding.what
    assert run(folder, {"algorithm": {"old_logprobs": "rollout"}}) == []


def test_k1_in_the_loss_is_told(folder: Path) -> None:
    chosen = selection(ref_logprobs=("kl.coef",))
    (finding,) = run(folder, {"kl": {"coef": 0.1, "estimator": "k1"}}, chosen=chosen)
    assert (finding.level, finding.key) == ("warning", "kl.estimator")
    in_reward = {"coef": 0.1, "estimator": "k1", "placement": "reward"}
    assert run(folder, {"kl": in_reward}, chosen=chosen) == []


def test_an_adaptive_horizon_shorter_than_a_step_is_told(folder: Path) -> None:
    kl = {"coef": 0.1, "controller": "adaptive", "horizon": 128}
    assert run(folder, {"kl": kl}, chosen=selection(ref_logprobs=("kl.coef",))) == []
    (finding,) = run(
        folder, {"kl": {**kl, "horizon": 127}}, chosen=selection(ref_logprobs=("kl.coef",))
    )
    assert (finding.level, finding.key) == ("warning", "kl.horizon")


def test_weights_in_float16_need_another_training_type(folder: Path) -> None:
    half = replaced(dtype="float16")
    assert error(folder, info=half).where == "learner.dtype"
    assert run(folder, {"learner": {"dtype": "bfloat16"}}, info=half) == []


def test_several_ranks_need_several_processes(folder: Path) -> None:
    two = {"learner": {"ranks": 2}}
    assert run(folder, two) == []
    assert "--runtime ray" in str(error(folder, {**two, "runtime": {"kind": "inline"}}).fix)


def test_a_warm_up_longer_than_the_run_is_told(folder: Path) -> None:
    (finding,) = run(folder, {"steps": 5, "learner": {"warmup_steps": 5}})
    assert finding.key == "learner.warmup_steps"
    assert run(folder, {"steps": 5, "learner": {"warmup_steps": 4}}) == []


@pytest.mark.parametrize("kl", [{"placement": "reward"}, {"estimator": "k2"}, {"reference": "x"}])
def test_kl_settings_without_kl_are_told(folder: Path, kl: dict[str, str]) -> None:
    (finding,) = run(folder, {"kl": kl})
    assert "has no effect" in finding.what
    chosen = selection(ref_logprobs=("kl.coef",))
    if "reference" not in kl:
        assert run(folder, {"kl": {**kl, "coef": 0.1}}, chosen=chosen) == []


def test_a_reference_must_exist_and_share_the_vocabulary(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = selection(ref_logprobs=("kl.coef",))
    missing = {"kl": {"coef": 0.1, "reference": "/no/such/folder"}}
    assert error(folder, missing, chosen=chosen).where == "kl.reference"
    monkeypatch.setattr(preflight, "policy_info", lambda name, where: replaced(vocab_size=99))
    assert "vocabulary of 99" in error(folder, missing, chosen=chosen).what


NEEDS_VALUES = selection(values=("estimator 'e'",))


def test_critic_settings_without_a_critic_are_told(folder: Path) -> None:
    (finding,) = run(folder, {"critic": {"lr": 1e-3}})
    assert (finding.level, finding.key) == ("warning", "critic.lr")
    assert run(folder, {"critic": {"lr": 1e-3}}, chosen=NEEDS_VALUES) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"critic": {"minibatch_size": 7}}, "critic.minibatch_size"),
        ({"critic": {"warmup_steps": 5}, "steps": 5}, "critic.warmup_steps"),
        ({"critic": {"model": "/no/such"}}, "critic.model"),
    ],
)
def test_a_critic_must_fit_the_run(folder: Path, changes: dict[str, Any], key: str) -> None:
    assert error(folder, changes, chosen=NEEDS_VALUES).where == key


def test_a_critic_must_share_the_vocabulary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_critic, "model_info", lambda name, where: replaced(vocab_size=99))
    changes = {"critic": {"model": "x"}}
    assert "vocabulary of 99" in error(folder, changes, chosen=NEEDS_VALUES).what


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"faults": {"learner": "restart"}}, "faults.learner", "--checkpoint-every"),
        ({"faults": {"divergence": "rollback"}}, "faults.divergence", "--checkpoint-every"),
        (
            {"faults": {"divergence": "rollback"}, "checkpoint": {"every": 1}, "replay": "r"},
            "faults.divergence",
            "a run with an engine",
        ),
    ],
)
def test_what_is_gone_back_to_must_be_there(
    folder: Path, changes: dict[str, Any], key: str, fix: str
) -> None:
    found = error(folder, changes)
    assert key in str(found)
    assert fix in str(found)


def test_a_learner_that_can_not_be_restarted_is_told(folder: Path) -> None:
    changes = {"faults": {"learner": "restart"}, "runtime": {"kind": "inline"}}
    assert any("faults.learner has no effect" in finding.what for finding in run(folder, changes))


def test_rewards_without_weight_are_refused(folder: Path) -> None:
    chosen = selection()
    reward = SimpleNamespace(name="math")
    object.__setattr__(chosen, "rewards", ((reward, 0.0),))
    assert "weight 0" in error(folder, chosen=chosen).what
    object.__setattr__(chosen, "rewards", ())
    assert run(folder, chosen=chosen)[0].level == "warning"


@pytest.mark.parametrize(
    ("module", "changes", "hint"),
    [
        ("vllm", {}, "--engine transformers"),
        ("ray", {}, "--runtime inline"),
        ("deepspeed", {}, "pip install deepspeed"),
    ],
)
def test_missing_libraries_are_named_with_the_way_around(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    changes: dict[str, Any],
    hint: str,
) -> None:
    monkeypatch.setattr(
        preflight.importlib.util, "find_spec", lambda name: None if name == module else name
    )
    caught = error(folder, changes)
    assert caught.what == f"{module} is not installed"
    assert hint in str(caught.fix)


def test_libraries_that_are_not_used_may_be_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        preflight.importlib.util,
        "find_spec",
        lambda name: None if name in ("ray", "vllm") else name,
    )
    light = {"rollout": {"engine": "transformers"}, "runtime": {"kind": "inline"}}
    assert run(folder, light) == []


def test_all_errors_come_at_once(folder: Path) -> None:
    caught = error(
        folder,
        {"rollout": {"max_new_tokens": 5000}, "learner": {"minibatch_size": 7}},
        origins={"learner.minibatch_size": "run.yaml:3"},
    )
    assert caught.what.startswith("2 settings don't fit")
    assert "learner.minibatch_size (run.yaml:3)" in caught.what


def finish(folder: Path, step: int | None, checkpoint: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("steps: 3\n")
    if checkpoint:
        (folder / "checkpoints" / "step-000002").mkdir(parents=True)
        (folder / "checkpoints" / "step-000002" / "files.json").write_text("{}")
    if step is not None:
        (folder / "finished.json").write_text(json.dumps({"step": step}))
    return folder


def test_a_run_is_never_overwritten(folder: Path) -> None:
    finish(folder, 100)
    assert "finished run of 100 steps" in error(folder).what
    (folder / "finished.json").unlink()
    caught = error(folder)
    assert "has not finished" in caught.what
    assert "--resume" in str(caught.fix)


def test_a_run_that_failed_before_its_first_step_may_be_started_again(folder: Path) -> None:
    finish(folder, None, checkpoint=False)
    (folder / "metrics.jsonl").touch()
    assert run(folder) == []
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "before its first checkpoint" in error(folder).what


def test_an_empty_folder_is_free_and_a_foreign_one_is_not(folder: Path) -> None:
    folder.mkdir(parents=True)
    assert run(folder) == []
    (folder / "thesis.tex").touch()
    assert "not empty" in error(folder).what
    assert "is a file" in error(folder / "thesis.tex").what


def test_resume_continues_unfinished_runs_and_finished_ones_with_more_steps(folder: Path) -> None:
    finish(folder, None)
    assert run(folder, resume=True) == []
    (folder / "finished.json").write_text('{"step": 100}')
    assert "--steps 200" in str(error(folder, resume=True).fix)
    assert run(folder, {"steps": 101}, resume=True) == []


def test_resume_with_nothing_to_resume_lists_what_there_is(folder: Path) -> None:
    other = finish(folder.parent / "other", None)
    caught = error(folder, resume=True)
    assert "no run" in caught.what
    assert f"--output {other} --resume" in str(caught.fix)


def test_resume_without_a_checkpoint_starts_from_the_beginning(folder: Path) -> None:
    finish(folder, None, checkpoint=False)
    assert not [item for item in run(folder, resume=True) if item.level == "error"]


def test_resume_without_output_asks_which_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finish(tmp_path / "runs" / "a", None)
    with pytest.raises(UsageError) as caught:
        check(RunConfig(), selection(), INFO, resume=True)
    assert "--output runs/a --resume" in str(caught.value.fix)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "not a folder that can be written" in error(tmp_path / "file" / "run").what


def test_too_little_disk_is_refused_and_little_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replaced(parameters=1_000_000)  # a checkpoint of 16 MB, 4 MB of weights
    free = {"disk": 10_000_000, "/dev/shm": 10**9}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: Usage(0, 0, free.get(str(path), free["disk"]))
    )
    assert "one checkpoint takes" in error(folder, info=model).what
    free["disk"] = 40_000_000
    assert run(folder, info=model) == []
    (finding,) = run(folder, {"checkpoint": {"every": 1}}, info=model)
    assert finding.key == "checkpoint.keep"
    free["disk"] = 10**12
    free["/dev/shm"] = 1_000_000
    found = error(folder, info=model)
    assert (found.where, "/dev/shm has" in found.what) == ("publication.transport", True)
    assert run(folder, {"publication": {"transport": "gloo"}}, info=model) == []


def test_gpu_transports_are_refused_where_they_cannot_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = {"publication": {"transport": "nccl"}}
    found = error(folder, nccl)
    assert found.what == "nccl moves weights between GPUs, and there is none"
    assert (found.where, found.fix) == ("publication.transport", "`publication.transport: auto`")
    monkeypatch.setattr(preflight_publication, "find_gpus", lambda: (object(),))
    assert run(folder, nccl) == []
    assert "vLLM's" in error(folder, {**nccl, "rollout": {"engine": "transformers"}}).what
    assert "of their own" in error(folder, {**nccl, "runtime": {"kind": "inline"}}).what
