"""Selected components: what they require together, and where mistakes were made."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from rlx.core.config import RunConfig
from rlx.core.errors import UsageError
from rlx.core.plugins import PluginSystem
from rlx.core.selection import Selection, select
from rlx.core.settings import load_settings

COMPONENTS = """
from rlx.core.component import component

@component(requires={"groups", "ref_logprobs"}, aggregation="seq-mean-token-mean")
def estimator(x, *, eps: float = 0.1): ...

@component(requires={"entropy"}, aggregation="seq-mean-token-sum-norm")
def loss(x): ...

def plain_loss(x): ...
def keyed(x, *, key=len): ...
def plain_estimator(x): ...

@component(needs_label=True)
def labelled(sample): ...

def free(sample): ...

class Depends:
    def __init__(self, *, critic: bool = False):
        self.requires = frozenset({"values"} if critic else ())
    def __call__(self, x): ...

class Explodes:
    def __init__(self):
        raise RuntimeError("must not be constructed on the driver")
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> PluginSystem:
    folder = tmp_path_factory.mktemp("components")
    (folder / "mine_sel.py").write_text(COMPONENTS)
    return PluginSystem.load(search_path=[folder], rlxfile=False)


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "estimator": "mine_sel:plain_estimator",
            "loss": "mine_sel:plain_loss",
            "rewards": ["mine_sel:free"],
            **changes,
        }
    )


def test_requirements_are_united_with_who_asked(plugins: PluginSystem) -> None:
    chosen = select(
        config(estimator="mine_sel:estimator", loss="mine_sel:loss", kl={"coef": 0.1}), plugins
    )
    assert chosen.requires == {"groups", "ref_logprobs", "entropy"}
    assert chosen.required_by["entropy"] == ("loss 'mine_sel:loss'",)
    assert chosen.required_by["ref_logprobs"] == ("estimator 'mine_sel:estimator'", "kl.coef")


def test_nothing_is_required_that_nobody_asked_for(plugins: PluginSystem) -> None:
    assert select(config(), plugins).requires == frozenset()


def test_requirements_may_depend_on_parameters(plugins: PluginSystem) -> None:
    off = select(config(estimator="mine_sel:Depends"), plugins)
    on = select(config(estimator={"name": "mine_sel:Depends", "critic": True}), plugins)
    assert (off.requires, on.requires) == (frozenset(), {"values"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "token-mean"),
        ({"estimator": "mine_sel:estimator"}, "seq-mean-token-mean"),
        (
            {"estimator": "mine_sel:estimator", "loss": "mine_sel:loss"},
            "seq-mean-token-sum-norm",
        ),
        ({"loss": "mine_sel:loss", "algorithm": {"aggregation": "token-mean"}}, "token-mean"),
    ],
)
def test_aggregation_is_the_users_then_the_losss_then_the_estimators(
    plugins: PluginSystem, changes: dict[str, Any], expected: str
) -> None:
    assert select(config(**changes), plugins).aggregation == expected


def test_the_first_reward_that_needs_labels_is_named(plugins: PluginSystem) -> None:
    assert select(config(), plugins).needs_label is None
    both = select(config(rewards=["mine_sel:free", "mine_sel:labelled:0.5"]), plugins)
    assert both.needs_label == "mine_sel:labelled"
    assert [weight for _, weight in both.rewards] == [1.0, 0.5]


def test_trackers_are_not_constructed(plugins: PluginSystem) -> None:
    assert select(config(trackers=["mine_sel:Explodes"]), plugins).trackers[0].name


def test_a_selection_travels_and_describes_itself(plugins: PluginSystem) -> None:
    chosen = select(config(), plugins)
    back = pickle.loads(pickle.dumps(chosen))
    assert isinstance(back, Selection)
    assert back.estimator == chosen.estimator
    assert [item["kind"] for item in chosen.manifest()][:2] == ["estimators", "losses"]
    assert len(chosen.manifest()) == len(chosen.components)


def test_parameter_that_the_configuration_file_can_not_hold_is_refused(
    plugins: PluginSystem,
) -> None:
    chosen = config(estimator={"name": "mine_sel:keyed", "params": {"key": abs}})
    with pytest.raises(UsageError, match="'key' is a builtin_function_or_method") as caught:
        select(chosen, plugins)
    assert caught.value.where == "estimator.key"


def test_modules_of_the_working_folder_are_shipped(plugins: PluginSystem) -> None:
    (folder,) = plugins.search_path
    assert select(config(), plugins).shipped_modules() == [str(Path(folder) / "mine_sel.py")]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("estimator=grup_norm", "estimator (--set estimator)"),
        ("estimator.epz=1", "estimator.epz (--set estimator.epz)"),
        ("rewards=[nope]", "rewards.0 (--set rewards)"),
        ("loss=mine_sel:nope", "loss (--set loss)"),
    ],
)
def test_errors_name_the_setting_and_its_origin(
    plugins: PluginSystem, text: str, where: str
) -> None:
    settings = load_settings(sets=[text], flags={"model": "m", "data": "d"}, env={})
    with pytest.raises(UsageError) as caught:
        select(settings.config, plugins, origins=settings.origins)
    assert caught.value.where == where
    assert caught.value.fix
