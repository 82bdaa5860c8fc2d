"""kill -9 and SIGSTOP of workers: rollout engines, rewards, the learner."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.runs import (
    Budget,
    LiveRun,
    Outcome,
    left_alone,
    mended,
    metrics,
    rollout_places,
    same_result,
)

GROUPS = 16
TAIL = 5


def kill_engines(
    folder: Path,
    budget: Budget,
    *,
    engine: str,
    staleness: int,
    engines: int = 1,
    kills: int,
    steps: int,
    seed: int,
    goal: float | None = 0.1,
) -> Outcome:
    """Kill rollout engines at random moments, also while they start, and compare with the same run
    left alone: every rollout is there once, the rewards are what they were, and no engine was
    started anew but those that were killed.

    Args:
        goal: most by which the mean reward of the last steps may differ.
    """
    words = f"--groups {GROUPS} --steps {steps} --engine {engine} --max-staleness {staleness}"
    words += " --set rollout.partial_rollout=true" if staleness else ""
    plain = left_alone(folder, words.split())
    more = f"--set rollout.engines={engines} --set faults.engine_restarts={2 * kills}"
    run = LiveRun(folder / "killed", [*words.split(), *more.split()])
    names = [f"engine-{number}" for number in range(engines)]
    done = _kill_at_random(run, names, budget, kills=kills, steps=steps, seed=seed)
    code = run.wait()
    rewards, expected = _rewards(run.folder), _rewards(plain)
    places = rollout_places(run.folder)
    asked, found = steps * GROUPS * 8, len(set(places))
    gap = abs(_tail(rewards) - _tail(expected))
    whole = len(places) == found == asked and len(rewards) == steps
    no_other = mended(run.folder, "engine_restarts") <= done
    good = code == 0 and whole and no_other and (goal is None or gap < goal)
    kind = f"{staleness} ahead" if staleness else "synchronous"
    kind += f", {engines} engines" if engines > 1 else ""
    return Outcome(
        fault=f"kill -9 of a rollout engine ({engine}, {kind})",
        injected=done,
        good=done if good else 0,
        note="{found:,.0f} rollouts of {asked:,.0f} asked for, {twice:.0f} twice, in {runs:.0f} "
        f"runs; mean reward of the last {TAIL} steps at most {{most_gap:.3f}} from the run left "
        "alone",
        numbers={
            "found": found,
            "asked": asked,
            "twice": len(places) - found,
            "runs": 1,
            "most_gap": gap,
        },
    )


def kill_rewards(folder: Path, budget: Budget, *, kills: int, steps: int, seed: int) -> Outcome:
    """Kill the reward worker: rewards are functions of the rollouts, so nothing may change."""
    words = f"--groups {GROUPS} --steps {steps} --engine transformers".split()
    return _kill_and_compare(
        folder,
        budget,
        words,
        [],
        "rewards-0",
        fault="kill -9 of the reward worker",
        kills=kills,
        seed=seed,
    )


def kill_learner(folder: Path, budget: Budget, *, kills: int, steps: int, seed: int) -> Outcome:
    """Kill the learner under `faults.learner: restart`: the same weights in the end."""
    words = f"--groups 4 --steps {steps} --engine transformers --checkpoint-every 1".split()
    return _kill_and_compare(
        folder,
        budget,
        words,
        ["--set", "faults.learner=restart"],
        "learner-0",
        fault="kill -9 of the learner, `faults.learner: restart`",
        kills=kills,
        seed=seed,
    )


def _kill_and_compare(
    folder: Path,
    budget: Budget,
    words: list[str],
    more: list[str],
    worker: str,
    *,
    fault: str,
    kills: int,
    seed: int,
) -> Outcome:
    """Kill a worker whose death must change nothing in what is learned."""
    plain = left_alone(folder, words)
    run = LiveRun(folder / "killed", [*words, *more])
    steps = int(words[words.index("--steps") + 1])
    done = _kill_at_random(run, [worker], budget, kills=kills, steps=steps, seed=seed)
    same = run.wait() == 0 and same_result(run.folder, plain)
    return Outcome(
        fault=fault,
        injected=done,
        good=done if same else 0,
        note="weights and metrics as left alone, bit by bit" if same else "another result",
    )


def stop_engine(folder: Path, _: Budget, *, seconds: float, timeout: float, steps: int) -> Outcome:
    """SIGSTOP of the rollout engine: shorter than the time-out it is waited for, longer it is
    replaced, with the stacks of all workers in the run folder."""
    words = f"--groups {GROUPS} --steps {steps} --engine transformers".split()
    waits = ["--set", f"faults.answer_timeout={timeout}", "--set", "faults.heartbeat=1"]
    run = LiveRun(folder / "stopped", [*words, *waits])
    run.wait_for_step(2)
    process = run.worker("engine-0")
    if process is None:
        raise RuntimeError(run.tail())
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    while time.monotonic() - began < seconds and run.alive() and process.is_running():
        time.sleep(0.1)
    if process.is_running():
        process.send_signal(signal.SIGCONT)
    code = run.wait()
    restarts = mended(run.folder, "engine_restarts")
    stacks = list(run.folder.glob("stacks/*/engine-0.txt"))
    replaced = timeout < seconds
    expected = restarts == int(replaced) and bool(stacks) == replaced
    good = code == 0 and expected and len(metrics(run.folder)) == steps
    what = "replaced, stacks written" if replaced else "waited for"
    return Outcome(
        fault=f"SIGSTOP of the rollout engine for {seconds:g} s, time-out {timeout:g} s",
        injected=1,
        good=int(good),
        note=what if expected else f"{restarts} restarts, {len(stacks)} files of stacks",
    )


def _kill_at_random(
    run: LiveRun, names: Sequence[str], budget: Budget, *, kills: int, steps: int, seed: int
) -> int:
    """Kill one of the workers after each of some random steps, a random part of a second later.

    The last steps are left out: the run may be over before their kill.
    """
    chance = random.Random(seed)
    done = 0
    for step in sorted(chance.choices(range(1, 1 + 2 * steps // 3), k=kills)):
        if not run.wait_for_step(step) or not budget.left:
            break
        time.sleep(chance.uniform(0.0, 1.0))
        done += run.kill_worker(chance.choice(names))
    return done


def _rewards(folder: Path) -> list[float]:
    return [record["reward/mean"] for record in metrics(folder)]


def _tail(rewards: Sequence[float]) -> float:
    last = rewards[-TAIL:]
    return sum(last) / max(len(last), 1)
