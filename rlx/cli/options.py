"""The options that describe a run, shared by `train` and `plan`."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rlx.core.config import RunConfig
from rlx.core.errors import UsageError
from rlx.core.run import CONFIG_NAME, MANIFEST_NAME
from rlx.core.settings import DEFAULT, FLAGS, Settings, known_keys, load_settings

_DEFAULTS = RunConfig()
_ALGORITHM, _SIZES, _PLACES = "What is trained, and how", "Sizes", "Where it runs and writes"


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


def _option(flag: str, help: str, panel: str, complete: Any = None, **more: Any) -> Any:
    text = help + _default_of(flag)
    return typer.Option(flag, help=text, rich_help_panel=panel, autocompletion=complete, **more)


def _default_of(flag: str) -> str:
    """` (default: ppo)`: the default of the setting behind a flag."""
    node: Any = _DEFAULTS
    for word in FLAGS[flag.removeprefix("--").replace("-", "_")].split("."):
        node = getattr(node, word)
    names = [item.name for item in node] if isinstance(node, list) else getattr(node, "name", node)
    text = ", ".join(names) if isinstance(names, list) else str(names)
    return f" (default: {text})" if text not in ("", "None") else ""


def _component(flag: str, help: str, kind: str) -> Any:
    return _option(flag, help, _ALGORITHM, component_names(kind), metavar="NAME")


Text = str | None
Count = int | None
Number = float | None


def _declared(
    model: Annotated[Text, _option("--model", "Folder or hub name.", _ALGORITHM)] = None,
    data: Annotated[
        Text, _option("--data", "File, folder, hub name or file.py:load.", _ALGORITHM)
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        _option("--eval-data", "Data to evaluate on; repeatable.", _ALGORITHM, metavar="DATA"),
    ] = None,
    reward: Annotated[
        list[str] | None,
        _option(
            "--reward",
            "Reward, with a weight if wanted; repeatable.",
            _ALGORITHM,
            component_names("rewards"),
            metavar="NAME[:WEIGHT]",
        ),
    ] = None,
    estimator: Annotated[
        Text, _component("--estimator", "Advantage estimator.", "estimators")
    ] = None,
    loss: Annotated[Text, _component("--loss", "Policy loss.", "losses")] = None,
    correction: Annotated[
        Text, _component("--correction", "Engine-learner mismatch weights.", "corrections")
    ] = None,
    agent: Annotated[Text, _component("--agent", "What drives a rollout.", "agents")] = None,
    sampler: Annotated[
        Text, _component("--sampler", "Chooses tasks, keeps groups.", "samplers")
    ] = None,
    lr: Annotated[Number, _option("--lr", "Learning rate.", _ALGORITHM)] = None,
    kl_coef: Annotated[
        Number, _option("--kl-coef", "Weight of the KL to the reference model.", _ALGORITHM)
    ] = None,
    aggregation: Annotated[
        Text,
        _option(
            "--aggregation",
            "Reduction of the loss over tokens.",
            _ALGORITHM,
            words("auto", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
        ),
    ] = None,
    temperature: Annotated[
        Number, _option("--temperature", "Of sampling, and of the learner.", _ALGORITHM)
    ] = None,
    seed: Annotated[Count, _option("--seed", "Of everything random.", _ALGORITHM)] = None,
    steps: Annotated[Count, _option("--steps", "Training steps.", _SIZES)] = None,
    groups: Annotated[Count, _option("--groups", "P, tasks per step.", _SIZES)] = None,
    group_size: Annotated[Count, _option("--group-size", "G, rollouts per task.", _SIZES)] = None,
    max_staleness: Annotated[
        Count,
        _option("--max-staleness", "Steps that generation may run ahead; 0: takes turns.", _SIZES),
    ] = None,
    max_new_tokens: Annotated[
        Count, _option("--max-new-tokens", "Longest response.", _SIZES)
    ] = None,
    engine: Annotated[
        Text,
        _option(
            "--engine",
            "Generates: vllm or transformers.",
            _PLACES,
            words("vllm", "transformers"),
        ),
    ] = None,
    runtime: Annotated[
        Text,
        _option(
            "--runtime",
            "ray, or inline: all in this process, for breakpoint().",
            _PLACES,
            words("ray", "inline"),
        ),
    ] = None,
    output: Annotated[
        Text, _option("--output", "Run folder (default: runs/NAME).", _PLACES)
    ] = None,
    checkpoint_every: Annotated[
        Count, _option("--checkpoint-every", "Steps between checkpoints.", _PLACES)
    ] = None,
    eval_every: Annotated[
        Count, _option("--eval-every", "Steps between evaluations; 0: at the end.", _PLACES)
    ] = None,
    tracker: Annotated[
        list[str] | None,
        _option(
            "--tracker",
            "Where metrics go; repeatable.",
            _PLACES,
            component_names("trackers"),
            metavar="NAME",
        ),
    ] = None,
    no_plugin: Annotated[
        list[str] | None,
        _option(
            "--no-plugin", "Distribution that is not loaded; repeatable.", _PLACES, metavar="DIST"
        ),
    ] = None,
    no_rlxfile: Annotated[
        bool,
        typer.Option(
            "--no-rlxfile", help="Leave the hooks of ./rlxfile.py out.", rich_help_panel=_PLACES
        ),
    ] = False,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", help="YAML file; repeatable, later ones win."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any setting, as YAML: --set estimator.eps=1e-5.",
            metavar="KEY=VALUE",
            autocompletion=key_names,
        ),
    ] = None,
) -> None:
    """Carries the declarations; never called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the user gave on the command line."""

    files: tuple[Path, ...]
    sets: tuple[str, ...]
    flags: Mapping[str, Any]
    names: Mapping[str, str]
    """Flag → key of the configuration."""

    def settings(
        self,
        *,
        resume: bool = False,
        replay: Path | None = None,
        preset: Mapping[str, Any] | None = None,
        preset_name: str = "preset",
    ) -> Settings:
        """Merge all layers; `preset` is what the command sets in place of the defaults.

        `--resume --output FOLDER` starts from that run's own configuration. Without `--resume`,
        the configuration of an earlier run (`-c runs/x/config.yaml`) does not say where to write,
        so that it is run again beside the first; so does `replay`, a run whose rollouts are trained
        on.
        """
        files = list(self.files)
        output = self.flags.get("output")
        if resume and not files and output and (Path(output) / CONFIG_NAME).is_file():
            files = [Path(output) / CONFIG_NAME]
        sets = self.sets
        if replay is not None:
            if not (replay / CONFIG_NAME).is_file():
                raise UsageError(f"there is no run in {replay}", where="--replay")
            files = files or [replay / CONFIG_NAME]
            sets = (*sets, f"replay={json.dumps(str(replay.resolve()))}")
        settings = load_settings(
            files=files,
            sets=sets,
            flags=self.flags,
            names=self.names,
            preset=preset,
            preset_name=preset_name,
        )
        of_runs = [path for path in files if (path.parent / MANIFEST_NAME).is_file()]
        origin = settings.origin("output").rpartition(":")[0]
        if resume or origin not in map(str, of_runs):
            return settings
        return Settings(
            config=settings.config.model_copy(update={"output": None}),
            origins={**settings.origins, "output": DEFAULT},
        )


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options of a run; it receives them as `options: RunOptions`."""
    return options_of(_declared, FLAGS)(command)


def options_of(
    declared: Callable[..., None], names: Mapping[str, str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `declared` beside its own; see `run_options`.

    Args:
        declared: a function with the options as parameters; it is never called. Beside the flags of
            `names` it has `config`, `set_` and `no_rlxfile`.
        names: flag → key of the configuration.
    """
    shared = inspect.signature(declared, eval_str=True).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        extra = [item for name, item in own.items() if name != "options"]

        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            files, sets = given.pop("config"), given.pop("set_")
            flags = {name: given.pop(name) for name in names}
            if given.pop("no_rlxfile"):
                flags["no_plugin"] = [*(flags["no_plugin"] or ()), "rlxfile"]
            options = RunOptions(
                files=tuple(files or ()),
                sets=tuple(sets or ()),
                flags={name: None if value == [] else value for name, value in flags.items()},
                names=names,
            )
            command(options=options, **given)

        parameters = [
            item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in (*shared.values(), *extra)
        ]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {item.name: item.annotation for item in parameters}
        return wrapper

    return decorate
