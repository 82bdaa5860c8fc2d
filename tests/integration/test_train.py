"""Whole runs: every runtime with every engine, resume, publication, a user's own components."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import arguments, metrics, run, weights

pytestmark = pytest.mark.engine

PLACES = [
    pytest.param("inline", "transformers"),
    pytest.param("inline", "vllm", marks=pytest.mark.slow),
    pytest.param("ray", "transformers", marks=pytest.mark.slow),
    pytest.param("ray", "vllm"),
]


@pytest.mark.parametrize(("runtime", "engine"), PLACES)
def test_run_leaves_what_the_docs_say(workspace: Path, runtime: str, engine: str):
    text = run(workspace, arguments("out", steps=3, runtime=runtime, engine=engine))
    out = workspace / "out"
    assert "3 of 3 steps" in text
    assert "next:" in text
    for name in ("config.yaml", "manifest.json", "metrics.jsonl", "finished.json"):
        assert (out / name).is_file(), name
    assert (out / "checkpoints" / "latest").resolve().name == "step-000003"
    assert list((out / "tensorboard").iterdir())
    assert len(list((out / "rollouts").glob("step-*.jsonl"))) == 3
    manifest = json.loads((out / "manifest.json").read_text())
    assert {"estimators", "losses", "rewards"} <= {item["kind"] for item in manifest["components"]}


@pytest.mark.parametrize(("runtime", "engine"), PLACES)
def test_engine_and_learner_agree_at_every_step(workspace: Path, runtime: str, engine: str):
    run(workspace, arguments("out", steps=4, runtime=runtime, engine=engine))
    records = metrics(workspace / "out")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert record["mismatch/logprob_abs_mean"] < 1e-4
        assert record["mismatch/logprob_abs_max"] < 1e-3
    assert len({record["policy/entropy"] for record in records}) == 4  # the weights did change


@pytest.mark.parametrize(
    ("runtime", "engine"),
    [
        pytest.param("inline", "transformers"),
        pytest.param("inline", "vllm", marks=pytest.mark.slow),
        pytest.param("ray", "vllm", marks=pytest.mark.slow),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(workspace: Path, runtime: str, engine: str):
    run(workspace, arguments("whole", steps=6, runtime=runtime, engine=engine))
    run(workspace, arguments("parts", steps=3, runtime=runtime, engine=engine))
    run(workspace, [*arguments("parts", steps=6, runtime=runtime, engine=engine), "--resume"])
    assert metrics(workspace / "parts") == metrics(workspace / "whole")
    assert weights(workspace / "parts") == weights(workspace / "whole")


def test_resume_with_dynamic_sampling_several_updates_and_reference(workspace: Path):
    words = [
        *("--sampler dynamic --loss ppo --correction tis --kl-coef 0.01".split()),
        *("--set sampler.high=1.1 --set sampler.low=-0.1".split()),
        *("--set learner.minibatch_size=8 --set learner.epochs=2".split()),
        *("--set learner.schedule=cosine --set learner.warmup_steps=2 --steps 4".split()),
    ]
    base = arguments("whole", steps=4, runtime="inline", engine="transformers")
    run(workspace, [*base, *words, "--checkpoint-every", "2", "--set", "checkpoint.keep=5"])
    kept = {path.name for path in (workspace / "whole/checkpoints").glob("step-*")}
    assert kept == {"step-000002", "step-000004"}
    whole, final = metrics(workspace / "whole"), weights(workspace / "whole")
    # As after a kill: the last checkpoint is the one of step 2, metrics run on to step 4.
    for name in ("checkpoints/step-000004", "export"):
        (workspace / "whole" / name).rename(workspace / name.replace("/", "-"))
    (workspace / "whole" / "finished.json").unlink()
    run(workspace, [*base, *words, "--resume"])
    assert metrics(workspace / "whole") == whole
    assert weights(workspace / "whole") == final
    assert whole[-1]["policy/kl_ref"] > 0
    assert whole[-1]["policy/clip_rate"] >= 0


def test_inline_and_ray_give_the_same_numbers(workspace: Path):
    for runtime in ("inline", "ray"):
        run(workspace, arguments(runtime, steps=3, runtime=runtime, engine="transformers"))
    assert metrics(workspace / "inline") == metrics(workspace / "ray")
    assert weights(workspace / "inline") == weights(workspace / "ray")


def test_saved_configuration_reruns_the_run(workspace: Path):
    run(workspace, arguments("first", steps=2, runtime="inline", engine="transformers"))
    run(workspace, ["train", "-c", "first/config.yaml", "--output", "second"])
    assert metrics(workspace / "first") == metrics(workspace / "second")


def test_reward_that_raises_stops_the_run_and_leaves_the_last_step(workspace: Path):
    words = arguments("out", steps=9, runtime="inline", engine="transformers")
    words[words.index("mypkg:digits")] = "mypkg:breaks_later"
    text = run(workspace, words, code=1)
    assert "breaks_later" in text
    assert "no reward any more" in text
    assert "mypkg.py" in text  # the traceback of the user's function
    assert "prompt" in text
    assert (workspace / "out/checkpoints/latest").resolve().name == "step-000001"
    resumed = arguments("out", steps=3, runtime="inline", engine="transformers")
    run(workspace, [*resumed, "--resume"])
    assert [record["step"] for record in metrics(workspace / "out")] == [1, 2, 3]
