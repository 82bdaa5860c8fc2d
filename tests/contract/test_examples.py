"""examples/: installed by pip into a fresh environment, tested, checked and trained with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from environment import ENVIRONMENTS, EXAMPLES, Environment, train_arguments

pytestmark = [pytest.mark.slow, pytest.mark.engine]

COMPONENTS = {
    "rlx-zscore": {("estimators", "zscore")},
    "rlx-asymmetric": {("losses", "asymmetric")},
    "rlx-leitner": {("samplers", "leitner"), ("rewards", "fresh")},
}
PACKAGES = [*COMPONENTS, "rlx-watch"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """All examples, built and installed (about 10 s)."""
    import shutil

    folder = tmp_path_factory.mktemp("examples")
    environment = Environment(folder / "venv")
    # from copies: building leaves folders beside the sources
    packages = [shutil.copytree(EXAMPLES / name, folder / name) for name in PACKAGES]
    environment.install(*packages)
    return environment


def metrics(run: Path) -> list[dict[str, float]]:
    from whole_runs import metrics

    return metrics(run)


def test_every_example_is_tested_here() -> None:
    tested = {*PACKAGES, *ENVIRONMENTS}
    assert {path.parent.name for path in EXAMPLES.glob("*/pyproject.toml")} == tested


def test_examples_pass_their_own_tests(environment: Environment) -> None:
    """The kit on every component: about 25 s."""
    output = environment.run(
        *("pytest", "-q", "--import-mode=importlib", "-c", "/dev/null", "-p", "no:cacheprovider"),
        *(str(EXAMPLES / name / "tests") for name in PACKAGES),
        cwd=environment.site,
    )
    assert "21 passed" in output, output


def test_listing_shows_the_examples_with_their_summaries(
    environment: Environment, tmp_path: Path
) -> None:
    listed = json.loads(environment.rlx("plugins", "list", "--json", cwd=tmp_path))
    found = {
        (row["kind"], row["name"]): row["summary"]
        for row in listed["components"]
        if not row["builtin"]
    }
    assert set(found) == set().union(*COMPONENTS.values())
    assert all(found.values())
    assert [row["distribution"] for row in listed["hooks"]] == ["rlx-watch"]
    assert "rlx-watch" in environment.rlx("--help", cwd=tmp_path)


def test_all_examples_train_together(environment: Environment, workspace: Path) -> None:
    words = [
        *train_arguments("out", steps=3),
        *"--estimator zscore --loss asymmetric --sampler leitner --reward fresh".split(),
    ]
    environment.rlx(*words, cwd=workspace)
    manifest = json.loads((workspace / "out" / "manifest.json").read_text())
    used = {item["name"]: item["distribution"] for item in manifest["components"]}
    for distribution, components in COMPONENTS.items():
        for _, name in components:
            assert used[name] == distribution
    steps = metrics(workspace / "out")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["rlx-watch/longest"] > 0
        assert 0 < step["rlx-watch/distinct"] <= 1
        assert 0.25 <= step["policy/negative_weight"] <= 4
    shown = environment.rlx("watch", "out", cwd=workspace)
    assert shown.startswith("out: step 3, mean reward ")


def test_state_of_sampler_reward_and_loss_survives_resume(
    environment: Environment, workspace: Path
) -> None:
    words = "--sampler leitner --reward fresh --loss asymmetric --set reward.concurrency=4".split()
    words += ["--set", "sampler.promote=-0.05", "--set", "loss.decay=0.5"]
    # few tasks and short answers, so that some come again; advantages that don't balance
    words += ["--data", "few.jsonl", "--max-new-tokens", "1", "--estimator", "raw.py:raw"]
    rows = (workspace / "data.jsonl").read_text().splitlines(keepends=True)
    (workspace / "few.jsonl").write_text("".join(rows[:5]))
    (workspace / "raw.py").write_text("def raw(x):\n    return x.rewards + 0.05\n")
    environment.rlx(*train_arguments("whole", steps=5), *words, cwd=workspace)
    environment.rlx(*train_arguments("parts", steps=3), *words, cwd=workspace)
    environment.rlx(*train_arguments("parts", steps=5), *words, "--resume", cwd=workspace)
    whole, parts = metrics(workspace / "whole"), metrics(workspace / "parts")
    assert whole == parts
    assert len({step["policy/negative_weight"] for step in whole}) > 2
    assert whole[-1]["fresh/repeats"] > 0


def test_hook_plugin_stops_a_run_that_is_stuck(environment: Environment, workspace: Path) -> None:
    words = [*train_arguments("out", steps=9), "--reward", "exact_match"]
    text = environment.rlx(*words, cwd=workspace, RLXWATCH_PATIENCE="1")
    assert "2 of 9 steps, no better mean reward for 1 steps" in text
    words = [*train_arguments("other"), "--reward", "exact_match"]
    refused = environment.rlx(*words, cwd=workspace, code=2, RLXWATCH_PATIENCE="0")
    assert "RLXWATCH_PATIENCE" in refused
