"""What the terminal and `rlx runs` show of an offline run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlx.cli.main import app
from rlx.core.config import RunConfig
from rlx.core.run import Run
from rlx.core.settings import dump_yaml
from rlx.plugins.trackers.console import Console

METRICS = [
    {"train/loss": 0.7, "train/accuracy": 0.5, "time/step": 0.1},
    {"train/loss": 0.4, "train/accuracy": 0.75, "eval/held/loss": 0.5, "time/step": 0.1},
]


def config() -> RunConfig:
    return RunConfig.model_validate({"steps": 2, "objective": "dpo", "offline": {"batch_size": 4}})


def test_terminal_shows_objective_loss_and_its_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(live=False)
    console.start(Run(name="one", folder=tmp_path, config=config(), objective="dpo"))
    for step, metrics in enumerate(METRICS, 1):
        console.log(step, metrics)
    console.close()
    said = capsys.readouterr().out
    assert "run one: embedded, dpo, 4 rows a step, 1 rank on ray" in said
    assert "step 2/2  loss 0.4000  accuracy 75.0%" in said
    assert "eval held/loss 0.500" in said
    assert "loss by step" in said


def test_resumed_run_goes_on_with_the_curve(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, **one}) for step, one in enumerate(METRICS, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    console = Console(live=False)
    console.start(Run(name="one", folder=tmp_path, config=config(), objective="dpo"))
    assert console._curve == [(1, 0.7), (2, 0.4)]


def test_runs_show_the_objective_and_how_the_loss_went(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_yaml(config()))
    facts = {"facts": {"objective": "dpo"}, "command": ["/bin/rlx", "dpo", "--data", "x"]}
    (folder / "manifest.json").write_text(json.dumps(facts))
    lines = [json.dumps({"step": step, **one}) for step, one in enumerate(METRICS, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    runner = CliRunner(env={"COLUMNS": "120"})
    listed = runner.invoke(app, ["runs", "list", "--root", str(tmp_path)])
    assert "0.700 → 0.400" in listed.output
    assert "dpo" in listed.output
    shown = runner.invoke(app, ["runs", "show", "one", "--root", str(tmp_path)])
    assert "eval/held/loss" in shown.output
    assert "rlx dpo -c" in shown.output.replace("\n", " ")
