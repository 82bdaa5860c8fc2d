"""Plugins on real Ray: what only the driver has reaches workers that were started without it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from whole_runs import arguments, metrics, run

from rlx.core.config import RuntimeConfig
from rlx.core.engine.ray_runtime import RayRuntime
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.errors import UsageError
from rlx.core.plugins import PluginSystem
from rlx.core.references import ComponentRef, shipped_modules
from rlx.testing import reward_inputs

sys.path.append(str(Path(__file__).resolve().parent.parent / "contract"))

from environment import Environment, write_wheel

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CLUSTER = """
import sys, ray
context = ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False,
                   logging_level="ERROR", object_store_memory=256 * 2**20)
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray that somebody else started, elsewhere, with nothing of ours on its path."""
    bare = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "RLX"))
    }
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        cwd="/",
        env={**bare, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    assert process.stdin is not None
    process.stdin.close()
    process.wait(30)


HELPER = "ZERO = 0.0\n"
LENGTH = """
import helper_of_length

def length(sample, *, by: float = 1.0):
    return len(sample.response) * by + helper_of_length.ZERO
"""
PACKAGE = """
from .inside import FACTOR

class Scaled:
    def __init__(self, *, offset: float = 0.0):
        self.offset = offset

    def __call__(self, sample):
        return FACTOR * len(sample.response) + self.offset
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that only the driver has: a file with a sibling, and a package."""
    folder = tmp_path / "project"
    (folder / "scaled_pkg").mkdir(parents=True)
    (folder / "helper_of_length.py").write_text(HELPER)
    (folder / "length.py").write_text(LENGTH)
    (folder / "scaled_pkg" / "__init__.py").write_text(PACKAGE)
    (folder / "scaled_pkg" / "inside.py").write_text("FACTOR = 10.0\n")
    monkeypatch.chdir(folder)
    path, modules = list(sys.path), set(sys.modules)
    sys.path.append(str(folder))
    yield folder
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("scaled_pkg", "helper_of_length", "length", "rlx_file_")):
            del sys.modules[name]


def score_on(cluster: str, refs: list[ComponentRef], *, hide: Path | None) -> list[Any]:
    """Scores of "abc" by reward workers of a cluster; `hide` is moved away once it is shipped."""

    async def score() -> list[Any]:
        runtime = RayRuntime(
            RuntimeConfig(ray_address=cluster),
            logs=None,
            workers=1,
            modules=[str(path) for path in shipped_modules(refs)],
        )
        await asyncio.to_thread(runtime.connect)
        if hide is not None:
            os.chdir("/")
            hide.rename(hide.with_name("moved_away"))
        rewards = [(ref, 1.0) for ref in refs]
        spec = WorkerSpec(
            name="rewards",
            target="rlx.core.engine.rewards:RewardWorker",
            kwargs={"rewards": rewards, "concurrency": 2, "timeout": 20.0},
            cpus=0.0,
        )
        try:
            worker = await runtime.start(spec)
            await worker.call("start")
            (row,) = await worker.call("score", [reward_inputs(response="abc")])
            return [reply.score for reply in row]
        finally:
            await runtime.close()

    return asyncio.run(score())


def test_files_and_packages_of_the_driver_are_shipped(cluster: str, project: Path) -> None:
    system = PluginSystem.load()
    refs = [
        system.ref("rewards", "length.py:length", {"by": 2}),
        system.ref("rewards", "scaled_pkg:Scaled", {"offset": 1}),
    ]
    assert score_on(cluster, refs, hide=project) == [6.0, 31.0]


def test_object_of_a_notebook_travels_with_what_it_imports(cluster: str, project: Path) -> None:
    import length as mine  # what a notebook cell would do

    def twice(sample, *, plus: float = 0.0):
        return 2 * mine.length(sample) + plus

    ref = PluginSystem.load().ref("rewards", twice, {"plus": 1})
    assert ref.payload is not None
    assert score_on(cluster, [ref], hide=project) == [7.0]


def test_other_source_on_a_worker_is_refused(cluster: str, project: Path) -> None:
    ref = PluginSystem.load().ref("rewards", "scaled_pkg:Scaled")
    other = replace(ref, source_hash="0" * 64)
    with pytest.raises(UsageError, match="differs between the driver and this process"):
        score_on(cluster, [other], hide=None)


def test_run_on_somebody_elses_ray_equals_the_one_in_process(cluster: str, workspace: Path) -> None:
    (workspace / "lib").mkdir()
    (workspace / "lib" / "bounds.py").write_text("HIGH = 1.5\n")
    (workspace / "lib" / "mine.py").write_text(
        "import bounds\n\n"
        "def center(x):\n    return x.rewards - x.group_mean(x.rewards)\n\n"
        "def capped(x):\n    return -x.ratio.clamp(max=bounds.HIGH) * x.advantages\n"
    )
    words = ["--estimator", "lib/mine.py:center", "--loss", "lib/mine.py:capped"]
    for output, runtime in (("inline", "inline"), ("ray", "ray")):
        base = arguments(output, steps=2, runtime=runtime, engine="transformers")
        where = ["--set", f"runtime.ray_address={cluster}"] if runtime == "ray" else []
        run(workspace, [*base, *words, *where])
    assert metrics(workspace / "ray") == metrics(workspace / "inline")


STARTS = """
import pathlib
import rlx

