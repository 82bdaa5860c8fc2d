"""The components that a run selected, as references, and what they ask of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx.core.component import Tags, singular, tags_of
from rlx.core.config import ComponentConfig, RunConfig
from rlx.core.errors import UsageError
from rlx.core.settings import nearest_origin

if TYPE_CHECKING:
    from rlx.core.plugins import PluginSystem
    from rlx.core.references import ComponentRef

DEFAULT_AGGREGATION = "token-mean"
_CONSTRUCTED = ("estimators", "losses", "corrections", "agents", "samplers")
"""Kinds that are constructed here, so that they can refuse their parameters, and require what
depends on these. A reward may load a model, and a tracker open a file: those wait for the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """References to all selected components; picklable."""

    estimator: ComponentRef
    loss: ComponentRef
    correction: ComponentRef
    agent: ComponentRef
    sampler: ComponentRef
    rewards: tuple[tuple[ComponentRef, float], ...]
    """Each reward with its weight."""
    trackers: tuple[ComponentRef, ...]
    requires: frozenset[str]
    """Passes that the engine must run: the union over the components, and what KL needs."""
    required_by: Mapping[str, tuple[str, ...]]
    """Requirement → who asks for it, for messages: `{"groups": ("estimator 'zscore'",)}`."""
    aggregation: str
    """The configured reduction, else the loss's, else the estimator's, else `token-mean`."""
    needs_label: str | None
    """Name of the first reward that can't work without labels."""
    loads: tuple[tuple[str, str], ...] = ()
    """Models that rewards load: the setting that names one, and its folder or hub name."""

    @property
    def components(self) -> tuple[ComponentRef, ...]:
        """All references, in the order of the configuration."""
        single = (self.estimator, self.loss, self.correction, self.agent, self.sampler)
        return (*single, *(ref for ref, _ in self.rewards), *self.trackers)

    def manifest(self) -> list[dict[str, Any]]:
        """Provenance of every component, for `manifest.json`."""
        return [ref.describe() for ref in self.components]

    def shipped_modules(self) -> list[str]:
        """Files and packages that only the driver has, for Ray's `py_modules`."""
        from rlx.core.references import shipped_modules

        return [str(path) for path in shipped_modules(self.components)]


def select(
    config: RunConfig, plugins: PluginSystem, *, origins: Mapping[str, str] | None = None
) -> Selection:
    """Resolve every name of the configuration, importing the selected components.

    Args:
        origins: where each setting came from, for messages.

    Raises:
        UsageError: an unknown name, a wrong parameter, a component that can't be imported.
    """
    required_by: dict[str, list[str]] = {}

    def resolve(kind: str, key: str, chosen: ComponentConfig) -> tuple[ComponentRef, Tags]:
        try:
            ref = plugins.ref(kind, chosen.name, chosen.params, where=key)
            check_plain(ref, key)
            if kind in _CONSTRUCTED:
                bound = ref.resolve()
                tags, requires = bound.tags, bound.requires
            else:
                tags = tags_of(ref.load())
                requires = tags.requires
        except UsageError as error:
            raise located(error, key, origins or {}) from error.__cause__
        for requirement in sorted(requires):
            required_by.setdefault(requirement, []).append(f"{singular(kind)} {chosen.name!r}")
        return ref, tags

    estimator, estimator_tags = resolve("estimators", "estimator", config.estimator)
    loss, loss_tags = resolve("losses", "loss", config.loss)
    correction, _ = resolve("corrections", "correction", config.correction)
    agent, _ = resolve("agents", "agent", config.agent)
    sampler, _ = resolve("samplers", "sampler", config.sampler)
    rewards = [
        (resolve("rewards", f"rewards.{index}", chosen), chosen.weight)
        for index, chosen in enumerate(config.rewards)
    ]
    trackers = [
        resolve("trackers", f"trackers.{index}", chosen)[0]
        for index, chosen in enumerate(config.trackers)
    ]
    if config.kl.coef > 0:
        required_by.setdefault("ref_logprobs", []).append("kl.coef")
    configured = config.algorithm.aggregation
    named = loss_tags.aggregation or estimator_tags.aggregation
    return Selection(
        estimator=estimator,
        loss=loss,
        correction=correction,
        agent=agent,
        sampler=sampler,
        rewards=tuple((ref, weight) for (ref, _), weight in rewards),
        trackers=tuple(trackers),
        requires=frozenset(required_by),
        required_by={key: tuple(names) for key, names in required_by.items()},
        aggregation=configured if configured != "auto" else named or DEFAULT_AGGREGATION,
        needs_label=next((ref.name for (ref, tags), _ in rewards if tags.needs_label), None),
        loads=tuple(
            found
            for index, ((ref, tags), _) in enumerate(rewards)
            for found in loaded_models(ref, tags, f"rewards.{index}")
        ),
    )


def loaded_models(ref: ComponentRef, tags: Tags, key: str) -> Iterator[tuple[str, str]]:
    """The models that a component loads: the setting below `key` that names one, and its name."""
    for name in tags.loads:
        value = ref.params.get(name)
        for model in [value] if isinstance(value, str) else value or ():
            yield f"{key}.params.{name}", model


def located(error: UsageError, key: str, origins: Mapping[str, str]) -> UsageError:
    """The error with the setting's origin: `estimator.epz (--set estimator.epz)`."""
    where = error.where or key
    if not origins or (where != key and not where.startswith(f"{key}.")):
        return error
    below = where.removeprefix(key).removeprefix(".")
    origin = nearest_origin(origins, f"{key}.params.{below}" if below else f"{key}.name")
    return UsageError(error.what, where=f"{where} ({origin})", fix=error.fix)


def check_plain(ref: ComponentRef, key: str) -> None:
    """Refuse parameters that the run's config.yaml can't hold, such as functions."""
    for name, value in ref.params.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            label = f"{singular(ref.kind)} {ref.name!r}"
            raise UsageError(
                f"{label}: parameter {name!r} is a {type(value).__name__}, which config.yaml can't "
                "hold",
                where=f"{key}.{name}",
                fix="give numbers, texts, lists or dicts, or a component with the object inside",
            ) from error
