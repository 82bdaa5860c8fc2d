"""Options of the commands that sample from a model: `eval` and `generate`."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import typer

from rlx.cli.targets import SOURCE

Source: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar=f"[{SOURCE}]",
        help="Model folder or hub name, run folder (its newest checkpoint), or checkpoint "
        "folder; none: the embedded model.",
        show_default=False,
    ),
]
Rewards: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--reward", help="Reward; repeatable.", metavar="NAME[:WEIGHT]"),
]
MaxNewTokens: TypeAlias = Annotated[
    int | None, typer.Option("--max-new-tokens", help="Longest response.")
]
MaxTasks: TypeAlias = Annotated[
    int | None, typer.Option("--max-tasks", help="Most tasks of each data set.")
]
Agent: TypeAlias = Annotated[str | None, typer.Option("--agent", help="What drives a rollout.")]
Engine: TypeAlias = Annotated[
    str | None, typer.Option("--engine", help="Generates: vllm or transformers.")
]
Runtime: TypeAlias = Annotated[
    str | None, typer.Option("--runtime", help="ray, or inline: all in this process.")
]
Seed: TypeAlias = Annotated[int | None, typer.Option("--seed", help="Of sampling.")]
Sets: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting, as YAML.", metavar="KEY=VALUE")
]


def flags_of(given: dict[str, Any]) -> dict[str, Any]:
    """Options by name, an empty list for one that was not given as None."""
    return {name: None if value == [] else value for name, value in given.items()}