@rlx.hookimpl
def rlx_on_worker_start(ctx):
    (pathlib.Path(ctx.run_folder) / f"started-{ctx.role}-{ctx.rank}").touch()
"""


def test_plugin_that_only_the_driver_has_installed_trains_on_the_cluster(
    cluster: str, workspace: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path / "venv")
    wheel = write_wheel(
        tmp_path / "wheels",
        "rlx-far",
        {"rlx.losses": {"far": "far_pkg.loss:far"}, "rlx": {"far": "far_pkg.hooks"}},
        {
            "far_pkg/__init__.py": "",
            "far_pkg/hooks.py": STARTS,
            "far_pkg/loss.py": "from .bounds import HIGH\n\n"
            "def far(x):\n    return -x.ratio.clamp(max=HIGH) * x.advantages\n",
            "far_pkg/bounds.py": "HIGH = 1.5\n",
        },
    )
    environment.install(wheel)
    words = ["--loss", "far", "--set", f"runtime.ray_address={cluster}"]
    base = arguments("out", steps=1, runtime="ray", engine="transformers")
    environment.rlx(*base, *words, cwd=workspace, RAY_USAGE_STATS_ENABLED="0")
    (component,) = [
        item
        for item in json.loads((workspace / "out" / "manifest.json").read_text())["components"]
        if item["kind"] == "losses"
    ]
    assert component["distribution"] == "rlx-far"
    started = {path.name for path in (workspace / "out").glob("started-*")}
    assert {"started-learner-0", "started-rollout-0", "started-reward-0"} <= started
    assert importlib.util.find_spec("far_pkg") is None, "the cluster's Python doesn't have it"


EDITS = """
import pathlib
import rlx

@rlx.hookimpl
def rlx_on_worker_start(ctx):
    if ctx.role == "learner":
        file = pathlib.Path(__file__).parent / "mine.py"
        file.write_text(file.read_text() + "# edited on this node\\n")
"""


def test_run_stops_when_a_worker_has_another_source(workspace: Path) -> None:
    (workspace / "rlxfile.py").write_text(EDITS)
    (workspace / "mine.py").write_text("def plain(x):\n    return -x.ratio * x.advantages\n")
    words = arguments("out", steps=2, runtime="ray", engine="transformers")
    text = run(workspace, [*words, "--loss", "mine.py:plain"], code=2)
    assert "the source of loss 'mine.py:plain' differs between the driver and this process" in text
    assert metrics(workspace / "out") == []


NOTEBOOK = """
import rlx

SCALE = 0.5

def center(x, *, by: float = 1.0):
    return (x.rewards - x.group_mean(x.rewards)) * by * SCALE

class Digits:
    def __init__(self, *, most: int = 100):
        self.most = most

    def __call__(self, sample):
        return min(sum(c.isdigit() for c in sample.response), self.most) / 8

def plain(x):
    return -x.ratio * x.advantages * SCALE

if __name__ == "__main__":
    config = rlx.RunConfig(
        model="tiny", data={"path": "data.jsonl"}, output="out", steps=2,
        estimator={"name": center, "by": 2.0}, loss=plain, rewards=[Digits],
        rollout={"engine": "transformers", "groups": 4, "group_size": 4, "max_new_tokens": 8},
    )
    result = rlx.train(config)
    print("trained", result.steps)
"""


def test_functions_of_a_notebook_train_on_ray(workspace: Path) -> None:
    (workspace / "notebook.py").write_text(NOTEBOOK)
    done = subprocess.run(
        [sys.executable, "notebook.py"],
        cwd=workspace,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "trained 2" in done.stdout, (done.stdout + done.stderr)[-6000:]
    manifest = json.loads((workspace / "out" / "manifest.json").read_text())
    pickled = {item["name"] for item in manifest["components"] if item["pickled"]}
    assert pickled == {"__main__:center", "__main__:plain", "__main__:Digits"}
    assert manifest["components"][0]["params"] == {"by": 2.0}
