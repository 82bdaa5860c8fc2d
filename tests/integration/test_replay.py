"""Recording and replay: all there is about a rollout, and training on it without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import arguments, metrics, run, weights

from rlx.core.engine.replay import read_step

pytestmark = [pytest.mark.slow, pytest.mark.engine]

AGENT = '''
from rlx.core.agents import Step, Turn

async def two_turns(turn: Turn) -> Step:
    """The second turn is about the first; a digit anywhere is worth something."""
    reward = 0.25 * any(c.isdigit() for c in turn.action)
    if turn.index == 0:
        return Step(observation="\\nagain: ", reward=reward)
    return Step(reward=reward, done=True, metrics={"length": float(len(turn.action))})
'''
CALLS = ("reward/failed", "reward/workers_replaced")
ENGINE = ("rollout/", "reward/", "group/", "mismatch/", "policy/", "advantage/", "length")


def learning(folder: Path) -> list[dict[str, float]]:
    """The metrics that say what was learned, without who sampled it and how fast."""
    return [
        {
            name: value
            for name, value in step.items()
            if name.startswith(ENGINE) and name not in CALLS
        }
        for step in metrics(folder)
    ]


def test_a_replay_learns_what_the_run_learned(workspace: Path) -> None:
    """A run of 3 steps, a replay in two parts, another: about 40 s."""
    (workspace / "agent.py").write_text(AGENT)
    words = [
        *arguments("out", steps=3, runtime="inline", engine="transformers"),
        *"--agent agent.py:two_turns --set logging.rollouts=complete".split(),
        *"--estimator remax --set learner.minibatch_size=8".split(),
    ]
    run(workspace, words)
    first = workspace / "out"
    records = [
        json.loads(line) for line in (first / "rollouts/step-000001.jsonl").read_text().splitlines()
    ]
    assert len(records) == 4 * 4 + 4, "the greedy rollouts are recorded too"
    assert [group.greedy is not None for group in read_step(first / "rollouts", 1)] == [True] * 4
    for record in records:
        actions = [piece for piece in record["episode"] if piece["kind"] == "action"]
        assert [piece["kind"] for piece in record["episode"]] == ["action", "observation", "action"]
        assert sum(piece["tokens"] for piece in actions) == record["tokens"]
        assert record["reward"] == pytest.approx(
            record["exact"]["reward"] + sum(piece["reward"] for piece in actions)
        )
        assert record["episode"][1]["text"] == "\nagain: "

    # the data and the module with the reward are not needed any more, but for its name
    (workspace / "data.jsonl").unlink()
    run(workspace, ["train", "--replay", "out", "--output", "again", "--steps", "2"])
    run(workspace, ["train", "--resume", "--output", "again", "--steps", "3"])
    assert learning(workspace / "again") == learning(first)
    assert weights(workspace / "again") == weights(first)
    assert all("publish/gib_per_s" not in step for step in metrics(workspace / "again"))

    words = ["train", "--replay", "out", "--estimator", "group_norm", "--steps", "2"]
    run(workspace, [*words, "--output", "other"])
    assert len(metrics(workspace / "other")) == 2
    assert learning(workspace / "other") != learning(first)[:2]
    assert metrics(workspace / "other")[0]["reward/mean"] == metrics(first)[0]["reward/mean"]


def test_what_can_not_be_replayed_is_said_before_the_run(workspace: Path) -> None:
    words = arguments("out", steps=1, runtime="inline", engine="transformers")
    run(workspace, words)
    text = run(workspace, ["train", "--replay", "out"], code=2)
    assert "has no complete rollouts" in text
    assert "logging.rollouts=complete" in text
    assert "there is no run in nowhere" in run(workspace, ["train", "--replay", "nowhere"], code=2)
    run(workspace, [*words[:-1], "whole", "--set", "logging.rollouts=complete"])
    text = run(workspace, ["train", "--replay", "whole", "--steps", "3"], code=2)
    assert "complete rollouts of 1 steps, not of 3" in text
    text = run(workspace, ["train", "--replay", "whole", "--groups", "2"], code=2)
    assert "recorded with 4 groups, not 2" in text
