"""kill -9 and SIGSTOP of workers: rollout engines, rewards, the learner."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.runs import (
    LiveRun,
    Outcome,
    fault_counts,
    finished,
    metrics,
    rollout_places,
    same_result,
)

GROUPS = 16
TAIL = 10


def kill_engines(
    folder: Path,
    *,
    engine: str,
    staleness: int,
    kills: int,
    steps: int,
    seed: int,
    goal: float | None = 0.1,
) -> Outcome:
    """Kill the rollout engine at random moments, also while it starts, and compare with the same
    run left alone: every rollout is there once, and the rewards are what they were.

    Args:
        goal: most by which the mean reward of the last steps may differ.
    """
    words = f"--groups {GROUPS} --steps {steps} --engine {engine} --max-staleness {staleness}"
    plain, words_list = folder / "plain", words.split()
    if staleness:
        words_list += ["--set", "rollout.partial_rollout=true"]
    finished(plain, words_list)
    run = LiveRun(folder / "killed", [*words_list, "--set", f"faults.engine_restarts={kills}"])
    done = _kill_at_random(run, "engine-0", kills=kills, steps=steps, seed=seed)
    code = run.wait()
    rewards, expected = _rewards(run.folder), _rewards(plain)
    places = rollout_places(run.folder)
    whole = len(places) == len(set(places)) == steps * GROUPS * 8
    gap = abs(_tail(rewards) - _tail(expected))
    good = code == 0 and len(rewards) == steps and whole and (goal is None or gap < goal)
    restarts = fault_counts(run.folder).get("engine_restarts", 0)
    kind = f"max_staleness {staleness}" if staleness else "synchronous"
    return Outcome(
        fault=f"kill -9 of the rollout engine ({engine}, {kind})",
        injected=done,
        good=done if good else 0,
        note=f"{len(rewards)} of {steps} steps; {len(set(places)):,} rollouts of "
        f"{steps * GROUPS * 8:,} asked for, {len(places) - len(set(places))} twice; {restarts} "
        f"restarts; reward of the last {TAIL} steps {_tail(rewards):.3f}, left alone "
        f"{_tail(expected):.3f}",
    )


def kill_rewards(folder: Path, *, kills: int, steps: int, seed: int) -> Outcome:
    """Kill the reward worker: rewards are functions of the rollouts, so nothing may change."""
    words = f"--groups {GROUPS} --steps {steps} --engine transformers".split()
    finished(folder / "plain", words)
    run = LiveRun(folder / "killed", words)
    done = _kill_at_random(run, "rewards-0", kills=kills, steps=steps, seed=seed)
    code = run.wait()
    same = same_result(run.folder, folder / "plain")
    return Outcome(
        fault="kill -9 of the reward worker",
        injected=done,
        good=done if code == 0 and same else 0,
        note="weights and metrics as left alone, bit by bit" if same else "another result",
    )


def kill_learner(folder: Path, *, kills: int, steps: int, seed: int) -> Outcome:
    """Kill the learner under `faults.learner: restart`: the same weights in the end."""
    words = f"--groups 4 --steps {steps} --engine transformers --checkpoint-every 1".split()
    finished(folder / "plain", words)
    run = LiveRun(folder / "killed", [*words, "--set", "faults.learner=restart"])
    done = _kill_at_random(run, "learner-0", kills=kills, steps=steps, seed=seed)
    code = run.wait()
    same = same_result(run.folder, folder / "plain")
    return Outcome(
        fault="kill -9 of the learner, `faults.learner: restart`",
        injected=done,
        good=done if code == 0 and same else 0,
        note="weights and metrics as left alone, bit by bit" if same else "another result",
    )


def stop_engine(folder: Path, *, seconds: float, timeout: float, steps: int) -> Outcome:
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
    restarts = fault_counts(run.folder).get("engine_restarts", 0)
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


def _kill_at_random(run: LiveRun, name: str, *, kills: int, steps: int, seed: int) -> int:
    """Kill a worker after each of some random steps, a random part of a second later."""
    chance = random.Random(seed)
    done = 0
    for step in sorted(chance.choices(range(1, steps - 1), k=kills)):
        if not run.wait_for_step(step):
            break
        time.sleep(chance.uniform(0.0, 1.0))
        done += run.kill_worker(name)
    return done


def _rewards(folder: Path) -> list[float]:
    return [record["reward/mean"] for record in metrics(folder)]


def _tail(rewards: Sequence[float]) -> float:
    last = rewards[-TAIL:]
    return sum(last) / max(len(last), 1)
