"""On a Ray cluster of two nodes: a real run, spread over both, and workers there that hang."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from ray_cluster import two_nodes
from whole_runs import arguments, run

from rlx.core.config import FaultsConfig, PlacementConfig, RuntimeConfig
from rlx.core.engine.ray_runtime import RayRuntime
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.errors import WorkerLostError
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


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes() as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield address


def planned_gib(run_folder: Path) -> float:
    """What `rlx plan` says of a learner rank."""
    config = load_settings(files=[run_folder / "config.yaml"], env={}).config
    chosen = select(config, PluginSystem.load())
    placed = roles(config, chosen, model_info(config.model), this_machine())
    (memory,) = (role.memory for role in placed if role.name == "learner-0")
    assert memory is not None
    return memory / 2**30


def test_two_ranks_and_two_engines_train_on_two_nodes(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """About 40 s on one core. The reward lies with the driver only, and imports its neighbour."""
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


class Stuck:
    """A worker that comes to a halt when it is told to."""

    async def wait_for_itself(self) -> None:
        """A dead lock on the worker's event loop: nothing of it answers any more."""
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


async def hang(runtime: RayRuntime) -> tuple[str, str, str]:
    """Stop one of the workers that are not on the driver's node and dead-lock another; returns
    their names and the error."""
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    specs = [
        WorkerSpec(name=f"{role}-{rank}", target="test_cluster:Stuck", env=env, role=role)
        for role in ("learner", "rollout")
        for rank in range(2)
    ]
    await asyncio.to_thread(runtime.connect)
    try:
        workers = await asyncio.gather(*map(runtime.start, await runtime.seat(specs)))
        places = {worker.name: worker.process.location for worker in workers}
        stopped, locked = (one for one in workers if not places[one.name].here)
        os.kill(places[stopped.name].pid, signal.SIGSTOP)
        with pytest.raises(WorkerLostError) as caught:
            await locked.call("wait_for_itself")
        return stopped.name, locked.name, str(caught.value)
    finally:
        await runtime.close()


def driver(address: str, stacks: Path) -> tuple[str, str, str]:
    """`hang` as a driver would, whose logs are where Ray has them, on their node."""
    runtime = RayRuntime(
        RuntimeConfig(ray_address=address),
        logs=None,
        workers=4,
        placement=PlacementConfig(strategy="SPREAD"),
        faults=FaultsConfig(heartbeat=0.2, answer_timeout=2.0),
        stacks=stacks,
    )
    return asyncio.run(hang(runtime))


def test_stacks_of_workers_on_another_node_are_written_here(tmp_path: Path, address: str) -> None:
    """In a process of its own: what is left of an earlier Ray in this one cancels new actors."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as process:
        stopped, locked, error = process.submit(driver, address, tmp_path / "stacks").result(120)
    assert f"'{locked}' hangs in 'wait_for_itself': it has not answered for 2 s" in error
    (folder,) = (tmp_path / "stacks").iterdir()
    assert error.endswith(f"the stacks of all workers are in {folder}")
    files = {path.stem: path.read_text() for path in folder.iterdir()}
    assert set(files) == {"driver", "learner-0", "learner-1", "rollout-0", "rollout-1"}
    assert "the driver waits for: wait_for_itself" in files[locked]
    assert "in wait_for_itself" in files[locked]
    assert "state of the process: stopped" in files[stopped]
    assert all("most recent call first" in text for name, text in files.items() if name != "driver")
