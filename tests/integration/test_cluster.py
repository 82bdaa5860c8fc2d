"""A real run on a Ray cluster of two nodes: two learner ranks, two engines, spread over both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray_cluster import two_nodes
from whole_runs import arguments, run

from rlx.core.machine import this_machine
from rlx.core.models import model_info
from rlx.core.placement import roles
from rlx.core.plugins import PluginSystem
from rlx.core.selection import select
from rlx.core.settings import load_settings

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HOOKS = """
import json
import pathlib
import ray
import rlx

@rlx.hookimpl
def rlx_on_worker_start(ctx):
    seen = {"node": ray.get_runtime_context().get_node_id()}
    file = pathlib.Path(ctx.run_folder) / f"place-{ctx.role}-{ctx.rank}.json"
    file.write_text(json.dumps(seen))
"""
REWARD = """
import bounds

def digits(sample):
    return bounds.SCALE * sum(c.isdigit() for c in sample.response)
"""


def planned_gib(run_folder: Path) -> float:
    """What `rlx plan` says of a learner rank."""
    config = load_settings(files=[run_folder / "config.yaml"], env={}).config
    chosen = select(config, PluginSystem.load())
    placed = roles(config, chosen, model_info(config.model), this_machine())
    (memory,) = (role.memory for role in placed if role.name == "learner-0")
    assert memory is not None
    return memory / 2**30


def test_two_ranks_and_two_engines_train_on_two_nodes(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About 40 s on one core. The reward lies with the driver only, and imports its neighbour."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (workspace / "rlxfile.py").write_text(HOOKS)
    (workspace / "lib").mkdir()
    (workspace / "lib" / "bounds.py").write_text("SCALE = 0.1\n")
    (workspace / "lib" / "mine.py").write_text(REWARD)
    words = arguments("out", steps=3, runtime="ray", engine="vllm")
    words[words.index("mypkg:digits")] = "lib/mine.py:digits"
    words += "--max-staleness 1 --set rollout.engines=2 --set learner.ranks=2".split()
    words += "--set learner.zero_stage=2 --set placement.strategy=SPREAD".split()
    words += "--set logging.rollouts=complete".split()
    monkeypatch.chdir(workspace)
    with two_nodes() as address:
        run(workspace, [*words, "--ray-address", address], timeout=280)
    out = workspace / "out"
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert max(step["staleness/max"] for step in steps) <= 1
    assert (
        max(step["mismatch/logprob_abs_max"] for step in steps if not step["staleness/max"]) < 1e-3
    )
    peak = max(step["memory/learner_gib"] for step in steps)
    assert 0.7 < planned_gib(out) / peak < 1.5
    places = {
        path.stem.removeprefix("place-"): json.loads(path.read_text())["node"]
        for path in out.glob("place-*.json")
    }
    assert set(places) == {"learner-0", "learner-1", "rollout-0", "rollout-1", "reward-0"}
    assert places["learner-0"] != places["learner-1"]
    assert places["rollout-0"] != places["rollout-1"]
    assert (out / "export" / "model.safetensors").is_file()
