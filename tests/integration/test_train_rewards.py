"""Whole runs with rewards of other frameworks, several at once, on servers and in models."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from reward_servers import reward_server
from whole_runs import arguments, metrics, run, start, wait_for_step

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "plugins"))

pytestmark = pytest.mark.engine

THEIRS = '''
import torch


def reward_func(queries, prompts, labels, **kwargs):
    """OpenRLHF's form."""
    lengths = torch.tensor([float(len(q) - len(p)) for q, p in zip(queries, prompts)])
    return {"rewards": lengths / 8, "scores": lengths / 8, "extra_logs": {"raw": lengths}}


def digits_trl(completions, label, **kwargs):
    """TRL's form; columns of the data set come as keyword arguments."""
    return [sum(c.isdigit() for c in text) / 8 if want else None
            for text, want in zip(completions, label)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's form."""
    return {"score": float(solution_str.startswith(ground_truth)), "turns": extra_info["num_turns"]}


def counted(sample):
    import os

    with open("scored.txt", "a") as file:
        file.write(f"{os.getpid()} {sample.task_id} {sample.index}\\n")
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
'''


def train(folder: Path, output: str, rewards: list[str], *words: str, steps: int = 2) -> Any:
    """The metrics of a run with these rewards, inline with transformers."""
    run(folder, [*command(output, rewards, steps), *words])
    return metrics(folder / output)


def command(output: str, rewards: list[str], steps: int) -> list[str]:
    words = arguments(output, steps=steps, runtime="inline", engine="transformers")
    at = words.index("--reward")
    words[at : at + 2] = [word for reward in rewards for word in ("--reward", reward)]
    return words


@pytest.fixture
def folder(workspace: Path) -> Path:
    (workspace / "theirs.py").write_text(THEIRS)
    return workspace


def renamed(records: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Metrics with the part `name` called `part`; without what only one kind of reward logs."""
    return [
        {
            f"reward/part{key.removeprefix(f'reward/{name}')}"
            if key.startswith(f"reward/{name}")
            else key: value
            for key, value in record.items()
        }
        for record in records
    ]


def test_rewards_of_other_frameworks_train_unchanged(folder: Path) -> None:
    rewards = [
        "openrlhf:theirs.py:0.5",
        "trl:theirs:digits_trl",
        "verl:theirs.py:compute_score:2",
    ]
    records = train(folder, "out", rewards, steps=3)
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        parts = {key: record[f"reward/{key}"] for key in ("theirs", "digits_trl", "compute_score")}
        total = 0.5 * parts["theirs"] + parts["digits_trl"] + 2 * parts["compute_score"]
        assert record["reward/mean"] == pytest.approx(total, abs=1e-6)
        assert record["reward/failed"] == 0
        assert record["compute_score/turns"] == 1
        assert record["theirs/raw"] == pytest.approx(8 * parts["theirs"])
    assert len({record["policy/entropy"] for record in records}) == 3
    manifest = json.loads((folder / "out/manifest.json").read_text())
    sources = [one["source_hash"] for one in manifest["components"] if one["kind"] == "rewards"]
    assert all(sources)


def test_a_composed_reward_trains_and_logs_its_parts(folder: Path) -> None:
    words = "--set rewards.1.pattern=\\d --set rewards.2.max_length=8 --set rewards.2.buffer=4"
    records = train(folder, "out", ["math", "regex:0.2", "overlong:0.5"], *words.split())
    for record in records:
        parts = [record[f"reward/{name}"] for name in ("math", "regex", "overlong")]
        total = parts[0] + 0.2 * parts[1] + 0.5 * parts[2]
        assert record["reward/mean"] == pytest.approx(total, abs=1e-6)
        assert record["reward/std"] > 0
        assert parts[2] < 0  # a random model doesn't stop


@pytest.mark.slow
def test_adapters_and_a_composition_train_through_ray_and_vllm(folder: Path) -> None:
    """Six rewards in one run of the default engine, in two reward workers."""
    weights = {
        "openrlhf:theirs.py": 0.5,
        "trl:theirs:digits_trl": 1.0,
        "verl:theirs.py:compute_score": 2.0,
        "math": 1.0,
        "regex": 0.2,
        "overlong": 0.5,
    }
    words = arguments("out", steps=3, runtime="ray", engine="vllm")
    at = words.index("--reward")
    words[at : at + 2] = [
        word for name, weight in weights.items() for word in ("--reward", f"{name}:{weight}")
    ]
    words += ["--set", "rewards.regex.pattern=\\d", "--set", "reward.workers=2"]
    words += "--set rewards.overlong.max_length=8 --set rewards.overlong.buffer=4".split()
    run(folder, words)
    records = metrics(folder / "out")
    assert [record["step"] for record in records] == [1, 2, 3]
    parts = ["theirs", "digits_trl", "compute_score", "math", "regex", "overlong"]
    for record in records:
        scores = [record[f"reward/{part}"] for part in parts]
        total = sum(w * score for w, score in zip(weights.values(), scores, strict=True))
        assert record["reward/mean"] == pytest.approx(total, abs=1e-6)
        assert (record["reward/failed"], record["compute_score/turns"]) == (0, 1)
        assert record["reward/overlong"] < 0 < record["reward/theirs"]
        assert record["mismatch/logprob_abs_mean"] < 1e-4
    assert len({record["policy/entropy"] for record in records}) == 3  # it was trained


@pytest.mark.slow
def test_a_reward_server_killed_and_restarted_costs_time_and_nothing_else(folder: Path) -> None:
    local = train(folder, "local", ["theirs.py:counted"], steps=5)
    (folder / "scored.txt").unlink()
    with reward_server(folder, "theirs.py:counted") as first:
        words = [*command("out", ["remote"], 5), "--set", f"rewards.0.url={first.url}"]
        process = start(folder, words)
        try:
            wait_for_step(folder, folder / "out", 2)
            first.kill()
            time.sleep(1.5)
            assert process.poll() is None
            with reward_server(folder, "theirs.py:counted", port=first.port):
                assert process.wait(120) == 0, (folder / "log.txt").read_text()[-3000:]
        finally:
            process.kill()
    assert renamed(metrics(folder / "out"), "remote") == renamed(local, "counted")
    lines = (folder / "scored.txt").read_text().split("\n")[:-1]
    assert max(Counter(lines).values()) == 1  # by no server twice
    servers = {line.split()[0] for line in lines}
    assert len(servers) == 2
    assert len({line.partition(" ")[2] for line in lines}) == 5 * 16  # and none was left out


@pytest.mark.slow
def test_a_reward_model_gives_the_same_run_here_and_behind_a_server(folder: Path) -> None:
    from reward_models import llama

    llama(folder / "rm", rlx_reward_mean=0.5, rlx_reward_std=2.0)
    here = train(folder, "here", ["model"], "--set", "rewards.0.model=rm")
    with reward_server(folder, "--model", "rm") as server:
        there = train(folder, "there", ["remote"], "--set", f"rewards.0.url={server.url}")
    for mine, theirs in zip(here, there, strict=True):
        assert mine["reward/std"] > 0.01
        assert theirs["reward/remote"] == pytest.approx(mine["reward/model"], abs=1e-5)
        assert theirs["reward/mean"] == pytest.approx(mine["reward/mean"], abs=1e-5)
        assert theirs["remote/raw"] == pytest.approx(mine["model/raw"], abs=1e-5)


@pytest.mark.slow
def test_a_reward_model_under_ray_gives_the_same_run_as_inline(folder: Path) -> None:
    from reward_models import llama

    llama(folder / "rm")
    records = {}
    for runtime in ("inline", "ray"):
        words = arguments(runtime, steps=2, runtime=runtime, engine="transformers")
        words[words.index("mypkg:digits")] = "model"
        run(folder, [*words, "--set", "rewards.0.model=rm"])
        records[runtime] = metrics(folder / runtime)
    assert records["inline"] == records["ray"]


def test_a_judge_trains(folder: Path) -> None:
    from scripted_server import serving

    def script(body: dict[str, Any], _: int) -> Any:
        length = len(body["messages"][0]["content"]) % 11
        return 200, {"choices": [{"message": {"content": f"Score: {length}"}}]}

    with serving(script) as server:
        words = f"--set rewards.0.url={server.url}/v1 --set rewards.0.model=m"
        records = train(folder, "out", ["judge"], *words.split())
    assert [0 <= record["reward/judge"] <= 1 for record in records] == [True, True]
    assert len(server.requests) == 2 * 16


@pytest.mark.slow
def test_a_server_with_a_token_is_asked_from_ray_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    words = arguments("out", steps=2, runtime="ray", engine="transformers")
    words[words.index("mypkg:digits")] = "remote"
    words += ["--set", "reward.workers=2", "--set", "rewards.remote.token_env=MY_TOKEN"]
    with reward_server(folder, "mypkg:digits", "--token-env", "MY_TOKEN") as server:
        run(folder, [*words, "--set", f"rewards.remote.url={server.url}"])
    assert [record["reward/failed"] for record in metrics(folder / "out")] == [0, 0]
    assert all("s3cret" not in path.read_text() for path in folder.glob("out/*.*"))
