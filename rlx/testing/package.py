"""`check_plugin`: runs the kit on everything that an installed distribution offers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

from packaging.utils import canonicalize_name

from rlx.core.component import singular, tags_of
from rlx.core.discovery import COMMAND_GROUP
from rlx.core.errors import RlxError, UsageError, did_you_mean
from rlx.core.parameters import parameter_fields, parameters_model
from rlx.core.plugins import PluginSystem
from rlx.core.registry import Entry, Provider
from rlx.testing.agents import check_agent
from rlx.testing.components import bind, check_parameters
from rlx.testing.corrections import check_correction
from rlx.testing.estimators import check_estimator
from rlx.testing.losses import check_loss
from rlx.testing.objectives import check_objective
from rlx.testing.rewards import check_reward
from rlx.testing.samplers import check_sampler
from rlx.testing.trackers import check_tracker
from rlx.testing.violations import Checker, ConformanceError, Violation

CHECKS: dict[str, Callable[..., None]] = {
    "estimators": check_estimator,
    "losses": check_loss,
    "corrections": check_correction,
    "rewards": check_reward,
    "agents": check_agent,
    "samplers": check_sampler,
    "objectives": check_objective,
    "trackers": check_tracker,
}
EXAMPLE_TAG = "example"
"""`@rlx.component(example={"pattern": "x"})`: values for parameters that have no default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of checking one component, of loading one hook plugin or one command."""

    kind: str
    name: str
    violations: list[Violation] = field(default_factory=list)
    note: str = ""
    checked: bool = True
    """False where it takes more than the distribution to check it; the note says what."""

    @property
    def title(self) -> str:
        """`loss x`, `hook plugin x`, or `command x`."""
        words = {"hooks": "hook plugin", "commands": "command"}
        return f"{words.get(self.kind) or singular(self.kind)} {self.name}"


def check_plugin(distribution: str) -> None:
    """Check everything that a distribution offers; raises `ConformanceError` with all violations.

    Args:
        distribution: name of an installed distribution, `rlx` for the built-ins.

    Raises:
        UsageError: no such distribution, or it offers nothing.
    """
    violations = [
        Violation(
            rule=f"{report.title}: {violation.rule}",
            detail=violation.detail,
            example=violation.example,
        )
        for report in component_reports(distribution)
        for violation in report.violations
    ]
    if violations:
        raise ConformanceError(f"plugin {distribution}", violations)


def component_reports(distribution: str) -> Iterator[Report]:
    """Check one component after the other; yields each report when it is ready."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        system = PluginSystem.load(rlxfile=False)
    name = canonicalize_name(distribution)
    entries = [
        entry
        for entry in system.registry.entries()
        if canonicalize_name(entry.provider.distribution) == name
    ]
    whole = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    problems = [str(item.message) for item in warned if whole.search(str(item.message))]
    hooks = [plugin for plugin in system.hook.plugins() if plugin.partition(":")[0] == name]
    commands = [
        (item.provider, point)
        for item in system.distributions
        if item.provider.distribution == name
        for point in item.in_group(COMMAND_GROUP)
    ]
    if not entries and not hooks and not problems and not commands:
        raise _nothing(distribution, system)
    if hooks or problems:
        found = [Violation(rule="loads without a warning", detail=text) for text in problems]
        yield Report(kind="hooks", name=", ".join(hooks) or distribution, violations=found)
    for entry in entries:
        yield _report(system, entry)
    for provider, point in commands:
        yield _command_report(provider, point)


def _command_report(provider: Provider, point: EntryPoint) -> Report:
    from rlx.cli.main import COMMANDS, load_command

    if point.name in COMMANDS:
        detail = f"rlx has a command {point.name!r}, which no plugin takes over"
        found = Violation(rule="has a name of its own", detail=detail)
        return Report(kind="commands", name=point.name, violations=[found])
    try:
        load_command(point.name, provider, point)
    except UsageError as error:
        found = Violation(rule="can be called", detail=str(error))
        return Report(kind="commands", name=point.name, violations=[found])
    return Report(kind="commands", name=point.name)


def _report(system: PluginSystem, entry: Entry) -> Report:
    selected = f"{entry.provider.distribution}/{entry.name}"
    try:
        obj = system.locate(entry.kind, selected).load()
        params = tags_of(obj).extra.get(EXAMPLE_TAG, {})
        missing = _missing(obj, params)
        if missing:
            call = f"check_{singular(entry.kind)}({entry.name!r}, {missing[0]}=…)"
            return Report(
                kind=entry.kind,
                name=entry.name,
                checked=False,
                note=f"not checked: {', '.join(missing)} must be set; use rlx.testing.{call} or "
                f"tag it @rlx.component({EXAMPLE_TAG}={{{missing[0]!r}: …}})",
            )
        check = CHECKS.get(entry.kind)
        if check is None:
            checker = Checker(entry.name)
            check_parameters(checker, bind(entry.kind, selected, params))
            checker.finish()
            return Report(kind=entry.kind, name=entry.name, note="import and parameters only")
        check(selected, **params)
    except ConformanceError as error:
        return Report(kind=entry.kind, name=entry.name, violations=error.violations)
    except RlxError as error:
        found = Violation(rule="can be selected", detail=str(error))
        return Report(kind=entry.kind, name=entry.name, violations=[found])
    return Report(kind=entry.kind, name=entry.name)


def _missing(obj: Any, given: dict[str, Any]) -> list[str]:
    fields = parameter_fields(parameters_model(obj))
    return [name for name, field in fields.items() if field.is_required() and name not in given]


def _nothing(distribution: str, system: PluginSystem) -> UsageError:
    known = {entry.provider.distribution for entry in system.registry.entries()}
    known |= {item.provider.distribution for item in system.distributions}
    return UsageError(
        f"no installed distribution {distribution!r} offers components, hooks or commands",
        fix=did_you_mean(distribution, known) or f"one of: {', '.join(sorted(known))}",
    )
