"""Calls hook implementations one by one, each under its hook's failure policy."""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pluggy

from rlx.core import hookspecs
from rlx.core.calls import Call
from rlx.core.detached import detached
from rlx.core.errors import RAISED_BY, ComponentError, UsageError, did_you_mean
from rlx.core.hookspecs import HOOKS, PROJECT, HookInfo

logger = logging.getLogger("rlx.plugins")


class Hooks:
    """The registered hook plugins.

    pluggy keeps the books; rlx makes the calls itself, because pluggy stops at the first
    implementation that raises.
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._off: set[tuple[str, str]] = set()

    def register(self, plugin: object, name: str) -> list[str]:
        """Register a plugin's implementations and return what is odd about them.

        Raises `pluggy.PluginValidationError` for arguments that the hook doesn't have.
        """
        if inspect.isclass(plugin):
            raise UsageError(
                f"{name} is a class",
                fix="point the entry point at a module or at an instance",
            )
        if (other := self._manager.get_name(plugin)) is not None:
            raise UsageError(f"{other} registers the same {type(plugin).__name__} already")
        self._manager.register(plugin, name=name)
        return [*self._odd_implementations(plugin), *_unmarked(plugin)]

    def unregister(self, name: str) -> None:
        """Forget a plugin; unknown names are ignored."""
        if self._manager.has_plugin(name):
            self._manager.unregister(name=name)

    def plugins(self) -> list[str]:
        """Return the names of the registered plugins, in the order of registration."""
        return [name for name, plugin in self._manager.list_name_plugin() if plugin is not None]

    def implemented(self, name: str) -> list[str]:
        """Return the hooks that a plugin implements."""
        plugin = self._manager.get_plugin(name)
        callers = self._manager.get_hookcallers(plugin) or []
        return sorted(caller.name for caller in callers if caller.has_spec())

    def source_hash(self, name: str) -> str | None:
        """Return the sha256 of the file that a plugin is defined in; None when there is none."""
        plugin = self._manager.get_plugin(name)
        module = plugin if inspect.ismodule(plugin) else sys.modules.get(type(plugin).__module__)
        file = Path(getattr(module, "__file__", None) or "")
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None

    def notify(self, hook: str, /, **arguments: Any) -> None:
        """Call every implementation of an observer; one that raises is off for the run."""
        for _ in self._observe(hook, arguments):
            pass

    def collect(self, hook: str, /, **arguments: Any) -> list[tuple[str, Any]]:
        """Call an observer and return (plugin, answer) of those that answered something."""
        return [(name, answer) for name, answer in self._observe(hook, arguments)]

    def step_metrics(self, **arguments: Any) -> dict[str, float]:
        """Return the answers to `rlx_step_metrics`, named `<plugin>/<key>`."""

        def numbers(answer: Any) -> dict[str, float]:
            return {str(key): float(value) for key, value in dict(answer).items()}

        metrics: dict[str, float] = {}
        for plugin, answer in self._observe("rlx_step_metrics", arguments, numbers):
            prefix = plugin.partition(":")[0]
            metrics |= {f"{prefix}/{key}": value for key, value in answer.items()}
        return metrics

    def control(self, hook: str, /, **arguments: Any) -> None:
        """Call every implementation; an exception ends the run."""
        for implementation in self._implementations(hook):
            self._call(implementation, hook, arguments)

    def first(self, hook: str, /, **arguments: Any) -> Any:
        """Return the first answer that is not None; an exception ends the run."""
        for implementation in self._implementations(hook):
            answer = self._call(implementation, hook, arguments)
            if answer is not None:
                return answer
        return None

    def stop_reason(self, **arguments: Any) -> str | None:
        """Return why `rlx_should_stop` ends the run; None to go on. An answer that is no text
        counts as what it means: False as None, True as a wish without a reason."""
        hook = "rlx_should_stop"
        for implementation in self._implementations(hook):
            answer = self._call(implementation, hook, arguments)
            if answer is not None and answer is not False:
                told = isinstance(answer, str) and answer.strip()
                return str(answer) if told else f"as plugin {implementation.plugin_name} asked"
        return None

    def switch_on(self) -> None:
        """Give observers that were switched off another chance: a new run begins."""
        self._off.clear()

    def each(self, hook: str) -> Iterator[tuple[str, Any]]:
        """Yield (plugin, function taking the hook's arguments by name) for the caller to run."""
        for implementation in self._implementations(hook):
            yield implementation.plugin_name, _by_name(implementation)

    def _observe(
        self,
        hook: str,
        arguments: Mapping[str, Any],
        convert: Callable[[Any], Any] = lambda answer: answer,
    ) -> Iterator[tuple[str, Any]]:
        for implementation in self._implementations(hook):
            key = (implementation.plugin_name, hook)
            if key in self._off:
                continue
            try:
                with Call(f"hook {hook} of plugin {implementation.plugin_name}", observer=True):
                    answer = _by_name(implementation)(**arguments)
                    answer = None if answer is None else convert(answer)
            except (Exception, SystemExit):  # whoever only looks on can't end the run
                self._off.add(key)
                logger.exception(
                    "%s of plugin %s raised; it is switched off for the rest of the run", *key[::-1]
                )
            else:
                if answer is not None:
                    yield implementation.plugin_name, answer

    def _call(
        self, implementation: pluggy.HookImpl, hook: str, arguments: Mapping[str, Any]
    ) -> Any:
        who = f"{hook} of plugin {implementation.plugin_name}"
        try:
            with Call(f"hook {who}"):
                return _by_name(implementation)(**arguments)
        except SystemExit as error:  # would end the command as if all were well
            raise ComponentError(f"{who} left with SystemExit({error.code!r})") from error
        except Exception as error:
            error.add_note(f"{RAISED_BY} {who}")
            raise

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        """Return implementations in the order of the calls: tryfirst, then last registered."""
        if hook not in HOOKS:
            raise ValueError(f"there is no hook {hook!r}; {did_you_mean(hook, HOOKS)}")
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        found = [each for each in caller.get_hookimpls() if not _wraps(each)]
        return found[::-1]

    def _odd_implementations(self, plugin: object) -> Iterator[str]:
        for caller in self._manager.get_hookcallers(plugin) or []:
            for each in caller.get_hookimpls():
                if each.plugin is not plugin:
                    continue
                if not caller.has_spec():
                    if not each.optionalhook:
                        hint = did_you_mean(caller.name, HOOKS)
                        yield f"there is no hook {caller.name!r}; {hint}".rstrip("; ")
                elif each.kwargnames:
                    names = ", ".join(each.kwargnames)
                    yield (
                        f"{caller.name}: a parameter with a default is never filled ({names}); "
                        "remove the default"
                    )
                elif _wraps(each):
                    yield f"{caller.name}: hook wrappers are not called; use a plain @rlx.hookimpl"
                elif inspect.iscoroutinefunction(each.function) or inspect.isgeneratorfunction(
                    each.function
                ):
                    yield f"{caller.name}: hooks are plain functions, nobody awaits or iterates it"


def info(hook: str) -> HookInfo:
    """Return how a hook is called."""
    return HOOKS[hook]


def _wraps(implementation: pluggy.HookImpl) -> bool:
    return implementation.hookwrapper or implementation.wrapper


def _by_name(implementation: pluggy.HookImpl) -> Any:
    """Return a call that passes on those of the hook's arguments that the implementation takes."""

    def call(**arguments: Any) -> Any:
        given = [arguments[name] for name in implementation.argnames]
        # Copies of its own: what one implementation does to them, nobody else sees.
        own = [detached(value) for value in given]
        answer = implementation.function(*own)
        for name, value, copy in zip(implementation.argnames, given, own, strict=True):
            if name == "config" and copy != value:
                logger.warning(
                    "%s of plugin %s changed the configuration, which has no effect: hooks check "
                    "it, and raise rlx.UsageError to say what to set",
                    implementation.function.__name__,
                    implementation.plugin_name,
                )
        return answer

    return call


def _unmarked(plugin: object) -> Iterator[str]:
    """A forgotten decorator would otherwise show in nothing happening."""
    for name in HOOKS:
        function = getattr(plugin, name, None)
        if inspect.isroutine(function) and not hasattr(function, f"{PROJECT}_impl"):
            yield f"{name} has no @rlx.hookimpl, it is never called"
