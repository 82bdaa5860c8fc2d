"""The plugin system: both doors into the registry, and the way from a reference to a component."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rlx.core.api import API_VERSION, version_warning
from rlx.core.component import KINDS, Bound, kind_of, singular
from rlx.core.discovery import (
    ALLOW_VARIABLE,
    HOOK_GROUP,
    STRICT_VARIABLE,
    PluginDistribution,
    Selection,
    check_required,
    own_version,
    scan,
)
from rlx.core.errors import UsageError
from rlx.core.hooks import Hooks
from rlx.core.importing import extend_path, import_file, imported, plugin_traceback
from rlx.core.references import ComponentRef
from rlx.core.registry import BUILTIN, Entry, Provider, Registrar, Registry
from rlx.core.resolver import checked, describe, file_without_attribute, make_ref, object_name
from rlx.core.worker_hooks import HOOK as WORKER_HOOK
from rlx.core.worker_hooks import HookRef

RLXFILE: Final = "rlxfile.py"
_SLOW: Final = 2.0
"""Seconds of loading a hook plugin that its user is told about: every command pays them."""
_systems: dict[tuple[Any, ...], PluginSystem] = {}


class PluginWarning(UserWarning):
    """Something about a plugin that its user should know, and that does not stop the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenPlugin:
    """A hook plugin that failed while it was loaded."""

    provider: Provider
    entry_point: str
    target: str
    error: str


