"""Where a rollout engine lives: beside a learner, in a Ray actor, over several processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_cases import (
    CONTEXT,
    generate,
    load,
    logprob_error,
    make_engine,
    make_model,
    perturbed,
    prompts,
    publish,
    requests,
    settings,
    weights_of,
)
from learner_cases import publish_learner, random_batch, started

from rlx.core.config import RuntimeConfig
from rlx.core.engine.client import RolloutClient
from rlx.core.engine.ray_runtime import RayRuntime
from rlx.core.engine.runtime import Worker, WorkerSpec
from rlx.core.errors import EngineError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def earlier() -> set[psutil.Process]:
    """What other tests of this process keep running (a pool's helper, for example)."""
    return set(psutil.Process().children(recursive=True))


def children(earlier: set[psutil.Process]) -> set[psutil.Process]:
    """What this test has left running."""
    return set(psutil.Process().children(recursive=True)) - earlier


def test_vllm_leaves_its_process_as_it_found_it(folder: Path, earlier: set[psutil.Process]) -> None:
    environment, setter = dict(os.environ), torch.set_num_threads
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    expected = random.random(), float(np.random.rand()), float(torch.rand(1))
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    engine = make_engine("vllm", folder)
    generate(engine, requests(prompts(4)))
    asyncio.run(engine.stop())
    assert (random.random(), float(np.random.rand()), float(torch.rand(1))) == expected
    assert dict(os.environ) == environment
    assert torch.set_num_threads is setter
    assert children(earlier) == set()


@pytest.mark.parametrize("first", ["engine", "learner"])
def test_vllm_and_learner_share_a_process(first: str, folder: Path, tmp_path: Path) -> None:
    """Whoever comes first, both compute what they compute alone, and either may stop first."""
    batch, wanted = random_batch(), requests(prompts(8), temperature=0.0)
    alone = started(str(folder))
    expected = alone.score(batch)
    alone.stop()
    if first == "engine":
        engine = make_engine("vllm", folder)
        learner = started(str(folder))
    else:
        learner = started(str(folder))
        engine = make_engine("vllm", folder)
    assert learner.score(batch).tobytes() == expected.tobytes()
    assert learner.update([batch], step=0) is not None
    sent = publish_learner(learner, engine, 1)
    assert sent.version == 1
    found = generate(engine, wanted)
    learner.export(str(tmp_path / "trained"))
    assert logprob_error(load(tmp_path / "trained"), wanted, found) < 1e-4
    assert logprob_error(load(folder), wanted, found) > 1e-3, "the update changed the model"
    if first == "engine":
        asyncio.run(engine.stop())
        assert learner.update([batch], step=1) is not None
        learner.stop()
    else:
        learner.stop()
        assert len(generate(engine, wanted)) == len(wanted)
        asyncio.run(engine.stop())


@asynccontextmanager
async def in_ray(kind: str, folder: Path) -> AsyncIterator[Worker]:
    class_name = {"vllm": "VllmEngine", "transformers": "TransformersEngine"}[kind]
    runtime = RayRuntime(RuntimeConfig(), logs=None, workers=1)
    try:
        await asyncio.to_thread(runtime.connect)
        yield await runtime.start(
            WorkerSpec(
                name="engine",
                target=f"rlx.core.engine.rollout.{kind}_engine:{class_name}",
                kwargs={
                    "model": str(folder),
                    "settings": settings(),
                    "context_length": CONTEXT,
                    "dtype": "float32",
                },
            )
        )
    finally:
        await runtime.close()


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_engine_streams_out_of_a_ray_actor(
    kind: str, folder: Path, tmp_path: Path, earlier: set[psutil.Process]
) -> None:
    short = requests(prompts(6), new=2)
    wanted = [*short, *(_later(item) for item in requests(prompts(6), new=100))]
    changed = perturbed(folder)

    async def run() -> None:
        async with in_ray(kind, folder) as worker:
            facts = await worker.call("start")
            assert facts["engine"] == kind
            found: dict[int, Any] = {}
            batches = 0
            async for batch in worker.stream("generate", wanted):
                batches += 1
                found.update({item.request_id: item for item in batch})
            assert batches > 1, "the short ones did not have to wait for the long ones"
            replies = [found[item.id] for item in wanted]
            assert logprob_error(load(folder), wanted, replies) < 1e-4

            sent, [report] = await publish(weights_of(changed), 1, RolloutClient(worker))
            assert report.checksum == sent.checksum
            again = [item async for batch in worker.stream("generate", short) for item in batch]
            again.sort(key=lambda item: item.request_id)
            assert logprob_error(changed, short, again) < 1e-4

            with pytest.raises(EngineError, match="empty prompt"):
                async for _ in worker.stream("generate", requests([[]])):
                    pass
            await _abort_while_streaming(worker)
            await worker.call("stop")

    asyncio.run(run())
    assert children(earlier) == set()


def _later(request: Any) -> Any:
    from dataclasses import replace

    return replace(request, id=100 + request.id)


async def _abort_while_streaming(worker: Worker) -> None:
    """An abort gets through while a stream is open, and ends it."""
    reasons: list[str] = []

    async def consume() -> None:
        many = requests(prompts(200, longest=60), new=190)
        async for batch in worker.stream("generate", many):
            reasons.extend(item.finish_reason for item in batch)

    task = asyncio.create_task(consume())
    while not reasons:
        await asyncio.sleep(0.01)
    await worker.call("abort")
    await task
    assert len(reasons) == 200
    assert "abort" in reasons


HOST = """
import asyncio, sys
from pathlib import Path
from engine_cases import *
if __name__ == "__main__":
    before, after = sys.argv[1:]
    engine = make_engine("vllm", Path(before), tensor_parallel=2)
    wanted = requests(prompts(2), new=3, temperature=0.0)
    errors = [logprob_error(load(Path(before)), wanted, generate(engine, wanted))]
    model = load(Path(after))
    load_weights(engine, model, 1, sender=make_sender(receivers=2))
    errors.append(logprob_error(model, wanted, generate(engine, wanted)))
    print("ready", *errors, flush=True)
    sys.stdin.read()
"""


def test_engine_over_two_processes(folder: Path, tmp_path: Path) -> None:
    """With tensor parallelism vLLM starts processes, which would outlive a killed parent."""
    changed = perturbed(folder)
    changed.save_pretrained(tmp_path / "after")
    script = tmp_path / "host.py"
    script.write_text(HOST)
    host = subprocess.Popen(
        [sys.executable, script, folder, tmp_path / "after"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])},
    )
    workers: list[psutil.Process] = []
    try:
        assert host.stdout is not None
        lines = iter(host.stdout.readline, b"")
        ready = next((line for line in lines if line.startswith(b"ready")), b"")
        workers = psutil.Process(host.pid).children(recursive=True)
        errors = [float(error) for error in ready.split()[1:]]
        assert len(errors) == 2, "the engine did not start"
        assert max(errors) < 1e-4
        assert workers, "tensor parallelism runs in processes of its own"
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and any(_runs(worker) for worker in workers):
        time.sleep(0.2)
    assert not [worker for worker in workers if _runs(worker)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
