"""Divergence guards: when a metric beyond its bound ends the run or takes it back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlx.core.config import FaultsConfig
from rlx.core.engine.checkpoints import write_index
from rlx.core.engine.divergence import DivergenceGuard, checkpoint_to_return_to
from rlx.core.engine.fault_ledger import FAULTS_NAME, FaultLedger
from rlx.core.errors import DivergedError, EngineError, NonFiniteError

NORM = "policy/grad_norm"


def test_only_steps_in_a_row_are_divergence():
    guard = DivergenceGuard({NORM: 10.0}, steps=2)
    norms = [1.0, 11.0, 9.0, float("nan"), -12.0]
    found = [guard.note(step, {NORM: norm}) for step, norm in enumerate(norms, start=1)]
    assert found[:4] == [None] * 4
    error = found[4]
    assert error is not None
    assert error.last_good == 3
    assert str(error) == (
        "training diverges: policy/grad_norm is -12, beyond 10 after step 5, the second step in a "
        "row beyond a bound (faults.bounds)"
    )


def test_step_beyond_a_bound_is_suspicious_until_one_is_within():
    guard = DivergenceGuard({NORM: 10.0}, steps=3)
    guard.note(1, {NORM: 11.0})
    assert guard.suspicious
    guard.note(2, {NORM: 1.0})
    assert not guard.suspicious


def test_bound_on_a_metric_that_is_none_is_warned_of_once():
    guard = DivergenceGuard({"policy/gradnorm": 10.0}, steps=3)
    with pytest.warns(UserWarning, match="did you mean 'policy/grad_norm'"):
        guard.note(1, {NORM: 1.0})
    guard.note(2, {NORM: 1.0})


def checkpoints(folder: Path, *steps: int) -> Path:
    for step in steps:
        one = folder / f"step-{step:06d}"
        one.mkdir(parents=True)
        (one / "state.pt").write_text("state")
        write_index(one)
    return folder


def returned_to(
    root: Path, error: DivergedError | NonFiniteError, ledger: FaultLedger, **settings: object
) -> str:
    faults = FaultsConfig.model_validate({"divergence": "rollback", **settings})
    return checkpoint_to_return_to(
        error, step=8, checkpoints=root, settings=faults, ledger=ledger
    ).name


def test_return_is_to_the_last_checkpoint_before_the_first_bad_step(tmp_path: Path):
    root = checkpoints(tmp_path / "checkpoints", 2, 4, 6, 8)
    said: list[str] = []
    ledger = FaultLedger(tmp_path, said.append)
    assert returned_to(root, DivergedError("it diverges", last_good=5), ledger) == "step-000004"
    assert returned_to(root, NonFiniteError("NaN"), ledger) == "step-000008"
    assert ledger.take_metrics() == {"faults/rollbacks": 2.0}
    lines = [json.loads(line) for line in (tmp_path / FAULTS_NAME).read_text().splitlines()]
    assert [line["cause"] for line in lines] == ["it diverges", "NaN"]
    assert "going back to step-000004" in said[0]


def test_return_ends_where_there_is_no_checkpoint_or_it_does_not_help(tmp_path: Path):
    root = checkpoints(tmp_path / "checkpoints", 4)
    ledger = FaultLedger(tmp_path, lambda _: None)
    error = DivergedError("it diverges", last_good=3)
    with pytest.raises(EngineError, match="no whole checkpoint of step 3 or before"):
        returned_to(root, error, ledger)
    assert returned_to(root, NonFiniteError("NaN"), ledger, rollbacks=1) == "step-000004"
    with pytest.raises(EngineError, match="going back 1 times did not help"):
        returned_to(root, NonFiniteError("NaN"), ledger, rollbacks=1)
    ledger.finished(9)
    assert returned_to(root, NonFiniteError("NaN"), ledger, rollbacks=1) == "step-000004"


def test_stop_is_the_error_itself(tmp_path: Path):
    with pytest.raises(NonFiniteError, match="NaN"):
        returned_to(
            tmp_path, NonFiniteError("NaN"), FaultLedger(tmp_path, print), divergence="stop"
        )
