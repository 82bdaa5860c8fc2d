"""What `rlx plan` says of the learner's memory against what it took in recorded runs.

python -m benchmarks.plan_memory runs/*

Measured is the highest `memory/learner_gib` of a run on Ray. The plan counts full micro-batches
(`learner.token_budget`, and the longest sequence that the settings allow), so that runs with fewer
tokens in a step, or shorter sequences, take less.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    print("| run | parameters | planned | measured | planned ÷ measured |\n|---|---|---|---|---|")
    for name in sys.argv[1:]:
        folder = Path(name).resolve()
        if (found := sides(folder)) is not None:
            parameters, planned, measured = found
            print(
                f"| {folder.name} | {parameters / 1e6:,.1f} M | {planned:.2f} GiB "
                f"| {measured:.2f} GiB | {planned / measured:.2f} |"
            )


def sides(run: Path) -> tuple[int, float, float] | None:
    """Parameters of the model, and GiB planned and measured; None for a run that does not tell."""
    from rlx.core.machine import this_machine
    from rlx.core.models import model_info
    from rlx.core.placement import roles
    from rlx.core.plugins import PluginSystem
    from rlx.core.selection import select
    from rlx.core.settings import load_settings

    lines = (run / "metrics.jsonl").read_text().splitlines()
    measured = max((json.loads(line).get("memory/learner_gib") or 0.0) for line in lines)
    config = load_settings(files=[run / "config.yaml"], env={}).config
    if not measured or config.runtime.kind == "inline":
        return None
    os.chdir(run.parent)  # relative names of models and components are of the run's own folder
    info = model_info(config.model)
    placed = roles(config, select(config, PluginSystem.load()), info, this_machine())
    (learner,) = (role for role in placed if role.name == "learner-0")
    if learner.memory is None or info.parameters is None:
        return None
    return info.parameters, learner.memory / 2**30, measured


if __name__ == "__main__":
    main()
