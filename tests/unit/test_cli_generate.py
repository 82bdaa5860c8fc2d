"""`rlx generate`: mistakes are one message, and a folder goes on with its own settings only."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_folder import LLAMA, make_model
from tiny_tokenizer import tiny_tokenizer

from rlx.cli.generate import FLAGS
from rlx.cli.generate import _settings as read_settings
from rlx.cli.main import main
from rlx.cli.targets import Target
from rlx.core.config import RunConfig
from rlx.core.same_samples import first_difference
from rlx.core.settings import dump_yaml, known_keys, load_settings

Outcome = tuple[int, str, str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", {**LLAMA, "max_position_embeddings": 64})
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "done").mkdir()
    config = load_settings(flags={"model": "model", "data": "data.jsonl"}, env={}).config
    (tmp_path / "done/config.yaml").write_text(dump_yaml(config))
    return tmp_path


@pytest.fixture
def rlx(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    monkeypatch.setattr("rlx.cli.main._NATIVE", frozenset())

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["rlx", "generate", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        output = capsys.readouterr()
        code = caught.value.code
        return (code if isinstance(code, int) else 0), output.out, output.err

    return run


def test_flags_set_known_keys() -> None:
    assert set(FLAGS.values()) <= set(known_keys())


MODEL = ["model", "--data", "data.jsonl", "--max-new-tokens", "8"]
BAD = [
    (["./modle"], "did you mean 'model'?"),
    ([*MODEL, "--select", "pair"], "did you mean 'pairs'?"),
    ([*MODEL, "--select", "pairs"], "needs rewards, and none is selected"),
    ([*MODEL, "--reward", "exact_match"], "label"),
    ([*MODEL, "--reward", "mth"], "did you mean 'math'?"),
    ([*MODEL, "--temperature", "0"], "would all be the same"),
    ([*MODEL, "-n", "1", "--reward", "stop_properly", "--select", "pairs"], "needs two samples"),
    ([*MODEL, "--keep", "5", "--reward", "stop_properly", "--select", "best"], "best 5 of 4"),
    ([*MODEL, "--max-new-tokens", "64"], "leave no room"),
    ([*MODEL, "--output", "done"], "is not empty"),
    ([*MODEL, "--resume"], "nothing is named that could go on"),
    ([*MODEL, "--resume", "--output", "new"], "new holds no samples"),
    (["--resume", "--output", "done", "--seed", "5"], "made with another seed"),
    (["--resume", "--output", "done", "--max-new-tokens", "9"], "another rollout.max_new_tokens"),
    (["--resume", "--output", "done", "--samples", "9"], "another generate.samples"),
]
CONDITIONS = [
    ("{prompt}", "generate.condition has no {reward}"),
    ("{reward}", "generate.condition has no {prompt}"),
    ("{prompt} {score}", "KeyError"),
    ("{prompt} {reward", "can't be filled"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD)
def test_each_mistake_is_one_message(
    rlx: Callable[..., Outcome], arguments: list[str], expected: str
) -> None:
    code, _, err = rlx(*arguments)
    assert (code, expected in err, "Traceback" in err) == (2, True, False), err


@pytest.mark.parametrize(("condition", "expected"), CONDITIONS)
def test_a_condition_says_prompt_and_reward(
    rlx: Callable[..., Outcome], folder: Path, condition: str, expected: str
) -> None:
    (folder / "c.yaml").write_text(f"generate: {{condition: {condition!r}}}\n")
    more = ["--reward", "stop_properly", "--select", "conditioned", "-c", "c.yaml"]
    code, _, err = rlx(*MODEL, *more)
    assert (code, expected in err) == (2, True), err


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature"),
        ({"rewards": ["math"]}, "rewards"),
        ({"data": {"template": "{prompt}?"}}, "data.template"),
        ({"generate": {"temperature": 0.0}}, "generate.temperature"),
        ({"reward": {"clip": 1.0}}, "reward.clip"),
        ({"data": {"max_samples": 5}}, None),
        ({"generate": {"select": ["best"], "keep": 2, "parquet": True}}, None),
        ({"rollout": {"max_running": 8, "kv_cache_gib": 2.0}}, None),
        ({"runtime": {"kind": "inline"}, "learner": {"lr": 1.0}, "steps": 7}, None),
    ],
)
def test_what_shapes_a_sample_must_stay(settings: dict[str, Any], key: str | None) -> None:
    assert first_difference(RunConfig(), RunConfig.model_validate(settings)) == key


@pytest.mark.parametrize(("facts", "rewards"), [({"objective": "sft"}, []), ({}, ["math"])])
def test_a_run_on_fixed_data_names_no_reward(
    folder: Path, facts: dict[str, Any], rewards: list[str]
) -> None:
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text("rewards: [math]\n")
    (run / "manifest.json").write_text(json.dumps({"facts": facts}))
    target = Target(model="model", settings=run / "config.yaml", run=run, step=1)
    settings = read_settings(target, {}, [], [], None)
    assert [reward.name for reward in settings.config.rewards] == rewards
    settings = read_settings(target, {"reward": ["regex"]}, [], [], None)
    assert [reward.name for reward in settings.config.rewards] == ["regex"]
