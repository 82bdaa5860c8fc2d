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

from rlx.cli.common_options import (
    ALGORITHM,
    PLACES,
    SIZES,
    CheckpointEvery,
    ConfigFiles,
    Count,
    EvalEvery,
    LoraAlpha,
    LoraRank,
    LoraTargets,
    NoPlugin,
    NoRlxfile,
    Number,
    Output,
    Runtime,
    Text,
    Trackers,
    component_names,
    key_names,
    option,
    words,
)
from rlx.core.errors import UsageError
from rlx.core.run import CONFIG_NAME, MANIFEST_NAME
from rlx.core.settings import DEFAULT, FLAGS, Settings, load_settings


def _component(flag: str, help: str, kind: str) -> Any:
    return option(flag, help, ALGORITHM, component_names(kind), metavar="NAME")


def _declared(
    model: Annotated[Text, option("--model", "Folder or hub name.", ALGORITHM)] = None,
    data: Annotated[
        Text, option("--data", "File, folder, hub name or file.py:load.", ALGORITHM)
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        option("--eval-data", "Data to evaluate on; repeatable.", ALGORITHM, metavar="DATA"),
    ] = None,
    reward: Annotated[
        list[str] | None,
        option(
            "--reward",
            "Reward, with a weight if wanted; repeatable.",
            ALGORITHM,
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
    lr: Annotated[Number, option("--lr", "Learning rate.", ALGORITHM)] = None,
    lora_rank: LoraRank = None,
    lora_alpha: LoraAlpha = None,
    lora_targets: LoraTargets = None,
    kl_coef: Annotated[
        Number, option("--kl-coef", "Weight of the KL to the reference model.", ALGORITHM)
    ] = None,
    aggregation: Annotated[
        Text,
        option(
            "--aggregation",
            "Reduction of the loss over tokens.",
            ALGORITHM,
            words("auto", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
        ),
    ] = None,
    temperature: Annotated[
        Number, option("--temperature", "Of sampling, and of the learner.", ALGORITHM)
    ] = None,
    seed: Annotated[Count, option("--seed", "Of everything random.", ALGORITHM)] = None,
    steps: Annotated[Count, option("--steps", "Training steps.", SIZES)] = None,
    groups: Annotated[Count, option("--groups", "P, tasks per step.", SIZES)] = None,
    group_size: Annotated[Count, option("--group-size", "G, rollouts per task.", SIZES)] = None,
    max_staleness: Annotated[
        Count,
        option("--max-staleness", "Steps that generation may run ahead; 0: takes turns.", SIZES),
    ] = None,
    max_new_tokens: Annotated[Count, option("--max-new-tokens", "Longest response.", SIZES)] = None,
    engine: Annotated[
        Text,
        option(
            "--engine",
            "Generates: vllm or transformers.",
            PLACES,
            words("vllm", "transformers"),
        ),
    ] = None,
    runtime: Runtime = None,
    ray_address: Annotated[
        Text, option("--ray-address", "A running Ray cluster to join, or auto.", PLACES)
    ] = None,
    colocate: Annotated[
        Text,
        option(
            "--colocate",
            "Roles that share GPUs.",
            PLACES,
            words("auto", "all", "actor_ref", "critic_reward", "none"),
        ),
    ] = None,
    output: Output = None,
    checkpoint_every: CheckpointEvery = None,
    eval_every: EvalEvery = None,
    tracker: Trackers = None,
    no_plugin: NoPlugin = None,
    no_rlxfile: NoRlxfile = False,
    config: ConfigFiles = None,
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
