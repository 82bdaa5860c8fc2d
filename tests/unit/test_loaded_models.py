"""Models that a reward says it loads: looked for before a run starts, and planned for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.core import sizes
from rlx.core.component import tags_of
from rlx.core.errors import UsageError
from rlx.core.machine import this_machine
from rlx.core.models import model_info, stored_weights
from rlx.core.placement import roles
from rlx.core.plugins import PluginSystem
from rlx.core.preflight import check
from rlx.core.selection import Selection, select
from rlx.core.settings import Settings, load_settings
from rlx.embedded import MODEL_FOLDER

LOADER = """
import rlx

@rlx.component(loads=["first", "others"])
def judged(sample, *, first: str, others: list[str] | None = None) -> float:
    return 0.0
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSystem:
    (tmp_path / "loader.py").write_text(LOADER)
    monkeypatch.chdir(tmp_path)
    return PluginSystem.load()


def chosen(plugins: PluginSystem, *sets: str) -> tuple[Settings, Selection]:
    settings = load_settings(
        sets=["rewards=[loader.py:judged]", *(f"rewards.judged.{text}" for text in sets)],
        flags={"model": "embedded", "data": "d"},
        env={},
    )
    return settings, select(settings.config, plugins, origins=settings.origins)


def test_a_single_name_is_one_parameter(plugins: PluginSystem) -> None:
    _, selection = chosen(plugins, "first=a/b", "others=[c/d, e/f]")
    ref = selection.rewards[0][0]
    assert tags_of(ref.load()).loads == ("first", "others")
    assert [model for _, model in selection.loads] == ["a/b", "c/d", "e/f"]
    assert selection.loads[0][0] == "rewards.0.params.first"


def test_a_model_that_is_not_there_ends_the_run_before_it_starts(plugins: PluginSystem) -> None:
    settings, selection = chosen(plugins, f"first={MODEL_FOLDER}", "others=[./missing]")
    with pytest.raises(UsageError, match=r"no model folder \./missing") as caught:
        check(settings.config, selection, model_info("embedded"), origins=settings.origins)
    assert caught.value.where == "rewards.0.others (--set rewards.judged.others)"


def test_its_memory_is_planned(plugins: PluginSystem) -> None:
    settings, selection = chosen(plugins, f"first={MODEL_FOLDER}", f"others=[{MODEL_FOLDER}]")
    info = model_info("embedded")
    placed = roles(settings.config, selection, info, this_machine())
    rewards = next(role for role in placed if role.name == "rewards-0")
    count, dtype = stored_weights(str(MODEL_FOLDER), where="model")
    assert count == info.parameters
    held = 2 * sizes.weight_bytes(count or 0, dtype or "")
    assert rewards.memory is not None
    assert rewards.memory > held > 0
    assert rewards.parts == {"parameters": held}
