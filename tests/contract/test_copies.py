"""Built-ins use the public door: a copy of their file in somebody's package computes the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from environment import Environment, train_arguments, write_wheel
from whole_runs import metrics, weights

import rlx
from rlx.core.component import Bound
from rlx.core.offline.needs import needs_of
from rlx.core.plugins import PluginSystem
from rlx.testing.cases import Batch
from rlx.testing.corrections import weights as correction_weights
from rlx.testing.estimators import compute
from rlx.testing.losses import value_and_gradient
from rlx.testing.objective_cases import Case
from rlx.testing.objectives import value_and_gradient as value_and_gradient_of_rows

BUILTIN = Path(rlx.__file__).parent / "plugins"
COMPUTE = {
    "estimators": compute,
    "losses": value_and_gradient,
    "corrections": lambda bound, batch: [correction_weights(bound, batch)],
    "objectives": lambda bound, batch: value_and_gradient_of_rows(bound, rows_of(bound)),
}
BATCH = Batch(group=(0, 0, 1, 1, 1), rewards=(0.0, 1.0, 2.0, 0.5, 0.5), lengths=(2, 1, 3, 1, 4))


def rows_of(bound: Bound) -> Case:
    needs = needs_of(bound)
    return Case(needs=needs, lengths=(1, 1, 1, 1) if needs.head == "score" else (2, 1, 3, 1))


def builtins() -> list[tuple[str, str]]:
    registry = PluginSystem.load(hooks=False, rlxfile=False).registry
    return [
        (kind, entry.name)
        for kind in COMPUTE
        for entry in registry.entries(kind)
        if entry.provider.builtin
    ]


@pytest.mark.parametrize(("kind", "name"), builtins())
def test_copied_file_computes_the_same_numbers(install, kind: str, name: str) -> None:
    source = (BUILTIN / kind / f"{name}.py").read_text(encoding="utf-8")
    module = f"copied_{kind}_{name}"
    install("rlx-copies", {f"rlx.{kind}": {"mine": f"{module}:{name}"}}, {f"{module}.py": source})
    ours, theirs = rlx.resolve(kind, name), rlx.resolve(kind, "mine")
    assert theirs.ref.distribution == "rlx-copies"
    assert (theirs.params, theirs.requires) == (ours.params, ours.requires)
    for here, there in zip(COMPUTE[kind](ours, BATCH), COMPUTE[kind](theirs, BATCH), strict=True):
        assert torch.equal(here, there)


@pytest.mark.slow
@pytest.mark.engine
def test_run_with_copies_has_the_same_metrics_and_weights(tmp_path: Path, workspace: Path) -> None:
    """An estimator, a loss and a reward from an installed package; two runs, about 10 s."""
    chosen = {"estimators": "group_norm", "losses": "ppo", "rewards": "repetition"}
    environment = Environment(tmp_path / "venv")
    wheel = write_wheel(
        tmp_path / "wheels",
        "rlx-copies",
        {
            f"rlx.{kind}": {f"copied-{name}": f"copied_{name}:{name}"}
            for kind, name in chosen.items()
        },
        {
            f"copied_{name}.py": (BUILTIN / kind / f"{name}.py").read_text(encoding="utf-8")
            for kind, name in chosen.items()
        },
    )
    environment.install(wheel)
    for output, prefix in (("ours", ""), ("theirs", "copied-")):
        estimator, loss, reward = (f"{prefix}{name}" for name in chosen.values())
        words = f"--estimator {estimator} --loss {loss} --reward mypkg:digits --reward {reward}"
        words += " --set learner.epochs=2 --set learner.minibatch_size=8 --set loss.clip_low=0.1"
        environment.rlx(*train_arguments(output, steps=3), *words.split(), cwd=workspace)
    manifest = json.loads((workspace / "theirs" / "manifest.json").read_text())
    used = {item["kind"] for item in manifest["components"] if item["distribution"] == "rlx-copies"}
    assert used == set(chosen)
    copied = [
        {key.replace("/copied-", "/"): value for key, value in step.items()}
        for step in metrics(workspace / "theirs")
    ]
    assert copied == metrics(workspace / "ours")
    assert weights(workspace / "theirs") == weights(workspace / "ours")
    assert copied[-1]["policy/clip_rate"] > 0 or copied[-1]["policy/ratio_mean"] != 1
