"""Evaluation over a scripted engine: what is asked of it, when it is due, which step is best."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer

from rlx.core.config import RunConfig
from rlx.core.engine.evaluation import Evaluator, limits_of, plan_evaluation
from rlx.core.engine.evaluations import Evaluations
from rlx.core.engine.interfaces import Generation, Sampling
from rlx.core.errors import UsageError
from rlx.core.evaluation import Evaluation, Scoring, evaluated
from rlx.core.plugins import PluginSystem
from rlx.core.rollouts import Rollout
from rlx.core.run import Run
from rlx.core.selection import select

TOKENIZER = tiny_tokenizer()
END = int(TOKENIZER.eos_token_id)


@dataclass
class Engine:
    """Answers `1` to even seeds and `0` to odd ones; greedy: always `0`."""

    calls: list[tuple[list[int], Sampling, int]] = field(default_factory=list)
    forgot: int = 0

    @contextmanager
    def group(self, size: int) -> Iterator[Any]:
        yield self.generate

    async def generate(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Generation:
        self.calls.append((list(prompt), sampling, seed))
        await asyncio.sleep(0)
        text = "1" if sampling.temperature and seed % 2 == 0 else "0"
        tokens = [*TOKENIZER(text)["input_ids"], END]
        return Generation(
            request_id=0,
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            finish_reason="stop",
            version=0,
        )

    async def forget(self) -> None:
        self.forgot += 1


@dataclass
class Scorer:
    """1 for the answer `1`; drops the groups of the prompts in `drop`."""

    drop: frozenset[str] = frozenset()
    failed: float = 0.0
    groups: int = 0

    async def score_group(self, rollouts: Sequence[Rollout]) -> list[Rollout] | None:
        self.groups += 1
        if rollouts[0].task.prompt in self.drop:
            self.failed += len(rollouts)
            return None
        return [replace(one, parts={"is_one": float(one.text == "1")}) for one in rollouts]

    def take_metrics(self) -> dict[str, float]:
        failed, self.failed = self.failed, 0.0
        return {"reward/failed": failed}

    async def state_dict(self) -> dict[str, object]:
        return {"groups": self.groups}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.groups = state["groups"]


@pytest.fixture(scope="module")
def plugins() -> PluginSystem:
    return PluginSystem.load()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i}=", "label": "1"} for i in range(6)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text("def is_one(sample): return float(sample.response == '1')")
    return tmp_path


def config_of(folder: Path, **settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "rewards": [f"{folder}/reward.py:is_one"],
            "eval": {"sources": str(folder / "test.jsonl"), **settings.pop("eval", {})},
            "rollout": {"max_new_tokens": 8},
            **settings,
        }
    )


def run(
    config: RunConfig, plugins: PluginSystem, engine: Engine, scorer: Scorer | None = None
) -> Evaluation:
    selection = select(config, plugins)
    plan = plan_evaluation(config, selection, tokenizer=TOKENIZER, context_length=64)
    evaluator = Evaluator(
        plan,
        client=cast(Any, engine),
        selection=selection,
        scorer=scorer or Scorer(),
        tokenizer=TOKENIZER,
        limits=limits_of(config, 64),
    )
    return asyncio.run(evaluator.evaluate())


def test_one_sample_is_greedy(data: Path, plugins: PluginSystem) -> None:
    engine = Engine()
    found = run(config_of(data), plugins, engine)
    assert found.metrics["eval/test/mean"] == 0.0
    assert {sampling.temperature for _, sampling, _ in engine.calls} == {0.0}
    assert [TOKENIZER.decode(prompt) for prompt, _, _ in engine.calls] == [
        f"{i}=" for i in range(6)
    ]
    assert engine.forgot == 1


def test_samples_are_drawn_at_the_training_temperature(data: Path, plugins: PluginSystem) -> None:
    engine = Engine()
    config = config_of(data, eval={"samples": 4, "max_tasks": 3, "max_new_tokens": 5})
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"temperature": 0.7})}
    )
    found = run(config, plugins, engine)
    assert len(engine.calls) == 12
    assert len({seed for _, _, seed in engine.calls}) == 12
    assert {(s.temperature, s.max_new_tokens) for _, s, _ in engine.calls} == {(0.7, 5)}
    passes = [seed % 2 == 0 for _, _, seed in engine.calls]
    assert found.metrics["eval/test/mean"] == pytest.approx(np.mean(passes))
    assert found.metrics["eval/test/pass@4"] >= found.metrics["eval/test/pass@1"]


def test_every_evaluation_draws_the_same_seeds(data: Path, plugins: PluginSystem) -> None:
    engines = [Engine(), Engine()]
    for engine in engines:
        run(config_of(data, eval={"samples": 2}), plugins, engine)
    assert engines[0].calls == engines[1].calls


def test_dropped_groups_and_failed_rewards_are_counted(data: Path, plugins: PluginSystem) -> None:
    scorer = Scorer(drop=frozenset({"2=", "4="}), failed=99.0)  # 99 of training, not ours
    found = run(config_of(data), plugins, Engine(), scorer)
    assert (found.sources["test"].tasks, found.sources["test"].failed) == (4, 2)
    assert found.metrics["eval/failed"] == 2.0
    assert scorer.take_metrics() == {"reward/failed": 0.0}


def test_rewards_with_state_are_as_before_after_an_evaluation(
    data: Path, plugins: PluginSystem
) -> None:
    scorer = Scorer(groups=7)
    run(config_of(data), plugins, Engine(), scorer)
    assert scorer.groups == 7


def test_more_tasks_than_a_wave_come_in_order(
    data: Path, plugins: PluginSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlx.core.engine.waves._WAVE", 4)
    found = run(config_of(data, eval={"samples": 2}), plugins, Engine())
    assert [group.task.id for group in found.groups["test"]] == [f"test/{i}" for i in range(6)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eval": {"part": "is_on"}}, "did you mean 'is_one'?"),
        ({"checkpoint": {"best": "eval/tset/mean"}}, "did you mean 'eval/test/mean'?"),
        ({"checkpoint": {"best": "eval/test/pass@4"}}, "eval/test/pass@1"),
        ({"data": {"prompt": "question"}}, "eval.sources.0.prompt"),
        ({"data": {"max_prompt_tokens": 1}}, "too long"),
    ],
)
def test_mistakes_are_found_before_the_engine_starts(
    data: Path, plugins: PluginSystem, settings: dict[str, Any], expected: str
) -> None:
    config = config_of(data, **settings)
    selection = select(config, plugins)
    with pytest.raises(UsageError) as caught:
        plan_evaluation(config, selection, tokenizer=TOKENIZER, context_length=64)
    assert expected in str(caught.value)


# ------------------------------------------------------------------ evaluations of a training run


class Fixed:
    """Stands in for `Evaluator`: gives the means that it is told."""

    def __init__(self, means: Sequence[float]) -> None:
        self.means = list(means)

    async def evaluate(self, progress: Any) -> Evaluation:
        empty = evaluated({"s": []}, samples=1, scoring=Scoring(), failed_rewards=0, seconds=0.0)
        value = self.means.pop(0)
        result = replace(empty.sources["s"], mean=value, length_mean=100 * value)
        return replace(empty, sources={"s": result})


@dataclass
class Listener:
    """Reporter and plugin system in one."""

    heard: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def status(self, text: str) -> None: ...

    def notify(self, hook: str, **more: Any) -> None:
        self.heard.append((hook, more))


def evaluations(
    folder: Path,
    means: Sequence[float] = (),
    listener: Listener | None = None,
    best: str = "eval/s/mean",
    **settings: Any,
) -> Evaluations:
    config = RunConfig.model_validate({"steps": 7, "eval": {"sources": "x", **settings}})
    config = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"best": best})}
    )
    listener = listener or Listener()
    return Evaluations(
        cast(Evaluator, Fixed(means)),
        run=Run(name="r", folder=folder, config=config),
        reporter=cast(Any, listener),
        plugins=cast(Any, listener),
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [7]),
        ({"every": 3}, [3, 6, 7]),
        ({"every": 7}, [7]),
        ({"every": 3, "before_training": True}, [0, 3, 6, 7]),
    ],
)
def test_evaluation_is_due(tmp_path: Path, settings: dict[str, Any], expected: list[int]) -> None:
    due = evaluations(tmp_path, **settings)
    assert [step for step in range(8) if due.due(step)] == expected


def test_a_step_is_evaluated_once_and_a_lost_evaluation_is_made_up_for(tmp_path: Path) -> None:
    first = evaluations(tmp_path, [0.5], every=3)
    lost = first.state_dict()
    asyncio.run(first.evaluate(3))
    assert not first.due(3)
    again, missing = evaluations(tmp_path, every=3), evaluations(tmp_path, every=3)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    missing.load_state_dict(lost)
    assert (again.due(3), missing.due(3)) == (False, True)


def test_the_first_of_equal_steps_is_best_and_survives_a_resume(tmp_path: Path) -> None:
    first = evaluations(tmp_path, [0.2, 0.4, 0.4], every=1)
    for step in (1, 2, 3):
        asyncio.run(first.evaluate(step))
    assert first.best_step == 2
    second = evaluations(tmp_path, [0.3, 0.5], every=1)
    second.load_state_dict(first.state_dict())
    asyncio.run(second.evaluate(4))
    assert second.best_step == 2
    asyncio.run(second.evaluate(5))
    assert second.best_step == 5


def test_the_best_length_is_the_shortest(tmp_path: Path) -> None:
    first = evaluations(tmp_path, [0.4, 0.2, 0.2], every=1, best="eval/s/length_mean")
    for step in (1, 2, 3):
        asyncio.run(first.evaluate(step))
    assert first.best_step == 2
    second = evaluations(tmp_path, [0.3, 0.1], every=1, best="eval/s/length_mean")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in (4, 5):
        asyncio.run(second.evaluate(step))
    assert second.best_step == 5


def test_an_evaluation_without_a_number_is_never_best(tmp_path: Path) -> None:
    found = evaluations(tmp_path, [float("nan")], every=1)
    asyncio.run(found.evaluate(1))
    assert found.best_step is None


def test_hooks_hear_the_results(tmp_path: Path) -> None:
    listener = Listener()
    asyncio.run(evaluations(tmp_path, [0.5], listener, every=1).evaluate(1))
    ((hook, more),) = listener.heard
    assert (hook, more["step"], more["results"]["eval/s/mean"]) == ("rlx_on_eval_end", 1, 0.5)
