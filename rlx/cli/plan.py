"""`rlx plan`: what would run where, with memory and batch arithmetic; starts nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rlx.cli.checks import checked
from rlx.cli.options import RunOptions, run_options
from rlx.cli.output import console, next_step, print_warning
from rlx.cli.plan_simulation import print_simulation
from rlx.core import sizes
from rlx.core.config import RunConfig
from rlx.core.errors import UsageError
from rlx.core.layout import Layout
from rlx.core.machine import Gpu, Machine, this_machine
from rlx.core.memory import Load
from rlx.core.models import ModelInfo
from rlx.core.placement import Role, roles
from rlx.core.remedies import judge, remedies
from rlx.core.selection import Selection

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command()
@run_options
def plan(
    options: RunOptions,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=0, help="Plan for this many GPUs, not for this machine's."),
    ] = None,
    gpu_memory: Annotated[
        float, typer.Option("--gpu-memory", min=1, help="GiB of each of them.")
    ] = 80.0,
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", min=1, help="How many of them a node has.")
    ] = 8,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Predict step time, idle shares and staleness instead of memory."
        ),
    ] = False,
    recorded: Annotated[
        Path | None,
        typer.Option("--recorded", metavar="RUN", help="Run that says how long things take."),
    ] = None,
    timings: Annotated[
        Path | None, typer.Option("--timings", metavar="FILE", help="YAML that says it.")
    ] = None,
    counts: Annotated[
        list[str] | None,
        typer.Option("--counts", metavar="ENGINESxRANKS", help="What to simulate; repeatable."),
    ] = None,
) -> None:
    """Show what `rlx train` would do with the same options: batches, processes, memory.

    A run that can't fit is refused, with what would.
    """
    settings = options.settings()
    if simulated:
        print_simulation(settings.config, recorded=recorded, timings=timings, counts=counts or ())
        return
    work = checked(settings, resume=False, elsewhere=gpus is not None)
    work.plugins.control("rlx_configure", config=settings.config)
    machine = this_machine()
    if gpus is not None:
        device = Gpu(name="GPU", memory=int(gpu_memory * sizes.GIB))
        machine = dataclasses.replace(machine, gpus=(device,) * gpus)
    node_gpus = gpus_per_node if gpus is not None else len(machine.gpus)
    config, selection, info = settings.config, work.selection, work.info
    layout, found = judge(config, selection, info, machine, node_gpus=node_gpus)
    out = console()
    out.print(_model_table(info))
    out.print(_batch_table(config, info, machine))
    out.print(_component_table(selection))
    placed = roles(config, selection, info, machine)
    out.print(_role_table(config, placed, layout))
    _print_totals(config, info, placed, layout, machine)
    if layout.gpus:
        out.print(_gpu_table(found, layout, machine))
    if info.parameters is not None and not all(load.fits for load in found):
        raise _too_much(found, remedies(config, selection, info, machine, node_gpus=node_gpus))
    next_step("rlx train with the same options", "rlx doctor")


def _too_much(found: Sequence[Load], ways: Sequence[str]) -> UsageError:
    worst = max(found, key=lambda load: load.bytes / max(load.limit, 1))
    fix = "; or ".join(
        way if " such " in way else f"`--set {way.replace(' ', ' --set ')}`" for way in ways
    )
    return UsageError(
        f"{worst.where} would hold {sizes.gib(worst.bytes)} of {sizes.gib(worst.limit)} "
        f"({worst.phase})",
        where="memory, estimated",
        fix=fix or "a smaller model",
    )


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold", box=None)


def _rows(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False
    )
    for row in rows:
        table.add_row(*row)
    return table


def _model_table(info: ModelInfo) -> Table:
    count = "not known" if info.parameters is None else f"{info.parameters:,}"
    how = "" if info.parameters is None else (" (counted)" if info.exact else " (from its config)")
    return _rows(
        "model",
        [
            ("name", info.name),
            ("architecture", info.architecture),
            ("parameters", count + how),
            ("weights", info.dtype + (", tied head" if info.tied else "")),
            ("context", f"{info.context_length:,} tokens"),
            ("vocabulary", f"{info.vocab_size:,}" if info.vocab_size else "not known"),
        ],
    )


def _batch_table(config: RunConfig, info: ModelInfo, machine: Machine) -> Table:
    budget = sizes.token_budget(config, info, accelerated=bool(machine.gpus))
    batch = sizes.batch_sizes(config, info.context_length, token_budget=budget)
    rollout, learner = config.rollout, config.learner
    return _rows(
        "one training step",
        [
            ("rollouts B", f"P {rollout.groups} × G {rollout.group_size} = {batch.rollouts}"),
            (
                "new tokens",
                f"at most {batch.rollouts} × {rollout.max_new_tokens} = {batch.new_tokens:,}",
            ),
            ("sequence", f"at most {batch.sequence_tokens:,} tokens, prompt included"),
            (
                "optimizer steps",
                f"{learner.epochs} × {batch.rollouts} / {batch.minibatch} = {batch.updates}",
            ),
            (
                "micro-batches",
                f"at most {batch.micro_batches} per optimizer step and rank "
                f"({budget:,} tokens each)",
            ),
            ("whole run", f"{config.steps} steps, {config.steps * batch.rollouts:,} rollouts"),
        ],
    )


def _component_table(selection: Selection) -> Table:
    rewards = ", ".join(f"{ref.name} × {weight:g}" for ref, weight in selection.rewards)
    needs = "; ".join(
        f"{name} ({', '.join(selection.required_by[name])})" for name in sorted(selection.requires)
    )
    return _rows(
        "algorithm",
        [
            ("estimator", selection.estimator.name),
            ("loss", f"{selection.loss.name}, {selection.aggregation}"),
            ("correction", selection.correction.name),
            ("agent", selection.agent.name),
            ("sampler", selection.sampler.name),
            ("rewards", rewards or "none"),
            ("requires", needs or "nothing extra"),
        ],
    )


def _role_table(config: RunConfig, placed: Sequence[Role], layout: Layout) -> Table:
    where = "one process" if config.runtime.kind == "inline" else "a Ray actor each"
    places = ["GPUs"] if layout.gpus else []
    table = _table(f"who runs where ({where})", "role", "does", "threads", *places, "memory", "")
    for role in placed:
        memory = "not known" if role.memory is None else sizes.gib(role.memory)
        place = [_place(layout, role.name)] if layout.gpus else []
        table.add_row(role.name, role.what, str(role.cpus), *place, memory, _parts(role))
    return table


def _place(layout: Layout, name: str) -> str:
    """Numbers of a role's GPUs, counted over all groups."""
    seat = layout.seats.get(name)
    if seat is None:
        return ""
    before = sum(group.gpus for group in layout.groups[: seat.group])
    first = before + seat.bundle * layout.groups[seat.group].bundle_gpus
    return ", ".join(str(first + number) for number in seat.gpus)


