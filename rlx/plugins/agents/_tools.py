"""Python functions as tools: their JSON schema, checked arguments, results and errors as text.

A tool is a function, or a class of which every episode gets an object of its own: its public
methods are then the tools. Parameters annotated `Task` or `Episode` are filled in and not shown to
the model.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docstring_parser
import pydantic
from pydantic import ConfigDict, Field

from rlx.core.agents import Episode
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.importing import import_target
from rlx.core.parameters import parameter_docs
from rlx.core.rollouts import Task
from rlx.core.threads import CallTimeoutError, DaemonThreads, within

_GIVEN = (Task, Episode)
_STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
_threads = DaemonThreads("rlx-tool")


class ToolError(Exception):
    """What the model is told instead of a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function that the model may call."""

    name: str
    description: str
    function: Callable[..., Any]
    """Of a class's method: the method without its object."""
    owner: type | None
    """The class that the function is a method of."""
    arguments: type[pydantic.BaseModel]
    given: Mapping[str, type]
    """Parameters that are filled in here."""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates take it: `{"type": "function", "function": {…}}`."""
        parameters = _without_titles(self.arguments.model_json_schema())
        parameters.setdefault("properties", {})
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}


class Toolbox:
    """The tools of an agent, by name."""

    def __init__(self, references: Sequence[str]) -> None:
        found = [tool for reference in references for tool in load_tools(reference)]
        self.tools = {tool.name: tool for tool in found}
        if len(self.tools) < len(found):
            names = [tool.name for tool in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"two tools are called {twice!r}", where="agent.tools")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    def open(self, episode: Episode, *, timeout: float) -> ToolSession:
        return ToolSession(self, episode, timeout)


class ToolSession:
    """The tools within one episode: objects of its own, and counts."""

    def __init__(self, box: Toolbox, episode: Episode, timeout: float) -> None:
        self._box = box
        self._episode = episode
        self._timeout = timeout
        self._objects: dict[type, Any] = {}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result as text; raises ToolError with what the model should know."""
        if name not in self._box.tools:
            hint = did_you_mean(name, self._box.tools)
            names = ", ".join(self._box.tools)
            raise ToolError(f"there is no tool {name!r}; {hint or f'there are: {names}'}")
        tool = self._box.tools[name]
        checked = _checked(tool, arguments)
        try:
            result = await self._run(tool, checked)
        except CallTimeoutError:
            raise ToolError(f"{name} took longer than {self._timeout:g} s") from None
        except (Exception, SystemExit) as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error
        return result if isinstance(result, str) else _as_text(result)

    async def _run(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        function = tool.function
        if tool.owner is not None:
            function = functools.partial(function, self._object(tool.owner))
        call = functools.partial(function, **arguments, **self._given(tool.given))
        if inspect.iscoroutinefunction(tool.function):
            return await within(self._timeout, call())
        return await _threads.run(call, timeout=self._timeout)

    def _object(self, owner: type) -> Any:
        if owner not in self._objects:
            start: Any = vars(owner).get("__init__", object.__init__)
            self._objects[owner] = owner(**self._given(_given_parameters(start)))
        return self._objects[owner]

    def _given(self, parameters: Mapping[str, type]) -> dict[str, Any]:
        found = {Task: self._episode.task, Episode: self._episode}
        return {name: found[kind] for name, kind in parameters.items()}


def load_tools(reference: str) -> list[Tool]:
    """The tools at `tools.py:search` or `pkg.mod:Class`. Raises UsageError for anything else."""
    label = f"tool {reference!r}"
    if ":" not in reference:
        raise UsageError(
            f"{label} names no function", where="agent.tools", fix="`file.py:function`"
        )
    found = import_target(
        reference, label=label, where="agent.tools", search_path=[str(Path.cwd())]
    )
    if inspect.isclass(found):
        # A class method comes bound to its class.
        methods = inspect.getmembers(
            found, lambda member: inspect.isfunction(member) or inspect.ismethod(member)
        )
        own = [(name, method) for name, method in methods if not name.startswith("_")]
        if not own:
            raise UsageError(f"{label} has no public method", where="agent.tools")
        return [
            _tool(name, method, found if _needs_object(found, name) else None)
            for name, method in own
        ]
    if not callable(found):
        raise UsageError(
            f"{label} is {type(found).__name__}, not a function or class", where="agent.tools"
        )
    return [_tool(str(getattr(found, "__name__", reference.rpartition(":")[2])), found, None)]


def _needs_object(owner: type, name: str) -> bool:
    return not isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod)


def _tool(name: str, function: Callable[..., Any], owner: type | None) -> Tool:
    hints = _hints(function)
    docs = parameter_docs(function)
    given = _given_parameters(function)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[owner is not None :]:
        if parameter.name in given:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(
                f"the tool {name!r} takes any number of arguments, which a model can't be told",
                where="agent.tools",
                fix="name its parameters",
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UsageError(
                f"the tool {name!r} takes {parameter.name!r} by position only, and is called by "
                "name",
                where="agent.tools",
                fix="leave the `/` out of its parameters",
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        settings = Field(default, alias=parameter.name, description=docs.get(parameter.name))
        # under a name of its own: one may be called `copy` or `_x`
        fields[f"field_{parameter.name}"] = (hints.get(parameter.name, Any), settings)
    about = docstring_parser.parse(inspect.getdoc(function) or "")
    words = [about.short_description, about.long_description]
    tool = Tool(
        name=name,
        description="\n".join(word for word in words if word),
        function=function,
        owner=owner,
        arguments=pydantic.create_model(name, __config__=_STRICT, **fields),
        given=given,
    )
    try:
        _ = tool.schema
    except pydantic.errors.PydanticInvalidForJsonSchema as error:
        raise UsageError(
            f"the type hints of the tool {name!r} have no JSON schema, which models are told: "
            f"{error.message}",
            where="agent.tools",
            fix="types that JSON has, dataclasses or pydantic models",
        ) from error
    return tool


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise UsageError(
            f"the type hints of {getattr(function, '__name__', function)!r} can't be read: {error}",
            where="agent.tools",
            fix="import their types at run time, not under `if TYPE_CHECKING:`",
        ) from error


def _given_parameters(function: Callable[..., Any]) -> dict[str, type]:
    if not inspect.isroutine(function) or not hasattr(function, "__annotations__"):
        return {}
    return {name: kind for name, kind in _hints(function).items() if kind in _GIVEN}


def _checked(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        model = tool.arguments.model_validate(dict(arguments))
    except pydantic.ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, item['loc'])) or 'arguments'}: {item['msg']}"
            for item in error.errors()[:4]
        ]
        raise ToolError(f"wrong arguments for {tool.name}: {'; '.join(wrong)}") from error
    return {name.removeprefix("field_"): value for name, value in model.__dict__.items()}


def _as_text(result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        return str(result)


def _without_titles(schema: Any) -> Any:
    """pydantic names every field twice; models pay for each token."""
    if isinstance(schema, dict):
        return {
            key: {name: _without_titles(item) for name, item in value.items()}
            if key == "properties"
            else _without_titles(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema


async def gather_calls(session: ToolSession, calls: Sequence[Any]) -> list[str | ToolError]:
    """Run the calls of one message side by side; results and errors in their order."""

    async def one(call: Any) -> str | ToolError:
        try:
            return await session.call(call.name, call.arguments)
        except ToolError as error:
            return error

    return list(await asyncio.gather(*(one(call) for call in calls)))
