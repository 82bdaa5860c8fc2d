"""Options that several commands have, and what options are made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer

from rlx.core.config import RunConfig
from rlx.core.settings import FLAGS, known_keys

_DEFAULTS = RunConfig()
ALGORITHM: Final = "What is trained, and how"
SIZES: Final = "Sizes"
PLACES: Final = "Where it runs and writes"

Text: TypeAlias = str | None
Count: TypeAlias = int | None
Number: TypeAlias = float | None


def component_names(kind: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        from rlx.core.plugins import PluginSystem

        names = PluginSystem.load(hooks=False).names(kind)
        return [name for name in names if name.startswith(incomplete)]

    return complete


def words(*words: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def key_names(incomplete: str) -> list[str]:
    return [f"{key}=" for key in known_keys() if key.startswith(incomplete)]


def option(flag: str, help: str, panel: str, complete: Any = None, **more: Any) -> Any:
    text = help + _default_of(flag)
    return typer.Option(flag, help=text, rich_help_panel=panel, autocompletion=complete, **more)


def _default_of(flag: str) -> str:
    """` (default: ppo)`: the default of the setting behind a flag."""
    node: Any = _DEFAULTS
    for word in FLAGS[flag.removeprefix("--").replace("-", "_")].split("."):
        node = getattr(node, word)
    items = node if isinstance(node, list) else [node]
    text = ", ".join(str(getattr(item, "name", item)) for item in items)
    return f" (default: {text})" if text not in ("", "None") else ""


LoraRank: TypeAlias = Annotated[
    Count, option("--lora-rank", "Train adapters of this rank in place of all weights.", ALGORITHM)
]
LoraAlpha: TypeAlias = Annotated[
    Number,
    option("--lora-alpha", "Adapters are scaled by alpha / rank (default: 2 x rank).", ALGORITHM),
]
LoraTargets: TypeAlias = Annotated[
    list[str] | None,
    option(
        "--lora-targets", "Linear layers with an adapter; repeatable.", ALGORITHM, metavar="NAME"
    ),
]
Runtime: TypeAlias = Annotated[
    Text,
    option(
        "--runtime",
        "ray, or inline: all in this process, for breakpoint().",
        PLACES,
        words("ray", "inline"),
    ),
]
Output: TypeAlias = Annotated[Text, option("--output", "Run folder (default: runs/NAME).", PLACES)]
CheckpointEvery: TypeAlias = Annotated[
    Count, option("--checkpoint-every", "Steps between checkpoints.", PLACES)
]
EvalEvery: TypeAlias = Annotated[
    Count, option("--eval-every", "Steps between evaluations; 0: at the end.", PLACES)
]
Trackers: TypeAlias = Annotated[
    list[str] | None,
    option(
        "--tracker",
        "Where metrics go; repeatable.",
        PLACES,
        component_names("trackers"),
        metavar="NAME",
    ),
]
NoPlugin: TypeAlias = Annotated[
    list[str] | None,
    option("--no-plugin", "Distribution that is not loaded; repeatable.", PLACES, metavar="DIST"),
]
NoRlxfile: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--no-rlxfile", help="Leave the hooks of ./rlxfile.py out.", rich_help_panel=PLACES
    ),
]
ConfigFiles: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option("--config", "-c", help="YAML file; repeatable, later ones win."),
]
Root: TypeAlias = Annotated[Path, typer.Option("--root", help="Folder that holds the runs.")]
