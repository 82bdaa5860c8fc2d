"""Layers of settings: order, origins, reaching into lists, and one error for all mistakes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlx.core.config import RewardConfig, RunConfig
from rlx.core.errors import UsageError
from rlx.core.settings import FLAGS, Settings, dump_yaml, known_keys, load_settings

MODEL = "some/model"
"""Not `embedded`, so that the embedded recipe takes no part."""


def load(
    *sets: str,
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    files: Sequence[Path] = (),
) -> Settings:
    given = {"model": MODEL, "data": "rows.jsonl", **(flags or {})}
    return load_settings(files=files, sets=sets, flags=given, env=env or {})


def error(*sets: str, **layers: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(*sets, **layers)
    return caught.value


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_later_layers_win_in_the_documented_order(tmp_path: Path) -> None:
    first = write(tmp_path, "seed: 1\nsteps: 1\ndata: {split: a}\nrollout: {groups: 1}\n", "a.yaml")
    second = write(tmp_path, "steps: 2\nrollout: {groups: 2, top_p: 0.2}\n", "b.yaml")
    env = {"RLX_ROLLOUT__GROUPS": "3", "RLX_ROLLOUT__GROUP_SIZE": "3", "RLX_LEARNER__LR": "3e-3"}
    settings = load(
        "learner.lr=5e-5",
        files=[first, second],
        env=env,
        flags={"lr": 4e-4, "group_size": 4},
    )
    config = settings.config
    assert (config.seed, config.steps, config.rollout.groups) == (1, 2, 3)
    assert (config.rollout.group_size, config.learner.lr) == (4, 5e-5)
    assert settings.origins["seed"] == f"{first}:1"
    assert settings.origins["steps"] == f"{second}:1"
    assert settings.origins["rollout.groups"] == "RLX_ROLLOUT__GROUPS"
    assert settings.origins["rollout.group_size"] == "--group-size"
    assert settings.origins["learner.lr"] == "--set learner.lr"
    assert settings.origins["learner.betas"] == "default"


def test_every_leaf_has_an_origin() -> None:
    settings = load("estimator.eps=1", "rewards=[a, b]")
    for key in known_keys():
        assert settings.origin(key)
    assert settings.origin("rewards.1.name") == "--set rewards"
    assert settings.origin("data") == "--data"


def test_a_component_takes_parameters_at_its_own_level_and_under_params() -> None:
    short = load("estimator.eps=1e-5").config.estimator
    long = load("estimator.params.eps=1e-5").config.estimator
    assert short == long
    assert short.params == {"eps": 1e-5}


def test_nested_parameters_keep_their_neighbours() -> None:
    agent = load(
        "agent.tools.search.k=3", "agent.tools.search.url=x", "agent.tools.n=1"
    ).config.agent
    assert agent.params == {"tools": {"search": {"k": 3, "url": "x"}, "n": 1}}


def test_another_name_drops_the_parameters_of_the_old_one(tmp_path: Path) -> None:
    path = write(tmp_path, "estimator: {name: zscore, eps: 1}\n")
    assert load(files=[path], flags={"estimator": "rloo"}).config.estimator.params == {}
    assert load(files=[path], flags={"estimator": "zscore"}).config.estimator.params == {"eps": 1}


def test_a_component_written_out_replaces_the_lower_layer(tmp_path: Path) -> None:
    first = write(tmp_path, "estimator: {name: zscore, eps: 1, clip: 2}\n", "a.yaml")
    second = write(tmp_path, "estimator: {name: zscore, clip: 3}\n", "b.yaml")
    third = write(tmp_path, "estimator: {params: {eps: 4}}\n", "c.yaml")
    assert load(files=[first, second]).config.estimator.params == {"clip": 3}
    assert load(files=[first, third]).config.estimator.params == {"eps": 4, "clip": 2}


@pytest.mark.parametrize("key", ["rewards.1", "rewards.pkg.mod:attr"])
def test_set_reaches_into_rewards_by_number_and_by_name(key: str) -> None:
    rewards = load(
        f"{key}.weight=2", f"{key}.limit=7", flags={"reward": ["math", "pkg.mod:attr:0.5"]}
    ).config.rewards
    assert rewards[0] == RewardConfig(name="math")
    assert rewards[1] == RewardConfig(name="pkg.mod:attr", weight=2, params={"limit": 7})


def test_reward_flags_replace_the_rewards_below(tmp_path: Path) -> None:
    path = write(tmp_path, "rewards:\n  - math\n  - overlong:0.5\n")
    settings = load(files=[path], flags={"reward": ["exact_match:2"]})
    assert settings.config.rewards == [RewardConfig(name="exact_match", weight=2)]
    assert settings.origin("rewards.0.name") == "--reward"


@pytest.mark.parametrize("name", ["nan", "inf", "infinity"])
def test_a_function_called_like_a_number_is_a_name(name: str) -> None:
    rewards = load(flags={"reward": [f"pkg.mod:{name}", f"mine.py:{name}:2"]}).config.rewards
    assert rewards[0] == RewardConfig(name=f"pkg.mod:{name}")
    assert rewards[1] == RewardConfig(name=f"mine.py:{name}", weight=2)


@pytest.mark.parametrize("setting", ["learner.lr=.inf", "kl.coef=.nan", "rewards.0.weight=.nan"])
def test_numbers_must_be_finite(setting: str) -> None:
    caught = error(setting, flags={"reward": ["math"]})
    assert "is not allowed" in caught.what
    assert caught.where == f"--set {setting.partition('=')[0]}"


def test_a_single_reward_need_not_be_a_list(tmp_path: Path) -> None:
    assert load(files=[write(tmp_path, "rewards: math\n")]).config.rewards[0].name == "math"


def test_texts_are_kept_as_they_are_written() -> None:
    config = load(
        "data.template=Question: {prompt}", "data.split=1", "data.label=null", "estimator=1e5"
    ).config
    assert config.data.template == "Question: {prompt}"
    assert config.data.split == "1"
    assert config.data.label is None
    assert config.estimator.name == "1e5"


def test_no_plugin_adds_to_what_files_disable(tmp_path: Path) -> None:
    path = write(tmp_path, "plugins: {disable: [rlx-a]}\n")
    config = load(files=[path], flags={"no_plugin": ["rlx-b"]}).config
    assert config.plugins.disable == ["rlx-a", "rlx-b"]


def test_a_dumped_configuration_gives_the_same_run_again(tmp_path: Path) -> None:
    settings = load(
        "estimator.eps=1e-5",
        "data.template=a: {prompt}\n# b",
        "learner.betas=[0.8, 0.9]",
        "output=runs/x",
        flags={"reward": ["a:0.5", "b"], "tracker": ["jsonl"]},
    )
    plain = write(tmp_path, dump_yaml(settings.config), "plain.yaml")
    commented = write(tmp_path, dump_yaml(settings.config, settings.origins), "commented.yaml")
    for path in (plain, commented):
        assert load_settings(files=[path], env={}).config == settings.config


def test_the_dry_run_dump_says_where_each_value_came_from() -> None:
    settings = load("estimator.eps=1e-5")
    text = dump_yaml(settings.config, settings.origins)
    assert re.search(r"^    eps: 1.0e-05 +# --set estimator.eps$", text, re.MULTILINE)
    assert re.search(rf"^model: {MODEL} +# --model$", text, re.MULTILINE)
    assert re.search(r"^steps: 100 +# default$", text, re.MULTILINE)


def test_free_mappings_take_keys_one_by_one() -> None:
    config = load(
        "data.chat_template_kwargs={a: 1}", "data.chat_template_kwargs.enable_thinking=false"
    ).config
    assert config.data.chat_template_kwargs == {"a": 1, "enable_thinking": False}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("lr=1", "learner.lr"),
        ("learner.lrr=1", "learner.lr"),
        ("estimater.eps=1", "estimator.eps"),
        ("rolout.groups=1", "rollout.groups"),
        ("group_size=4", "rollout.group_size"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(text: str, hint: str) -> None:
    caught = error(text)
    assert f"did you mean '{hint}'?" in caught.what
    assert caught.where == f"--set {text.partition('=')[0]}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout.engine=vlm", "one of vllm, transformers; did you mean 'vllm'?"),
        ("learner.lr=-1", "a number > 0"),
        ("rollout.groups=2.5", "a whole number ≥ 1"),
        ("rollout.top_p=2", "a number > 0 and ≤ 1"),
        ("data.shuffle=perhaps", "true or false"),
        ("learner.betas=3", "a list"),
        ("data.max_samples=x", "a whole number ≥ 1 or null"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(text: str, expected: str) -> None:
    caught = error(text)
    assert caught.what.endswith(expected)
    assert caught.what.startswith(text.partition("=")[0])


def test_all_mistakes_are_listed_in_one_error_with_their_origins(tmp_path: Path) -> None:
    path = write(tmp_path, "steps: none\nlearner:\n  lrate: 1\n")
    caught = error("kl=0.1", files=[path], env={"RLX_SEED": "x"}, flags={"engine": "hf"})
    for part in (
        f"steps ({path}:1)",
        f"learner.lrate ({path}:3)",
        "kl (--set kl)",
        "seed (RLX_SEED)",
        "rollout.engine (--engine)",
    ):
        assert part in caught.what
    assert caught.what.startswith("5 settings are wrong")


def test_a_reward_that_is_not_there_lists_those_that_are() -> None:
    assert (
        "there are 0 (math), 1 (overlong)"
        in error("rewards.mathh.weight=1", flags={"reward": ["math", "overlong"]}).what
    )


@pytest.mark.parametrize("text", ["steps", "=3", ""])
def test_set_without_key_or_value_is_an_error(text: str) -> None:
    assert "key=value" in error(text).what


def test_a_misspelt_variable_is_an_error_and_a_foreign_one_is_not() -> None:
    assert "RLX_MODEL" in error(env={"RLX_MODLE": "x"}).what
    assert "did you mean 'learner.lr'" in error(env={"RLX_LEARNER__LRR": "1"}).what
    load(env={"RLX_PLUGINS": "", "RLX_STRICT_PLUGINS": "1", "RLX_CLUSTER_TOKEN": "x", "HOME": "/"})


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n"])
def test_a_file_that_is_no_mapping_is_an_error(tmp_path: Path, text: str) -> None:
    assert "not a mapping" in error(files=[write(tmp_path, text)]).what


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load(files=[write(tmp_path, "")]).config == load().config


def test_a_missing_file_is_named() -> None:
    assert error(files=[Path("nowhere.yaml")]).where == "-c nowhere.yaml"


def test_every_flag_leads_to_a_setting() -> None:
    assert set(FLAGS.values()) <= set(known_keys())


def test_layers_do_not_leak_into_later_calls() -> None:
    load("estimator.eps=1", "plugins.disable=[a]", flags={"reward": ["x"]})
    assert load().config.estimator == RunConfig().estimator
    assert load().config.plugins.disable == []


def test_the_embedded_recipe_stands_between_defaults_and_files(tmp_path: Path) -> None:
    settings = load_settings(env={})
    changed = {key for key, origin in settings.origins.items() if origin == "embedded recipe"}
    assert changed
    key = next(key for key in sorted(changed) if key.startswith("learner."))
    path = write(tmp_path, "learner: {lr: 0.5}\n")
    assert load_settings(files=[path], env={}).config.learner.lr == 0.5
    assert load_settings(flags={"model": MODEL}, env={}).origin(key) == "default"


def test_the_recipe_s_evaluation_gives_way_to_other_data() -> None:
    assert load_settings(env={}).config.eval.samples > 1
    own = load_settings(sets=["eval.sources=[{path: mine.jsonl}]"], env={}).config.eval
    assert (own.samples, own.max_tasks, own.every) == (1, None, 0)
    assert [source.path for source in own.sources] == ["mine.jsonl"]
    assert load_settings(sets=["eval.samples=2"], env={}).config.eval.sources


def test_the_recipe_s_task_settings_go_with_its_task() -> None:
    own = load_settings(flags={"data": "rows.jsonl"}, env={})
    assert own.origin("rewards.0.name") == "default"
    with_task = load_settings(flags={"model": MODEL}, env={})
    assert with_task.config.rewards == load_settings(env={}).config.rewards


def test_a_reward_is_found_by_the_short_name_that_metrics_show() -> None:
    flags = {"reward": ["my.pkg:style", "file.py:style", "dist/math"]}
    sets = ["rewards.style.a=1", "rewards.style_2.b=2", "rewards.math.c=3", "rewards.0.d=4"]
    rewards = load_settings(flags=flags, sets=sets, env={}).config.rewards
    assert [reward.params for reward in rewards] == [{"a": 1, "d": 4}, {"b": 2}, {"c": 3}]


def test_stale_rollouts_are_corrected_unless_a_correction_is_named():
    ahead = {"max_staleness": 1}
    assert RunConfig().correction.name == "none"
    assert RunConfig(rollout=ahead).correction.name == "tis"
    assert RunConfig(rollout=ahead, correction="none").correction.name == "none"
    settings = load_settings(flags=ahead, env={})
    assert settings.config.correction.name == "tis"
    assert settings.origin("correction.name") == "default with rollout.max_staleness"
    named = load_settings(flags={**ahead, "correction": "icepop"}, env={})
    assert named.config.correction.name == "icepop"
