"""`rlx plan`: what would run where, with memory and batch arithmetic; starts nothing."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.table import Table

from rlx.cli.checks import checked
from rlx.cli.options import RunOptions, run_options
from rlx.cli.output import console, next_step, print_warning
from rlx.core import sizes
from rlx.core.config import RunConfig
from rlx.core.machine import Machine, this_machine
from rlx.core.models import ModelInfo
from rlx.core.placement import Role, roles
from rlx.core.selection import Selection

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command()
@run_options
def plan(options: RunOptions) -> None:
    """Show what `rlx train` would do with the same options: batches, processes, memory."""
    settings = options.settings()
    work = checked(settings, resume=False)
    work.plugins.control("rlx_configure", config=settings.config)
    machine = this_machine()
    out = console()
    out.print(_model_table(work.info))
    out.print(_batch_table(settings.config, work.info))
    out.print(_component_table(work.selection))
    placed = roles(settings.config, work.selection, work.info, machine)
    out.print(_role_table(settings.config, placed))
    _print_totals(settings.config, work.info, placed, machine)
    next_step("rlx train with the same options", "rlx doctor")


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


def _batch_table(config: RunConfig, info: ModelInfo) -> Table:
    batch = sizes.batch_sizes(config, info.context_length)
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
                f"({learner.token_budget:,} tokens each)",
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


def _role_table(config: RunConfig, placed: Sequence[Role]) -> Table:
    where = "one process" if config.runtime.kind == "inline" else "a Ray actor each"
    table = _table(f"who runs where ({where})", "role", "does", "threads", "memory", "")
    for role in placed:
        memory = "not known" if role.memory is None else sizes.gib(role.memory)
        table.add_row(role.name, role.what, str(role.cpus), memory, role.detail)
    return table


def _print_totals(
    config: RunConfig, info: ModelInfo, placed: Sequence[Role], machine: Machine
) -> None:
    out = console()
    gpus = ", ".join(f"{gpu.name} {sizes.gib(gpu.memory)}" for gpu in machine.gpus) or "no GPU"
    known = [role.memory for role in placed if role.memory is not None]
    if info.parameters is None:
        out.print("the model's size is not known, so there is no estimate of the whole")
        return
    total = sum(known)
    weights = sizes.weight_bytes(info.parameters, sizes.learner_dtype(config, info))
    critic = any(role.name.startswith("critic") for role in placed)
    checkpoint = sizes.checkpoint_bytes(config, info, info.parameters, critic=critic)
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
