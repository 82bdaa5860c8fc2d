"""Layers of settings, merged into one `RunConfig` that knows where each value came from.

Later layers win: defaults < embedded recipe < YAML files (`-c`, in order) < environment (`RLX_…`)
< flags < `--set`. Naming a component (an estimator, a reward …) drops the parameters that a lower
layer gave to another one; naming the same one again with a plain word keeps them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlx.core.config import RunConfig
from rlx.core.config_base import stale_correction
from rlx.core.errors import UsageError
from rlx.core.settings_schema import allowed_values, key_of_location, known_keys
from rlx.core.settings_tree import Problem, Tree
from rlx.core.yaml_text import dump_tree, parse_file

FLAGS: Mapping[str, str] = {
    "model": "model",
    "data": "data.path",
    "eval_data": "eval.sources",
    "reward": "rewards",
    "estimator": "estimator",
    "loss": "loss",
    "correction": "correction",
    "agent": "agent",
    "sampler": "sampler",
    "tracker": "trackers",
    "steps": "steps",
    "groups": "rollout.groups",
    "group_size": "rollout.group_size",
    "max_staleness": "rollout.max_staleness",
    "max_new_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "lr": "learner.lr",
    "lora_rank": "learner.lora.rank",
    "lora_alpha": "learner.lora.alpha",
    "lora_targets": "learner.lora.target_modules",
    "kl_coef": "kl.coef",
    "aggregation": "algorithm.aggregation",
    "seed": "seed",
    "engine": "rollout.engine",
    "runtime": "runtime.kind",
    "ray_address": "runtime.ray_address",
    "colocate": "placement.colocate",
    "output": "output",
    "checkpoint_every": "checkpoint.every",
    "eval_every": "eval.every",
    "no_plugin": "plugins.disable",
}
"""Flag of `rlx train` (as a Python name) → key of the configuration."""

ENV_PREFIX = "RLX_"
DEFAULT = "default"
RECIPE = "embedded recipe"
_TASK_SECTIONS = ("data", "rewards", "eval")
"""What a recipe says about its task; the rest of it is about its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A valid configuration, and where each of its values came from."""

    config: RunConfig
    origins: Mapping[str, str]
    """Dotted key of each leaf → `default`, `embedded recipe`, `run.yaml:12`, `RLX_SEED`,
    `--lr` or `--set learner.lr`."""

    def origin(self, key: str) -> str:
        """Where the value of `key`, or of the section or component around it, was set."""
        return nearest_origin(self.origins, key)


def load_settings(
    *,
    files: Sequence[str | Path] = (),
    sets: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    names: Mapping[str, str] = FLAGS,
    env: Mapping[str, str] | None = None,
    preset: Mapping[str, Any] | None = None,
    preset_name: str = "preset",
) -> Settings:
    """Merge all layers and validate the result.

    Args:
        files: YAML files, partial `RunConfig` trees; later ones win.
        sets: `key=value` texts; values are YAML (`--set rollout.top_p=0.9`).
        flags: values of the flags of `names`; None means that the flag was not given.
        names: flag → key, for a command with flags of its own.
        env: environment; unset: the process's own.
        preset: what a command sets in place of the defaults, below all other layers.
        preset_name: the origin of its values.

    Raises:
        UsageError: one error that lists every wrong key with its origin and allowed values.
    """
    documents = [_read_file(Path(path)) for path in files]
    variables = dict(os.environ if env is None else env)

    def build(recipe: Mapping[str, Any]) -> Tree:
        tree = Tree()
        tree.assign_mapping(preset or {}, lambda _: preset_name)
        tree.assign_mapping(recipe, lambda _: RECIPE)
        for value, origin in documents:
            tree.assign_mapping(value, origin)
        _apply_environment(tree, variables)
        for flag, value in (flags or {}).items():
            if value is not None:
                name = "--" + flag.replace("_", "-")
                more = tree.value(names[flag]) if flag == "no_plugin" else []
                tree.assign(names[flag], [*more, *value] if more else value, name)
        for text in sets:
            _apply_set(tree, text)
        _correct_stale_rollouts(tree)
        return tree

    tree = build({})
    data = None if tree.value("data.sources") else tree.value("data.path")
    recipe = dict(_recipe(model=tree.value("model"), data=data))
    if tree.value("eval.sources"):  # the recipe's evaluation is about its own data
        recipe.pop("eval", None)
    return _validate(build(recipe) if recipe else tree)


def dump_yaml(config: RunConfig, origins: Mapping[str, str] | None = None) -> str:
    """Write a complete configuration that `rlx train -c` reads back to the same one.

    Args:
        origins: when given, each value carries its origin as a comment (`--dry-run`).
    """
    tree = config.model_dump(mode="json")
    if origins is None:
        return dump_tree(tree)
    return dump_tree(tree, {key: nearest_origin(origins, key) for key in _leaves(tree, "")})


def nearest_origin(origins: Mapping[str, str], key: str) -> str:
    """Origin of `key`; of a section: its first value that is not a default."""
    below = [value for name, value in origins.items() if name.startswith(f"{key}.")]
    while key and key not in origins:
        key = key.rpartition(".")[0]
    if key:
        return origins[key]
    return next((value for value in below if value != DEFAULT), DEFAULT)


def _leaves(tree: Any, key: str) -> Iterable[str]:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        items = enumerate(tree)
    empty = True
    for word, value in items:
        empty = False
        yield from _leaves(value, f"{key}.{word}" if key else str(word))
    if empty:
        yield key


def _read_file(path: Path) -> tuple[Mapping[str, Any], Callable[[str], str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(
            f"the configuration file {path} can't be read: {reason}",
            where=f"-c {path}",
            fix="`rlx train --dry-run > run.yaml` writes one to start from",
        ) from None
    value, lines = parse_file(text, str(path))
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{path} holds {type(value).__name__}, not a mapping of settings",
            where=f"-c {path}",
            fix="write keys and values, for example `steps: 100`",
        )

    def origin(key: str) -> str:
        parts = tuple(key.split("."))
        if parts not in lines:  # `eps` beside `name` is short for `params.eps`
            parts = tuple(word for word in parts if word != "params")
        while parts and parts not in lines:
            parts = parts[:-1]
        return f"{path}:{lines[parts]}" if parts else str(path)

    return value, origin


def _apply_environment(tree: Tree, env: Mapping[str, str]) -> None:
    """`RLX_LEARNER__LR=1e-4`. A variable without `__` that names no setting belongs to others
    (`RLX_PLUGINS`), unless it looks like a misspelt one."""
    roots = RunConfig.model_fields
    for name, text in sorted(env.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        if "." in key:
            tree.assign_text(key, text, name)
        elif name in ("RLX_PLUGINS", "RLX_STRICT_PLUGINS"):
            continue
        elif key in roots:
            tree.assign_text(key, text, name)
        elif near := difflib.get_close_matches(key, roots, n=1, cutoff=0.75):
            text = f"no such setting; did you mean '{ENV_PREFIX}{near[0].upper()}'?"
            tree.problems.append(Problem(key=name, origin="environment", text=text))


def _apply_set(tree: Tree, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(
            f"--set needs key=value, got {text!r}",
            where=f"--set {text}",
            fix="for example `--set learner.lr=1e-5`",
        )
    tree.assign_text(key.strip(), value, f"--set {key.strip()}")


def _correct_stale_rollouts(tree: Tree) -> None:
    """The default that depends on another setting, as `RunConfig` has it, with its origin."""
    key = "rollout.max_staleness"
    if tree.value(key) and nearest_origin(tree.origins, "correction.name") == DEFAULT:
        tree.assign("correction", stale_correction(), f"default with {key}")


def _recipe(*, model: Any, data: Any) -> Mapping[str, Any]:
    """The part of the embedded recipe that fits: its task's settings with the embedded task, its
    model's settings with the embedded model."""
    text = (package_files("rlx.embedded") / "recipe.yaml").read_text(encoding="utf-8")
    whole, _ = parse_file(text, "rlx/embedded/recipe.yaml")
    return {
        key: value
        for key, value in whole.items()
        if (data if key in _TASK_SECTIONS else model) == "embedded"
    }


