"""Configuration of what is done when a worker dies, hangs, or training diverges."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlx.core.config_base import Part


class FaultsConfig(Part):
    """How long workers are waited for, what is restarted, and what ends a run.

    Time-outs and restarts are for workers in processes of their own (`--runtime ray`). Inline, a
    worker that hangs or dies takes the driver with it, and a debugger may hold it as long as it
    likes.
    """

    heartbeat: float = Field(5.0, gt=0)
    """Seconds between two questions of the driver to a worker that is busy."""
    answer_timeout: float = Field(120.0, gt=0)
    """Seconds for which a busy worker may leave such a question unanswered (its process is
    stopped, its machine gone, its interpreter held); then it hangs."""
    progress_timeout: float = Field(1800.0, gt=0)
    """Seconds for which a busy worker may answer without getting on; then it hangs. Each
    micro-batch, step of an engine and finished call is progress."""
    start_timeout: float = Field(3600.0, gt=0)
    """Seconds that a worker may take to start: to get its place, to import and to load."""
    component_timeout: float = Field(1800.0, gt=0)
    """Seconds that a component's call in the driver may take (an estimator, a sampler, a hook, a
    tracker); then stacks are written and it is ended: an observer is switched off, anything else
    ends the run. Inline it is only told."""
    stop_timeout: float = Field(600.0, gt=0)
    """Seconds that an interrupted run may take to end an update that has changed weights, and to
    write its checkpoint; it is cut then, as by a second Ctrl-C."""
    engine_restarts: int = Field(5, ge=0)
    """How often an engine that died or hangs is started anew, with the weights published last,
    between two finished steps; one time more ends the run. Above 0, those weights stay in shared
    memory until the next are published."""
    reward_restarts: int = Field(50, ge=0)
    """The same of reward workers, all together."""
    learner: Literal["stop", "restart"] = "stop"
    """What is done when a learner, critic or scorer dies or hangs: end the run and say how to go
    on; or start all workers anew from the last checkpoint (needs `checkpoint.every`)."""
    learner_restarts: int = Field(3, ge=1)
    """With `learner: restart`, how often in a row without a new step."""
    bounds: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Metric → largest healthy absolute value, such as `{"policy/grad_norm": 100.0}`. A metric that
    is beyond its bound, or not finite, for `bound_steps` steps in a row means that the run
    diverges."""
    bound_steps: int = Field(3, ge=1)
    divergence: Literal["stop", "rollback"] = "stop"
    """What is done then, and when a number is not finite (under `learner.nonfinite: raise`): end
    the run; or go back to the last checkpoint before it, and on with other tasks and seeds (needs
    `checkpoint.every`)."""
    rollbacks: int = Field(2, ge=1)
    """With `divergence: rollback`, how often in a row without a new step."""