def _parts(role: Role) -> str:
    parts = [f"{name} {sizes.gib(count)}" for name, count in (role.parts or {}).items() if count]
    return "; ".join([role.detail] if not parts else [", ".join(parts), role.detail])


def _gpu_table(found: Sequence[Load], layout: Layout, machine: Machine) -> Table:
    spare = len(machine.gpus) - layout.gpus
    title = f"{layout.gpus} of {len(machine.gpus)} GPUs" + (f", {spare} unused" if spare else "")
    table = _table(title, "", "holds", "most", "of", "")
    for load in found:
        holds = ", ".join(load.roles)
        verdict = "" if load.fits else "does not fit"
        row = (load.where, holds, f"{sizes.gib(load.bytes)} ({load.phase})", sizes.gib(load.limit))
        table.add_row(*row, verdict)
    return table


def _print_totals(
    config: RunConfig,
    info: ModelInfo,
    placed: Sequence[Role],
    layout: Layout,
    machine: Machine,
) -> None:
    def seated(name: str) -> bool:
        return bool(layout.gpus) and (name in layout.seats or name.startswith("critic-"))

    out = console()
    gpus = f"{len(machine.gpus)} GPUs" if machine.gpus else "no GPU"
    if info.parameters is None:
        out.print("the model's size is not known, so there is no estimate of the whole")
        return
    on_host = [role.process if seated(role.name) else role.memory or 0 for role in placed]
    total = sum(on_host)
    weights = sizes.weight_bytes(info.parameters, sizes.learner_dtype(config, info))
    critic = any(role.name.startswith("critic") for role in placed)
    checkpoint = sizes.checkpoint_bytes(config, info, info.parameters, critic=critic)
    if layout.gpus:
        out.print(f"the processes take about {sizes.gib(total)} of the hosts' memory")
    else:
        out.print(
            f"in all about {sizes.gib(total)} of {sizes.gib(machine.memory)} "
            f"({sizes.gib(machine.memory_available)} free), {machine.cpus} CPUs, {gpus}"
        )
    out.print(
        f"publishing the weights takes {sizes.gib(weights)} of shared memory, "
        f"a checkpoint {sizes.gib(checkpoint)} on disk"
    )
    if not machine.gpus and total > machine.memory_available:
        print_warning(
            "that is more memory than is free",
            "--set rollout.kv_cache_gib or learner.token_budget lower, or a smaller model",
        )