def _validate(tree: Tree) -> Settings:
    config = None
    problems = list(tree.problems)
    try:
        config = RunConfig.model_validate(tree.values)
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for item in error.errors():
            key, field = key_of_location(item["loc"])
            if key not in found:
                text = allowed_values(field, tree.value(key), item["msg"])
                origin = nearest_origin(tree.origins, key)
                found[key] = Problem(key=key, origin=origin, text=text)
        problems += found.values()
    if config is None or problems:
        raise _usage_error(problems)
    origins = {
        key: nearest_origin(tree.origins, key)
        for key in _leaves(config.model_dump(mode="json"), "")
    }
    return Settings(config=config, origins=origins)


def _usage_error(problems: Sequence[Problem]) -> UsageError:
    if len(problems) == 1:
        only = problems[0]
        return UsageError(f"{only.key}: {only.text}", where=only.origin, fix=only.fix)
    lines = [f"  {item.key} ({item.origin}): {item.text}" for item in problems]
    return UsageError(
        "\n".join([f"{len(problems)} settings are wrong", *lines]),
        fix="`rlx train --dry-run` prints every setting with its value",
    )


__all__ = [
    "FLAGS",
    "Settings",
    "dump_yaml",
    "known_keys",
    "load_settings",
    "nearest_origin",
]