class PluginSystem:
    """What is installed and switched on. Made by `load`; lives in one process, never pickled."""

    def __init__(self, *, search_path: Iterable[str | Path] = ()) -> None:
        self.registry = Registry()
        self.hook = Hooks()
        self.search_path = tuple(str(Path(folder).resolve()) for folder in search_path)
        self.builtin = Provider(distribution=BUILTIN, version=own_version(), builtin=True)
        self.distributions: list[PluginDistribution] = []
        self.broken: list[BrokenPlugin] = []
        self.problems: list[str] = []
        """Every warning that was given while loading."""
        self.rlxfile: Path | None = None
        """The project's own hook plugin, when there is one and it is switched on."""
        self._hook_targets: dict[str, tuple[str, Provider]] = {}
        self.notices: list[str] = []
        """What the CLI tells once: a project's own rlxfile is in use, for example."""

    @classmethod
    def load(
        cls,
        disable: Collection[str] = (),
        required: Collection[str] = (),
        search_path: Iterable[str | Path] | None = None,
        *,
        hooks: bool = True,
        rlxfile: bool = True,
    ) -> PluginSystem:
        """Read the metadata of what is installed and import the hook plugins.

        Args:
            disable: distributions or entry-point names that stay off.
            required: requirement specifiers that must be installed; raises `UsageError`.
            search_path: folders for `pkg.mod:attr` beside `sys.path`; the working directory.
            hooks: import hook plugins; off for listings and completion, which import nothing.
            rlxfile: use the `rlxfile.py` of the first search folder.
        """
        check_required(required)
        system = cls(search_path=[Path.cwd()] if search_path is None else search_path)
        selection = Selection(disable)
        found = scan()
        extend_path(system.search_path)
        for warning in selection.unused(found):
            system._warn(warning)
        system._register_builtins()
        for distribution in found:
            for problem in distribution.problems:
                if selection.admits(distribution.provider.distribution):
                    system._warn(f"{distribution.provider}: {problem}")
            system._take(distribution, selection, hooks=hooks)
        if rlxfile and selection.admits("rlxfile"):
            paths = [Path(folder) / RLXFILE for folder in system.search_path[:1]]
            system.rlxfile = next((path for path in paths if path.is_file()), None)
        if hooks:
            system._take_rlxfile()
        return system

    def names(self, kind: str) -> list[str]:
        """Return the names that can be selected, built-in ones first."""
        return self.registry.names(kind)

    def ref(
        self,
        kind: str,
        name: Any,
        params: Mapping[str, Any] | None = None,
        *,
        where: str | None = None,
    ) -> ComponentRef:
        """Resolve a reference (or an object) and check its parameters; imports what is selected.

        Raises `UsageError`: unknown or ambiguous name, failed import (with the full traceback),
        unknown parameter or wrong type.
        """
        ref = self.locate(kind, name, where=where)
        return checked(ref, {**ref.params, **(params or {})}, where)

    def locate(self, kind: str, name: Any, *, where: str | None = None) -> ComponentRef:
        """Return `ref(…)` without a look at the parameters, which may be missing."""
        kind = kind_of(kind)
        if isinstance(name, ComponentRef):
            return name
        if not isinstance(name, str):
            return self._make(kind, object_name(name), name, where, None)
        entry = None if ":" in name else self.registry.find(kind, name, where=where)
        if entry is not None:
            return self._make(kind, name, entry.target, where, entry.provider)
        answer = self.hook.first("rlx_resolve", kind=kind, ref=name)
        if isinstance(answer, ComponentRef):
            return answer
        if answer is not None:
            raise UsageError(
                f"rlx_resolve answered a {type(answer).__name__} for {name!r}",
                where=where,
                fix="it returns a ComponentRef or None",
            )
        if ":" in name:
            try:
                return self._make(kind, name, name, where, None)
            except UsageError as error:
                raise self._meant_by_name(kind, name, error) from error.__cause__
        if name.endswith(".py"):
            raise file_without_attribute(kind, name, where)
        raise self.registry.unknown(kind, name, where=where)

    def resolve(
        self,
        kind: str,
        name: Any,
        params: Mapping[str, Any] | None = None,
        *,
        where: str | None = None,
    ) -> Bound:
        """Return `ref(…).resolve()`."""
        return self.ref(kind, name, params, where=where).resolve()

    def notify(self, hook: str, /, **arguments: Any) -> None:
        """Call an observer hook; an implementation that raises is off for the rest of the run."""
        if hook == "rlx_on_run_start":
            self.hook.switch_on()
        self.hook.notify(hook, **arguments)

    def control(self, hook: str, /, **arguments: Any) -> None:
        """Call a control hook; exceptions propagate."""
        self.hook.control(hook, **arguments)

    def first(self, hook: str, /, **arguments: Any) -> Any:
        """Return the first answer of a hook that is not None; exceptions propagate."""
        return self.hook.first(hook, **arguments)

    def stop_reason(self, **arguments: Any) -> str | None:
        """Return the answer to `rlx_should_stop(run, step, metrics)`; exceptions propagate."""
        return self.hook.stop_reason(**arguments)

    def collect(self, hook: str, /, **arguments: Any) -> list[tuple[str, Any]]:
        """Return (plugin, answer) of an observer hook's implementations that answered."""
        return self.hook.collect(hook, **arguments)

    def step_metrics(self, **arguments: Any) -> dict[str, float]:
        """Return the metrics of `rlx_step_metrics(run, step, batch)`, named `<plugin>/<key>`."""
        return self.hook.step_metrics(**arguments)

    def worker_hooks(self) -> tuple[HookRef, ...]:
        """Return references to the plugins that want to be called in workers."""
        return tuple(
            HookRef(
                plugin=label,
                target=target,
                source_hash=self.hook.source_hash(label),
                search_path=self.search_path,
                distribution=provider.distribution,
            )
            for label, (target, provider) in self._hook_targets.items()
            if WORKER_HOOK in self.hook.implemented(label)
        )

    def manifest(self, refs: Iterable[ComponentRef] = ()) -> dict[str, Any]:
        """Return the provenance of plugins and of the selected components, JSON-like."""
        return {
            "api_version": API_VERSION,
            "distributions": {
                item.provider.distribution: item.provider.version for item in self.distributions
            },
            "hooks": {name: self.hook.implemented(name) for name in self.hook.plugins()},
            "hook_sources": {name: self.hook.source_hash(name) for name in self.hook.plugins()},
            "broken": [
                {
                    "distribution": item.provider.distribution,
                    "version": item.provider.version,
                    "entry_point": item.entry_point,
                    "error": item.error.splitlines()[-1] if item.error else "",
                }
                for item in self.broken
            ],
            "components": [ref.describe() for ref in refs],
        }

    def _meant_by_name(self, kind: str, text: str, error: UsageError) -> UsageError:
        """The error about `math:x`, where `math` is a name: that may have been meant."""
        name = text.partition(":")[0]
        if name not in self.registry.names(kind):
            return error
        weight = f", with a weight {name}:0.5" if kind == "rewards" else ""
        fix = f"the {singular(kind)} of the name {name!r} is selected by {name}{weight}"
        return UsageError(error.what, where=error.where, fix=fix)

    def _make(
        self,
        kind: str,
        name: str,
        source: Any,
        where: str | None,
        provider: Provider | None,
    ) -> ComponentRef:
        place = source.rpartition(":")[0] if isinstance(source, str) else ""
        ref = make_ref(
            kind,
            name,
            source,
            where=where,
            provider=provider or self._owner(place),
            search_path=self.search_path,
        )
        self._check_version(ref.load(), describe(kind, name, provider))
        return ref

    def _check_version(self, obj: Any, label: str) -> None:
        warning = version_warning(obj, label)
        if warning and warning not in self.problems:
            self._warn(warning)

    def _register_builtins(self) -> None:
        import rlx.plugins

        self.hook.register(rlx.plugins, BUILTIN)
        self._collect(BUILTIN, self.builtin)

    def _take(self, distribution: PluginDistribution, selection: Selection, *, hooks: bool) -> None:
        provider = distribution.provider
        admitted = []
        for point in distribution.entry_points:
            refusal = selection.refusal(provider.distribution, point.name)
            if refusal is None:
                admitted.append(point)
            else:
                kind = point.group.removeprefix("rlx.")
                self.registry.leave_out(kind, point.name, provider, refusal)
        if not admitted:
            return
        self.distributions.append(replace(distribution, entry_points=tuple(admitted)))
        for point in admitted:
            kind = point.group.removeprefix("rlx.")
            if kind in KINDS:
                self._take_component(kind, point.name, point.value, provider)
            elif point.group == HOOK_GROUP and hooks:
                self._take_hooks(point.name, point.value, provider, point.load)

    def _take_component(self, kind: str, name: str, value: str, provider: Provider) -> None:
        target = value.partition("[")[0].replace(" ", "")
        if not all(target.partition(":")[::2]):
            self._warn(f"{provider}: the {singular(kind)} {name!r} has no target module:attr")
            return
        try:
            self.registry.add(
                Entry(kind=kind, name=name, target=target, provider=provider, door="entry point")
            )
        except UsageError as error:
            self._warn(str(error))

    def _take_rlxfile(self) -> None:
        path = self.rlxfile
        if path is not None:
            provider = Provider(distribution="rlxfile")
            self._take_hooks("rlxfile", str(path), provider, lambda: import_file(path))
            if "rlxfile" in self.hook.plugins():  # not broken
                self.notices.append(f"using the hooks of {path} (switch off with --no-rlxfile)")

    def _take_hooks(self, name: str, target: str, provider: Provider, load: Any) -> None:
        """Import a hook plugin and let it register; a failure is a warning, the rest goes on."""
        own = provider.distribution
        label = own if name == own else f"{own}:{name}"
        started = time.perf_counter()
        try:
            with imported():
                plugin = load()
            self._check_version(plugin, f"hook plugin {name!r} of {provider}")
            for oddity in self.hook.register(plugin, label):
                self._warn(f"hook plugin {name!r} of {provider}: {oddity}")
            self._collect(label, provider)
            place, _, attribute = target.partition("[")[0].replace(" ", "").partition(":")
            self._hook_targets[label] = (f"{place}:{attribute}", provider)
            seconds = time.perf_counter() - started
            if seconds > _SLOW:
                self.notices.append(
                    f"hook plugin {name!r} of {provider} took {seconds:.1f} s to load "
                    f"(switch off with --no-plugin {own})"
                )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module may raise anything while it is imported
            self.hook.unregister(label)
            self.registry.forget_hooks(provider)
            text = plugin_traceback(error)
            if os.environ.get(STRICT_VARIABLE, "") not in ("", "0"):
                raise UsageError(
                    f"hook plugin {name!r} of {provider} failed to load:\n\n{text}",
                    where=f"{STRICT_VARIABLE}=1",
                    fix=f"repair it, or switch it off with --no-plugin {own}",
                ) from error
            self.broken.append(
                BrokenPlugin(provider=provider, entry_point=name, target=target, error=text)
            )
            self._warn(
                f"hook plugin {name!r} ({target}) of {provider} failed to load and is not used: "
                f"{_one_line(error)}; switch it off with --no-plugin {own}, or see "
                f"the traceback with {STRICT_VARIABLE}=1"
            )

    def _collect(self, plugin: str, provider: Provider) -> None:
        for kind in KINDS:
            for name, function in self.hook.each(f"rlx_register_{kind}"):
                if name == plugin:
                    function(registry=Registrar(self.registry, kind, provider))

    def _warn(self, message: str) -> None:
        self.problems.append(message)
        warnings.warn(message, PluginWarning, stacklevel=4)

    def _owner(self, module_name: str) -> Provider | None:
        """Return who provides a module that was named directly, as far as metadata tells."""
        top = module_name.partition(".")[0]
        if top == BUILTIN:
            return self.builtin
        for item in self.distributions:
            if any(point.value.startswith((f"{top}.", f"{top}:")) for point in item.entry_points):
                return item.provider
        return None


def _one_line(error: BaseException) -> str:
    told = [error.what, error.fix] if isinstance(error, UsageError) else None
    parts = told or [f"{type(error).__name__}: {error}"]
    return " ".join("; ".join(filter(None, parts)).split())


def resolve(kind: str, name: Any, /, **params: Any) -> Bound:
    """Return a component ready to be called, in any process.

    >>> resolve("estimators", "zscore", eps=1e-9)  # doctest: +SKIP
    <estimator zscore(eps=1e-09)>
    """
    return default_system().resolve(kind, name, params)


def default_system() -> PluginSystem:
    """Return this process's plugin system for Python users; made once per folder and `sys.path`."""
    key = (os.environ.get(ALLOW_VARIABLE), str(Path.cwd()), tuple(sys.path))
    if key not in _systems:
        system = PluginSystem.load()
        _systems.clear()
        # loading extends sys.path: the next call must find the system under the new one
        key = (*key[:2], tuple(sys.path))
        _systems[key] = system
    return _systems[key]
