"""The hooks: every place where a plugin can take part in a run, with its signature and policy.

A plugin is a module (or object) with `@rlx.hookimpl` functions of these names, published under the
entry-point group `rlx`; an implementation takes whichever of the arguments it needs.
`docs/hooks.md` is made from the docstrings here (`python scripts/hooks_page.py`); every example in
it is run by a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.core.hook_types import HOOKS as HOOKS
from rlx.core.hook_types import PROJECT as PROJECT
from rlx.core.hook_types import HookInfo as HookInfo
from rlx.core.hook_types import RunView as RunView
from rlx.core.hook_types import WorkerContext as WorkerContext
from rlx.core.hook_types import hookimpl as hookimpl
from rlx.core.hook_types import spec
from rlx.core.hookspecs_register import (
    rlx_register_agents as rlx_register_agents,
)
from rlx.core.hookspecs_register import (
    rlx_register_corrections as rlx_register_corrections,
)
from rlx.core.hookspecs_register import (
    rlx_register_estimators as rlx_register_estimators,
)
from rlx.core.hookspecs_register import (
    rlx_register_losses as rlx_register_losses,
)
from rlx.core.hookspecs_register import (
    rlx_register_objectives as rlx_register_objectives,
)
from rlx.core.hookspecs_register import (
    rlx_register_rewards as rlx_register_rewards,
)
from rlx.core.hookspecs_register import (
    rlx_register_samplers as rlx_register_samplers,
)
from rlx.core.hookspecs_register import (
    rlx_register_trackers as rlx_register_trackers,
)

if TYPE_CHECKING:
    from rlx.core.config import RunConfig
    from rlx.core.references import ComponentRef
    from rlx.core.rollouts import Group, TrainBatch


@spec("first")
def rlx_resolve(kind: str, ref: str) -> ComponentRef | None:
    """Resolve references of the plugin's own scheme.

    When: a component is selected by something that is no registered name; before it is tried as
    `pkg.mod:attr` or `file.py:attr`.
    Process: driver.
    Mode: first result; the first answer that is not None is taken.
    On failure: the exception ends the command.

    Args:
        kind: one of `rlx.core.component.KINDS` (`estimators`, `losses`, …).
        ref: what the user wrote, for example `team://zscore`.

    Returns:
        A `ComponentRef`, or None to leave the reference to others. Parameters are checked
        afterwards.

    Example:
        import rlx

        @rlx.hookimpl
        def rlx_resolve(kind, ref):
            if not ref.startswith("team://"):
                return None
            name = ref.removeprefix("team://")
            return rlx.ComponentRef(kind=kind, name=ref, target=f"operator:{name}")
    """


@spec("control")
def rlx_configure(config: RunConfig) -> None:
    """Check a run's configuration before it costs anything.

    When: after the configuration is complete and valid, before Ray starts; also for `--dry-run`
    and `rlx plan`.
    Process: driver.
    Mode: control; every implementation is called.
    On failure: the exception ends the command; raise `rlx.UsageError` to say what to change.

    Args:
        config: the resolved configuration; a copy, to be checked and not to be changed.

    Example:
        import rlx

        @rlx.hookimpl
        def rlx_configure(config):
            if config.learner.lr > 1e-3:
                raise rlx.UsageError(
                    f"a learning rate of {config.learner.lr} destroys the model",
                    where="learner.lr",
                    fix="--lr 1e-5",
                )
    """


@spec("observer")
def rlx_on_run_start(run: RunView) -> None:
    """See a run begin.

    When: the run folder exists and the workers are ready; before the first step.
    Process: driver.
    Mode: observer; every implementation is called.
    On failure: logged once, this implementation is off for the rest of the run.

    Args:
        run: `run.name`, `run.folder`, `run.config`, `run.start_step`.

    Example:
        import rlx

        @rlx.hookimpl
        def rlx_on_run_start(run):
            (run.folder / "started.txt").write_text(f"{run.config.model}\\n")
    """


@spec("observer")
def rlx_on_rollouts(run: RunView, step: int, groups: Sequence[Group]) -> None:
    """See the groups of a step, with rewards, before the model is trained on them.

    When: once a step, after the sampler has accepted the groups.
    Process: driver.
    Mode: observer; every implementation is called. Values are read-only.
    On failure: logged once, this implementation is off for the rest of the run.

    Args:
        run: the run.
        step: number of the training step, from 1.
        groups: P groups of G rollouts each.

    Example:
        import rlx

        @rlx.hookimpl
        def rlx_on_rollouts(run, step, groups):
            best = max((rollout for group in groups for rollout in group.rollouts),
                       key=lambda rollout: rollout.reward)
            (run.folder / "best.txt").write_text(best.text)
    """


@spec("observer")
def rlx_step_metrics(run: RunView, step: int, batch: TrainBatch) -> Mapping[str, float] | None:
    """Add numbers to the metrics of a step.

    When: once a step, after scoring and advantages, before the update.
    Process: driver.
    Mode: observer; every implementation is called, and the answers are collected under
    `<plugin>/<key>`.
    On failure: logged once, this implementation is off for the rest of the run.

    Args:
        run: the run.
        step: number of the training step, from 1.
        batch: the rollouts as flat arrays; read-only.

    Returns:
        Numbers by key, or None.

    Example:
        import rlx

        @rlx.hookimpl
        def rlx_step_metrics(batch):
            return {"longest": float(batch.action_lengths.max())}
    """


@spec("observer")
def rlx_on_step_end(run: RunView, step: int, metrics: Mapping[str, float]) -> None:
    """See the metrics of a finished step.

    When: once a step, after the new weights are published.
    Process: driver.
    Mode: observer; every implementation is called.
    On failure: logged once, this implementation is off for the rest of the run.

    Args:
        run: the run.
        step: number of the training step, from 1.
        metrics: every metric of the step by name (docs/metrics.md).

    Example:
        import rlx

        @rlx.hookimpl
        def rlx_on_step_end(step, metrics):
            if metrics.get("policy/grad_norm", 0.0) > 100:
                print(f"step {step}: gradient norm {metrics['policy/grad_norm']:.0f}")
    """


@spec("observer")
def rlx_on_eval_end(run: RunView, step: int, results: Mapping[str, float]) -> None:
    """See the results of an evaluation.

    When: after each evaluation.
    Process: driver.
    Mode: observer; every implementation is called.
    On failure: logged once, this implementation is off for the rest of the run.

    Args:
        run: the run.
        step: the training step whose weights were evaluated; 0 before training.
        results: `eval/<source>/mean`, `eval/<source>/pass@k` by name.

    Example:
        import json
        import rlx

        @rlx.hookimpl
        def rlx_on_eval_end(run, step, results):
            (run.folder / f"eval-{step}.json").write_text(json.dumps(dict(results)))
    """


@spec("observer")
def rlx_on_checkpoint(run: RunView, step: int, path: Path) -> None:
    """See a checkpoint that is complete on disk.

    When: after the checkpoint has its final name; older ones may be evicted afterwards.
    Process: driver.
    Mode: observer; every implementation is called.
    On failure: logged once, this implementation is off for the rest of the run.

    Args:
        run: the run.
        step: the training step that the checkpoint ends.
        path: the checkpoint's folder.

    Example:
        import rlx

        @rlx.hookimpl
        def rlx_on_checkpoint(run, step, path):
            with (run.folder / "checkpoints.txt").open("a") as file:
                print(step, path.name, file=file)
    """


@spec("first")
def rlx_should_stop(run: RunView, step: int, metrics: Mapping[str, float]) -> str | None:
    """End the run early.

    When: once a step, after `rlx_on_step_end`.
    Process: driver.
    Mode: first result; the first answer that is not None ends the run in an orderly way
    (checkpoint and export included).
    On failure: the exception ends the run.

    Args:
        run: the run.
        step: number of the training step, from 1.
        metrics: every metric of the step by name.

    Returns:
        The reason, which is logged and shown; None to go on.

    Example:
        import rlx

        @rlx.hookimpl
        def rlx_should_stop(metrics):
            if metrics.get("reward/mean", 0.0) > 0.99:
                return "solved"
            return None
    """


@spec("observer")
def rlx_on_run_end(run: RunView, error: BaseException | None) -> None:
    """See a run end, in whichever way.

    When: after the last step's files are written; also when the run failed or was interrupted.
    Process: driver.
    Mode: observer; every implementation is called.
    On failure: logged once.

    Args:
        run: the run.
        error: what ended the run; None when it completed.

    Example:
        import rlx

        @rlx.hookimpl
        def rlx_on_run_end(run, error):
            (run.folder / "ended.txt").write_text("ok" if error is None else repr(error))
    """


@spec("control", process="worker")
def rlx_on_worker_start(ctx: WorkerContext) -> None:
    """Prepare a worker process: environment variables, seeds, patches, profilers.

    When: in each worker, before it loads its model; of the plugins that the driver has switched on,
    which are shipped to where they are missing, and from the same source.
    Process: every worker process; with `--runtime inline` the driver.
    Mode: control; every implementation is called.
    On failure: the exception ends the run.

    Args:
        ctx: `ctx.role`, `ctx.rank`, `ctx.world_size`, `ctx.run_folder`.

    Example:
        import os
        import rlx

        @rlx.hookimpl
        def rlx_on_worker_start(ctx):
            if ctx.role == "reward":
                os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    """
