"""Whether the run's roles fit the GPUs, as far as that is known before Ray starts."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.core.errors import UsageError
from rlx.core.layout import lay_out, processes
from rlx.core.machine import find_gpus
from rlx.core.preflight_case import Case, Finding, error, warning


def check_placement(case: Case) -> Iterator[Finding]:
    """Groups have the roles that they name; this machine's GPUs suffice; settings have effect."""
    config, selection = case.config, case.selection
    placement = config.placement
    if config.runtime.kind == "inline":
        if config.runtime.ray_address is not None:
            yield error(
                "a run in one process joins no cluster",
                "runtime.ray_address",
                "`--runtime ray`, or leave it out",
            )
        for key in type(placement).model_fields:
            if getattr(placement, key) != type(placement).model_fields[key].default:
                yield warning(
                    f"placement.{key} has no effect: everything is in one process",
                    f"placement.{key}",
                    "`--runtime ray`, or leave it out",
                )
        return
    chosen = placement.colocate
    groups = [["critic", "rewards"]] if chosen == "critic_reward" else chosen
    if "values" in selection.requires and config.critic.placement == "colocated":
        named = isinstance(groups, list) and any("critic" in group for group in groups)
        if named:
            yield error(
                "the critic is in the policy's processes and can't share GPUs with others",
                "placement.colocate",
                "`--set critic.placement=apart`, or groups without the critic",
            )
    if config.runtime.ray_address is None and (gpus := len(find_gpus())):
        try:
            lay_out(processes(config, selection), placement, gpus=gpus, node_gpus=gpus)
        except UsageError as problem:
            yield error(problem.what, problem.where or "placement", problem.fix or "more GPUs")
