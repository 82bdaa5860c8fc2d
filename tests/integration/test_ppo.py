"""Runs with critic, adaptive KL coefficient and normalised rewards: what they learn and save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whole_runs import arguments, metrics, run, weights

RECIPE = Path(__file__).resolve().parents[2] / "benchmarks" / "ppo.yaml"
pytestmark = [pytest.mark.engine, pytest.mark.slow]
PPO = "--estimator gae --set critic.lr=3e-3 --set learner.minibatch_size=8 --set learner.epochs=2"
EVERYTHING = (
    f"{PPO} --set critic.warmup_steps=1 --kl-coef 0.05 --set kl.controller=adaptive "
    "--set kl.target=0.01 --set kl.horizon=20 --set kl.placement=reward "
    "--set reward.normalize=running"
).split()


def train(workspace: Path, output: str, *, steps: int, more: list[str]) -> list[dict[str, Any]]:
    words = arguments(output, steps=steps, runtime="inline", engine="transformers")
    run(workspace, [*words, *more])
    return metrics(workspace / output)


def test_resumed_run_continues_bit_by_bit(workspace: Path) -> None:
    """Critic and optimizer, KL coefficient and reward statistics are all in checkpoints."""
    straight = train(workspace, "straight", steps=5, more=EVERYTHING)
    train(workspace, "cut", steps=3, more=EVERYTHING)
    resumed = train(workspace, "cut", steps=5, more=[*EVERYTHING, "--resume"])
    assert resumed == straight
    assert weights(workspace / "cut") == weights(workspace / "straight")
    assert len({record["policy/kl_coef"] for record in straight[1:]}) > 1
    assert len({record["reward/running_mean"] for record in straight}) == 5
    assert [("policy/loss" in record) for record in straight] == [False] + [True] * 4
    assert all("critic/loss" in record for record in straight)


def test_ppo_learns_the_embedded_task_and_its_critic_the_returns(workspace: Path) -> None:
    """The recipe of docs/results.md, 60 steps: the one test of both numbers; about a minute."""
    words = ["train", "-c", str(RECIPE), "--runtime", "inline", "--engine", "transformers"]
    run(workspace, [*words, "--output", "ppo"])
    records = metrics(workspace / "ppo")
    explained = [record["critic/explained_variance"] for record in records]
    assert explained[0] == 0
    assert sum(explained[-10:]) / 10 > 0.3
    assert sum(record["reward/mean"] for record in records[-10:]) / 10 >= 0.9


def test_critic_learns_what_the_prompt_tells_of_the_reward(workspace: Path) -> None:
    """The embedded model, and a reward that depends on the task alone."""
    source = "def reversing(sample):\n    return float(str(sample.prompt).startswith('reverse'))\n"
    (workspace / "easy.py").write_text(source)
    words = "train --estimator gae --reward easy:reversing --runtime inline --engine transformers"
    critic = "--steps 12 --output ppo --set critic.lr=1e-3 --set critic.warmup_steps=3"
    run(workspace, [*words.split(), *critic.split()])
    explained = [record["critic/explained_variance"] for record in metrics(workspace / "ppo")]
    assert explained[0] == 0
    assert sum(explained[-3:]) / 3 > 0.3


def test_run_without_values_has_no_critic(workspace: Path) -> None:
    (record,) = train(workspace, "plain", steps=1, more=[])
    assert not [name for name in record if name.startswith("critic/")]
    assert not (workspace / "plain" / "checkpoints" / "latest" / "critic").exists()
    words = arguments("plain", steps=2, runtime="inline", engine="transformers")
    text = " ".join(run(workspace, [*words, "--resume", *PPO.split()], code=2).split())
    assert "estimator 'gae' requires a critic" in text
    assert len(train(workspace, "plain", steps=2, more=["--resume"])) == 2  # nothing was changed


def test_placement_of_the_critic_does_not_change_the_run(workspace: Path) -> None:
    """One thread each, so that both ways round alike."""
    more = [*PPO.split(), "--set", "runtime.cpus=1"]
    beside = train(workspace, "beside", steps=3, more=more)
    apart = train(workspace, "apart", steps=3, more=[*more, "--set", "critic.placement=apart"])
    assert apart == beside
    assert weights(workspace / "apart") == weights(workspace / "beside")


def test_two_ranks_of_policy_and_critic_in_ray(workspace: Path) -> None:
    ranks = [*PPO.split(), "--set", "learner.ranks=2"]
    records = {}
    for placement in ("colocated", "apart"):
        words = arguments(placement, steps=2, runtime="ray", engine="transformers")
        run(workspace, [*words, *ranks, "--set", f"critic.placement={placement}"])
        records[placement] = metrics(workspace / placement)
        logs = {path.stem for path in (workspace / placement / "logs").glob("*.log")}
        assert {"learner-0", "learner-1"} <= logs
        assert ("critic-0" in logs) == (placement == "apart")
    one = train(workspace, "one", steps=2, more=PPO.split())
    for found in records.values():
        for name in ("reward/mean", "critic/explained_variance", "policy/entropy", "critic/loss"):
            assert found[1][name] == pytest.approx(one[1][name], rel=1e-2, abs=1e-3), name


def test_old_logprobs_of_one_update_are_the_same_wherever_they_come_from(workspace: Path) -> None:
    """Scored before, taken from the update's own pass, or the engine's: on policy all agree."""
    modes = ("auto", "recompute", "rollout")
    found = {
        mode: train(workspace, mode, steps=2, more=["--set", f"algorithm.old_logprobs={mode}"])
        for mode in modes
    }
    assert found["recompute"] == found["auto"]
    assert weights(workspace / "recompute") == weights(workspace / "auto")
    for mine, theirs in zip(found["rollout"], found["auto"], strict=True):
        assert 0 <= mine["mismatch/logprob_abs_max"] < 1e-3
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy", "reward/mean"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def test_remax_makes_one_greedy_rollout_per_task(workspace: Path) -> None:
    records = train(workspace, "remax", steps=2, more=["--estimator", "remax"])
    assert all(record["rollout/greedy"] == 4 for record in records)
    assert all("reward/greedy_mean" in record for record in records)


def test_run_goes_on_over_skipped_steps(workspace: Path) -> None:
    """An estimator that gives NaN in the second step."""
    (workspace / "odd.py").write_text(
        "import torch\n"
        "class nan_once:\n"
        "    def __init__(self):\n"
        "        self.calls = 0\n"
        "    def __call__(self, x):\n"
        "        self.calls += 1\n"
        "        advantages = x.rewards - x.rewards.mean()\n"
        "        if self.calls == 2:\n"
        "            advantages[5] = torch.nan\n"
        "        return advantages\n"
    )
    odd = ["--estimator", "odd.py:nan_once"]
    records = train(workspace, "skip", steps=3, more=[*odd, "--set", "learner.nonfinite=skip"])
    assert [record["policy/skipped_updates"] for record in records] == [0, 1, 0]
    words = arguments("stop", steps=3, runtime="inline", engine="transformers")
    text = " ".join(run(workspace, [*words, *odd], code=1).split())
    assert "action token 0 of the rollout (group 5, rollout 1, task data/" in text
    assert (workspace / "stop" / "checkpoints" / "latest").resolve().name == "step-000001"


def test_non_finite_loss_ends_the_run_with_the_last_step_saved(workspace: Path) -> None:
    (workspace / "odd.py").write_text(
        "def nan_later(x):\n"
        "    surrogate = -x.advantages * x.logprobs\n"
        "    return surrogate * float('nan') if x.metadata['step'] == 2 else surrogate\n"
    )
    words = arguments("stop", steps=4, runtime="inline", engine="transformers")
    text = " ".join(run(workspace, [*words, "--loss", "odd.py:nan_later"], code=1).split())
    assert "the loss is nan at action token 0" in text
    assert "task data/" in text
    assert (workspace / "stop" / "checkpoints" / "latest").resolve().name == "step-000002"


def test_estimator_that_requires_the_entropy_gets_it(workspace: Path) -> None:
    (workspace / "odd.py").write_text(
        "from rlx import component\n"
        "@component(requires={'entropy'})\n"
        "def curious(x):\n"
        "    assert x.entropy.shape == x.token_rewards.shape\n"
        "    return x.entropy\n"
    )
    (record,) = train(workspace, "curious", steps=1, more=["--estimator", "odd.py:curious"])
    # The same numbers by way of the update's own forward pass.
    assert record["advantage/mean"] == pytest.approx(record["policy/entropy"], rel=1e-5)
