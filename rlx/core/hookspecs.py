"""The hooks: every place where a plugin can take part in a run, with its signature and policy.

A plugin is a module (or object) with `@rlx.hookimpl` functions of these names, published under the
entry-point group `rlx`; an implementation takes whichever of the arguments it needs.
`docs/hooks.md` has a runnable example of each; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

import pluggy

if TYPE_CHECKING:
    from rlx.core.config import RunConfig
    from rlx.core.references import ComponentRef
    from rlx.core.registry import Registrar
    from rlx.core.rollouts import Group, TrainBatch

PROJECT: Final = "rlx"
hookimpl = pluggy.HookimplMarker(PROJECT)
_pluggy_spec = pluggy.HookspecMarker(PROJECT)

Mode = Literal["collect", "first", "control", "observer"]
F = TypeVar("F", bound=Callable[..., Any])


class RunView(Protocol):
    """What the run's hooks see of the run: read it, don't steer it."""

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        ...

    @property
    def path(self) -> Path:
        """The run folder (`runs/<name>`)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker process knows about itself when it starts."""

    role: str
    """`rollout`, `learner`, `scorer`, `reward` …"""
    rank: int = 0
    """Position among the workers of the same role."""
    world_size: int = 1
    run_path: str = ""
    """The run folder, as the driver sees it."""


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


def _spec(mode: Mode, *, process: Literal["driver", "worker"] = "driver") -> Callable[[F], F]:
    def mark(function: F) -> F:
        name = function.__name__
        HOOKS[name] = HookInfo(name=name, mode=mode, process=process)
        return _pluggy_spec(firstresult=mode == "first")(function)

    return mark


@_spec("collect")
def rlx_register_estimators(registry: Registrar) -> None:
    """Offer advantage estimators by name."""


@_spec("collect")
def rlx_register_losses(registry: Registrar) -> None:
    """Offer policy losses by name."""


@_spec("collect")
def rlx_register_rewards(registry: Registrar) -> None:
    """Offer rewards by name."""


@_spec("collect")
def rlx_register_agents(registry: Registrar) -> None:
    """Offer agents by name."""


@_spec("collect")
def rlx_register_samplers(registry: Registrar) -> None:
    """Offer samplers by name."""


@_spec("collect")
def rlx_register_corrections(registry: Registrar) -> None:
    """Offer corrections by name."""


@_spec("collect")
def rlx_register_objectives(registry: Registrar) -> None:
    """Offer offline objectives by name."""


@_spec("collect")
def rlx_register_trackers(registry: Registrar) -> None:
    """Offer trackers by name."""


@_spec("first")
def rlx_resolve(kind: str, ref: str) -> ComponentRef | None:
    """Resolve a reference scheme of the plugin's own."""


@_spec("control")
def rlx_configure(config: RunConfig) -> None:
    """Check a run's configuration before anything starts."""


@_spec("observer")
def rlx_on_run_start(run: RunView) -> None:
    """See a run begin."""


@_spec("observer")
def rlx_on_rollouts(run: RunView, step: int, groups: Sequence[Group]) -> None:
    """See the groups of a step."""


@_spec("observer")
def rlx_step_metrics(run: RunView, step: int, batch: TrainBatch) -> Mapping[str, float] | None:
    """Add metrics to a step."""


@_spec("observer")
def rlx_on_step_end(run: RunView, step: int, metrics: Mapping[str, float]) -> None:
    """See the metrics of a finished step."""


@_spec("observer")
def rlx_on_eval_end(run: RunView, step: int, results: Mapping[str, float]) -> None:
    """See the results of an evaluation."""


@_spec("observer")
def rlx_on_checkpoint(run: RunView, step: int, path: Path) -> None:
    """See a checkpoint that is complete on disk."""


@_spec("first")
def rlx_should_stop(run: RunView, step: int, metrics: Mapping[str, float]) -> str | None:
    """End the run early, with a reason."""


@_spec("observer")
def rlx_on_run_end(run: RunView, error: BaseException | None) -> None:
    """See a run end."""


@_spec("control", process="worker")
def rlx_on_worker_start(ctx: WorkerContext) -> None:
    """Prepare a worker process."""
