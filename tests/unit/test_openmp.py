"""How threads wait is rlx's choice unless the environment makes one."""

from __future__ import annotations

import pytest

from rlx.core.openmp import openmp_environment


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)


def test_threads_spin_for_a_moment():
    assert openmp_environment()["GOMP_SPINCOUNT"] == "1000"


def test_what_the_environment_says_is_handed_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    found = openmp_environment()
    assert found["OMP_WAIT_POLICY"] == "passive"
    assert "GOMP_SPINCOUNT" not in found


def test_the_number_of_threads_is_fixed_in_any_case(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    found = openmp_environment()
    assert (found["OMP_DYNAMIC"], found["MKL_DYNAMIC"]) == ("false", "false")
