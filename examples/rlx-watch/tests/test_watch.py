import json
from types import SimpleNamespace

import numpy as np
import pytest
from rlx_watch.command import app
from rlx_watch.hooks import Watch
from typer.testing import CliRunner

import rlx


def started(monkeypatch, tmp_path, *, start_step=0, **variables) -> Watch:
    for name in ("TARGET", "PATIENCE"):
        monkeypatch.delenv(f"RLXWATCH_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"RLXWATCH_{name.upper()}", str(value))
    watch = Watch()
    watch.rlx_configure(config=None)
    watch.rlx_on_run_start(SimpleNamespace(folder=tmp_path, start_step=start_step))
    return watch


def stops(watch: Watch, rewards, first=1) -> list[str | None]:
    steps = enumerate(rewards, first)
    return [watch.rlx_should_stop(step, {"reward/mean": reward}) for step, reward in steps]


def test_plugin_loads_without_a_warning(check_plugin):
    check_plugin("rlx-watch")


def test_run_stops_at_its_target(monkeypatch, tmp_path):
    watch = started(monkeypatch, tmp_path, target=0.8)
    assert stops(watch, [0.1, 0.79, 0.8])[1:] == [None, "the mean reward has reached 0.8"]


def test_run_stops_when_it_is_stuck(monkeypatch, tmp_path):
    watch = started(monkeypatch, tmp_path, patience=2)
    reasons = stops(watch, [0.1, 0.3, 0.2, 0.3, 0.1])
    assert reasons[:3] == [None] * 3
    assert reasons[3] == "no better mean reward for 2 steps"


def test_run_goes_on_without_settings(monkeypatch, tmp_path):
    assert stops(started(monkeypatch, tmp_path), [0.0, 0.0, 1.0, float("nan")]) == [None] * 4


def test_resumed_run_remembers_its_best_step(monkeypatch, tmp_path):
    lines = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.4}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch = started(monkeypatch, tmp_path, start_step=2, patience=2)
    assert stops(watch, [0.4], first=3) == ["no better mean reward for 2 steps"]
    again = started(monkeypatch, tmp_path, patience=2)
    assert stops(again, [0.4]) == [None]


@pytest.mark.parametrize(("name", "value"), [("patience", "0"), ("target", "high")])
def test_wrong_settings_are_refused(monkeypatch, tmp_path, name, value):
    with pytest.raises(rlx.UsageError, match=f"RLXWATCH_{name.upper()}"):
        started(monkeypatch, tmp_path, **{name: value})


def test_metrics_tell_how_varied_the_answers_are():
    watch = Watch()
    rollouts = [SimpleNamespace(text=text) for text in "aab"]
    watch.rlx_on_rollouts([SimpleNamespace(rollouts=rollouts)])
    batch = SimpleNamespace(action_lengths=np.array([3, 7, 1]))
    metrics = watch.rlx_step_metrics(batch)
    assert metrics == {"distinct": pytest.approx(2 / 3), "longest": 7.0}


def test_command_shows_the_best_step(tmp_path):
    line = json.dumps({"step": 3, "reward/mean": 0.25})
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert "step 3, mean reward 0.250, best 0.250 at step 3" in result.output
    missing = CliRunner().invoke(app, [str(tmp_path / "absent")])
    assert isinstance(missing.exception, rlx.UsageError)
