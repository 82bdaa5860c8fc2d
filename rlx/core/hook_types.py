"""What hook specifications are made of: marker, policy, and the values that hooks are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

import pluggy

if TYPE_CHECKING:
    from rlx.core.config import RunConfig

PROJECT: Final = "rlx"
hookimpl = pluggy.HookimplMarker(PROJECT)
_pluggy_spec = pluggy.HookspecMarker(PROJECT)

Mode = Literal["collect", "first", "control", "observer"]
F = TypeVar("F", bound=Callable[..., Any])


class RunView(Protocol):
    """What the run's hooks see of the run: read it, don't steer it."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        ...

    @property
    def folder(self) -> Path:
        """The run folder (`runs/<name>`)."""
        ...

    @property
    def start_step(self) -> int:
        """Steps that an earlier process did; 0 for a fresh run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker process knows about itself when it starts."""

    role: str
    """`rollout`, `learner`, `scorer`, `reward` …"""
    rank: int = 0
    """Position among the workers of the same role."""
    world_size: int = 1
    run_folder: str = ""
    """As the driver sees it; another node need not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookInfo:
    """How a hook is called and what happens when an implementation raises."""

    name: str
    mode: Mode
    process: Literal["driver", "worker"]

    @property
    def isolated(self) -> bool:
        """An exception switches the implementation off and the run goes on."""
        return self.mode == "observer"


HOOKS: Final[dict[str, HookInfo]] = {}


def spec(mode: Mode, *, process: Literal["driver", "worker"] = "driver") -> Callable[[F], F]:
    """Declare a hook; its name, arguments and docstring are the function's."""

    def mark(function: F) -> F:
        name = function.__name__
        HOOKS[name] = HookInfo(name=name, mode=mode, process=process)
        return _pluggy_spec(firstresult=mode == "first")(function)

    return mark
