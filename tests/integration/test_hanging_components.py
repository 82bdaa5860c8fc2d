"""Components that never return in the driver: Ctrl-C, SIGTERM and `faults.component_timeout`."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from whole_runs import arguments, descendants, left_over, metrics, run, start, wait_for_step

from rlx.core.engine.checkpoints import damage, latest_checkpoint, step_of

pytestmark = pytest.mark.engine

COMPONENTS = '''
import time
from pathlib import Path

calls = []


def sleeps(x):
    """An estimator that never returns from its third call, unless `mended` is there."""
    calls.append(1)
    while len(calls) > 2 and not Path("mended").exists():
        Path("hangs").touch()
        time.sleep(10**9)
    return x.rewards - x.rewards.mean()


def spins(group):
    """A sampler that never returns from its ninth call."""
    calls.append(1)
    while len(calls) > 8:
        Path("hangs").touch()
    return True


class Slow:
    """A tracker that takes two seconds for the first step."""

    def log(self, step, metrics):
        if step == 1:
            time.sleep(2.0)

    def close(self, error):
        pass
'''


def words(folder: Path, runtime: str, *more: str) -> list[str]:
    (folder / "hang.py").write_text(COMPONENTS)
    return [*arguments("out", steps=4, runtime=runtime, engine="transformers"), *more]


def hanging(folder: Path) -> None:
    """Wait until the component hangs."""
    deadline = time.monotonic() + 120
    while not (folder / "hangs").exists():
        assert time.monotonic() < deadline, (folder / "log.txt").read_text()[-3000:]
        time.sleep(0.05)


def check_saved(folder: Path, step: int) -> None:
    """All steps up to `step` are in the metrics and in a whole checkpoint."""
    checkpoint = latest_checkpoint(folder / "out/checkpoints")
    assert checkpoint is not None
    assert damage(checkpoint) == []
    assert step_of(checkpoint) == metrics(folder / "out")[-1]["step"] == step


@pytest.mark.slow
def test_hanging_estimator_is_named_and_ended_and_the_run_goes_on_when_it_is_mended(
    workspace: Path,
):
    estimator = ["--estimator", "hang:sleeps", "--set", "faults.component_timeout=3"]
    text = run(workspace, words(workspace, "ray", *estimator), code=1)
    said = "step 3, advantage: estimator 'hang:sleeps' has not returned for 3 s"
    assert said in text
    assert f"--resume --output {workspace}/out` goes on" in text
    assert "in sleeps\n    time.sleep(10**9)" in text
    (folder,) = (workspace / "out/stacks").iterdir()
    files = {path.stem: path.read_text() for path in folder.iterdir()}
    assert files.keys() == {"driver", "engine-0", "learner-0", "rewards-0"}
    assert "in sleeps\n    time.sleep(10**9)" in files["driver"]
    assert all("Thread" in files[name] for name in files.keys() - {"driver"})
    check_saved(workspace, 2)
    (workspace / "mended").touch()
    run(workspace, [*words(workspace, "inline", *estimator), "--resume"])
    check_saved(workspace, 4)


@pytest.mark.slow
def test_ctrl_c_ends_a_sleeping_estimator_and_leaves_nothing(workspace: Path):
    process = start(workspace, words(workspace, "ray", "--estimator", "hang:sleeps"))
    hanging(workspace)
    children = descendants(process)
    assert children
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    code = process.wait(30)
    text = (workspace / "log.txt").read_text()
    assert code == 128 + signal.SIGINT, text[-3000:]
    assert time.monotonic() - started < 12
    assert "step 3, advantage: estimator 'hang:sleeps' has not returned" in text
    assert "2 of 4 steps, stopped by Ctrl-C" in text
    assert left_over(children) == []
    check_saved(workspace, 2)


def test_inline_no_time_out_ends_anything_but_sigterm_does(workspace: Path):
    more = "--sampler hang:spins --set faults.component_timeout=1".split()
    trackers = ["--set", "trackers=[jsonl, console, 'hang:Slow']"]
    process = start(workspace, words(workspace, "inline", *more, *trackers))
    wait_for_step(workspace, workspace / "out", 2)
    hanging(workspace)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    text = (workspace / "log.txt").read_text()
    assert "step 1, emit: tracker 'hang:Slow' in log() has not returned for 1 s" in text
    assert "Inline, nothing ends it but Ctrl-C" in text
    assert "step 3, rollout: sampler 'hang:spins' in keep() has not returned" in text
    assert "2 of 4 steps, stopped by SIGTERM" in text
    check_saved(workspace, 2)
