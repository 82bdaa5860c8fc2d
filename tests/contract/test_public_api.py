"""The public API is what was promised, and the pages that are made from it are up to date."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import rlx
import rlx.testing

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def test_nothing_that_was_promised_is_gone_or_different(scripts: None) -> None:
    surface = importlib.import_module("api_surface")
    promised = surface.PAGE.read_text(encoding="utf-8").splitlines()
    broken = sorted(set(promised) - set(surface.lines()))
    assert not broken, (
        "plugins that use this break; if that is wanted, raise rlx.core.api.API_VERSION, say in "
        "CHANGES what to do, and take the lines out of tests/contract/public_api.txt"
    )


def test_every_api_version_says_what_it_changed() -> None:
    from rlx.core.api import API_VERSION, CHANGES

    assert set(CHANGES) == set(range(2, API_VERSION + 1))


def test_pages_made_from_the_code_are_up_to_date(scripts: None) -> None:
    docs = importlib.import_module("docs")
    assert list(docs.outdated(write=False)) == [], "make docs"


def test_kit_has_a_fixture_for_everything_that_it_offers() -> None:
    from rlx.testing import pytest_plugin

    values = {"ConformanceError", "Violation"}
    assert set(rlx.testing.__all__) - values <= set(vars(pytest_plugin))


def test_every_kind_has_a_check() -> None:
    from rlx.core.component import KINDS, singular
    from rlx.testing.package import CHECKS

    assert set(CHECKS) == set(KINDS)
    for kind, check in CHECKS.items():
        assert check is getattr(rlx.testing, f"check_{singular(kind)}")


def test_public_values_can_not_be_changed() -> None:
    import dataclasses

    for name in rlx.__all__:
        value = getattr(rlx, name)
        if dataclasses.is_dataclass(value):
            assert value.__dataclass_params__.frozen, name
