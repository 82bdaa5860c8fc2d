"""A run in virtual time, against what can be worked out by hand, and calibration from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.core.config import RunConfig
from rlx.core.errors import UsageError
from rlx.core.settings import dump_yaml
from rlx.core.simulation.calibration import calibrate, non_negative
from rlx.core.simulation.run import Prediction, Shape, simulate
from rlx.core.simulation.timings import Lengths, Timings


def timings(**changes: Any) -> Timings:
    """Ten tokens of 0.1 s, an update of 4 s."""
    return Timings.model_validate(
        {
            "response_tokens": [10],
            "step": 0.1,
            "step_per_sequence": 0.0,
            "update": 4.0,
            "update_per_token": 0.0,
            **changes,
        }
    )


def play(times: Timings | None = None, **shape: Any) -> Prediction:
    given = {"groups": 2, "group_size": 4, "engines": 1, "ranks": 1, **shape}
    return simulate(times or timings(), Shape(**given))


def test_turns_add_up() -> None:
    found = play(timings(reward=0.5, publish=0.25, other=0.25))
    assert found.step == pytest.approx(1.0 + 0.5 + 4.0 + 0.25 + 0.25)
    assert found.engine_idle == pytest.approx(5 / 6)
    assert found.learner_idle == pytest.approx(2 / 6)
    assert found.staleness == 0
    assert found.rollouts_per_second == pytest.approx(8 / 6)


def test_generation_ahead_hides_behind_the_update() -> None:
    found = play(max_staleness=1)
    assert found.step == pytest.approx(4.0, rel=0.01)
    assert found.learner_idle == pytest.approx(0.0, abs=0.01)
    assert found.staleness == pytest.approx(1.0)


def test_a_slow_engine_sets_the_pace_and_a_second_one_halves_it() -> None:
    slow = timings(response_tokens=[100], step=0.0, step_per_sequence=0.01, update=1.0)
    one = play(slow, max_staleness=1, partial_rollout=True)
    two = play(slow, max_staleness=1, partial_rollout=True, engines=2)
    assert one.step == pytest.approx(8.0, rel=0.05)
    assert two.step == pytest.approx(4.0, rel=0.05)
    assert one.engine_idle == pytest.approx(0.0, abs=0.01)


def test_ranks_share_the_tokens_and_lose_some_speed_with_each_doubling() -> None:
    times = timings(update=0.0, update_per_token=0.1, prompt_tokens=2.0, rank_efficiency=0.9)
    assert play(times).step == pytest.approx(1.0 + 0.1 * 8 * 12)
    assert play(times, ranks=4).step == pytest.approx(1.0 + 0.1 * 8 * 12 / (4 * 0.81))


def test_sequences_beyond_what_runs_at_once_wait() -> None:
    assert play(max_running=4).step == pytest.approx(2.0 + 4.0)


@pytest.mark.parametrize(("bound", "step"), [(1, 4.0), (2, 2.0), (3, 4 / 3)])
def test_groups_beyond_what_may_be_in_flight_wait(bound: int, step: float) -> None:
    """Every group takes a second, however many run; a step takes four of them."""
    times = timings(update=0.0)
    ahead = {"groups": 4, "max_staleness": 1, "partial_rollout": True}
    assert play(times, **ahead, max_in_flight=bound).step == pytest.approx(step, rel=0.06)
    assert play(times, **ahead).step < 4 / 3 - 0.1
    assert play(times, groups=4, max_in_flight=bound).step == play(times, groups=4).step


def test_prefill_is_shared_by_a_group() -> None:
    assert play(timings(prompt_tokens=100, prefill_per_token=0.001)).step == pytest.approx(5.2)


def test_weights_wait_for_long_responses_unless_they_are_swapped_in_flight() -> None:
    long = timings(response_tokens=[5, 5, 5, 95], update=1.0)
    waits = play(long, max_staleness=2)
    swaps = play(long, max_staleness=2, partial_rollout=True)
    assert swaps.step < waits.step
    assert play(long).step == pytest.approx(10.5, rel=0.1)


@settings(max_examples=30)
@given(
    groups=st.integers(1, 6),
    size=st.integers(1, 4),
    engines=st.integers(1, 3),
    staleness=st.integers(0, 3),
    swaps=st.booleans(),
    cv=st.floats(0, 1.5),
)
def test_no_bound_of_the_real_loop_is_broken(
    groups: int, size: int, engines: int, staleness: int, swaps: bool, cv: float
) -> None:
    times = timings(response_tokens={"mean": 20, "cv": cv, "most": 200}, update=1.5)
    found = play(
        times,
        groups=groups,
        group_size=size,
        engines=engines,
        max_staleness=staleness,
        partial_rollout=swaps,
    )
    assert 0 <= found.staleness <= staleness
    assert 0 <= found.engine_idle <= 1
    assert 0 <= found.learner_idle <= 1
    assert found.step >= 1.5


def test_lengths_follow_what_is_given() -> None:
    import random

    chance = random.Random(0)
    drawn = [Lengths(mean=100, cv=0.5, most=300).draw(chance) for _ in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(100, rel=0.05)
    assert max(drawn) <= 300
    assert {Lengths(values=[3, 7]).draw(chance) for _ in range(50)} == {3, 7}


def test_coefficients_are_found_and_never_negative() -> None:
    rows = [(1.0, 10.0), (2.0, 15.0), (3.0, 40.0)]
    assert non_negative(rows, [0.5 * a + 0.1 * b for a, b in rows]) == pytest.approx((0.5, 0.1))
    assert non_negative([(1.0, 1.0), (1.0, 2.0)], [2.0, 1.0])[1] == 0.0


def record(folder: Path, *, staleness: int = 0, complete: bool = True, steps: int = 6) -> Path:
    """A run of two groups of two, whose phases follow known timings."""
    config = RunConfig.model_validate(
        {"rollout": {"groups": 2, "group_size": 2, "max_staleness": staleness}}
    )
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(config))
    lines = []
    for step in range(1, steps + 1):
        lengths = [step, 2 * step, 3 + step, 7]
        prompt = 5
        whole = sum(lengths) + 4 * prompt
        phases = {
            "rollout": 0.1 * max(lengths) + 0.01 * sum(lengths),
            "reward": 0.3,
            "score": 0.001 * whole,
            "update": 0.5 + 0.002 * whole,
            "publish": 0.2,
        }
        times = {f"time/{name}": value for name, value in phases.items()}
        lines.append({"step": step, **times, "time/step": sum(phases.values()) + 0.05})
        rows = [
            {"tokens": n, "exact": {"tokens": [0] * (prompt + n), "prompt_length": prompt}}
            if complete
            else {"tokens": n}
            for n in lengths
        ]
        path = folder / "rollouts" / f"step-{step:06d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_recorded_run_gives_its_timings_back(tmp_path: Path) -> None:
    config, found = calibrate(record(tmp_path / "run"))
    assert config.rollout.groups == 2
    assert found.step == pytest.approx(0.1)
    assert found.step_per_sequence == pytest.approx(0.01)
    assert found.update == pytest.approx(0.5)
    assert found.update_per_token == pytest.approx(0.002)
    assert found.score_per_token == pytest.approx(0.001)
    assert (found.reward, found.publish) == pytest.approx((0.3, 0.2))
    assert found.other == pytest.approx(0.05)
    assert found.prompt_tokens == 5
    assert sorted(set(found.response_tokens.values)) == [3, 4, 5, 6, 7, 8, 9, 10, 12]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ({"staleness": 1}, "generation ran ahead"),
        ({"complete": False}, "fewer than 4 steps with complete rollouts"),
        ({"steps": 3}, "fewer than 4 steps"),
    ],
)
def test_a_run_that_tells_too_little_is_refused(
    tmp_path: Path, made: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        calibrate(record(tmp_path / "run", **made))
    with pytest.raises(UsageError, match="there is no run"):
        calibrate(tmp_path / "nowhere")
