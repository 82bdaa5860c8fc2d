"""The built-in components, offered through the same hooks as anyone's; nothing is imported here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlx.core.hookspecs import hookimpl
from rlx.core.registry import Registrar

if TYPE_CHECKING:
    from rlx.core.references import ComponentRef

_ESTIMATORS: Final = (
    "group_norm",
    "gae",
    "reinforce",
    "reinforce_baseline",
    "rloo",
    "dr_grpo",
    "batch_mean",
    "opo",
    "gpg",
    "maxrl",
    "gdpo",
    "remax",
    "grpo_passk",
    "turn_returns",
)
_LOSSES: Final = (
    "ppo",
    "gspo",
    "cispo",
    "reinforce",
    "gmpo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
)
_CORRECTIONS: Final = ("none", "tis", "icepop", "seq_tis", "seq_mask_tis")
_REWARDS: Final = (
    "math",
    "exact_match",
    "regex",
    "overlong",
    "repetition",
    "stop_properly",
    "code",
)
_REWARD_CLASSES: Final = {"model": "Model", "judge": "Judge", "remote": "Remote"}
_REWARD_SCHEMES: Final = ("openrlhf:", "trl:", "verl:")
_AGENT_SCHEMES: Final = ("openrlhf:",)
_OBJECTIVES: Final = ("sft", "rm", "prm", "dpo", "ipo", "simpo", "orpo", "kto", "distill")
_AGENTS: Final = ("single_turn", "retry")
_AGENT_CLASSES: Final = {
    "python_repl": "PythonRepl",
    "tool_calling": "ToolCalling",
    "openai": "OpenAIAgent",
}
_SAMPLERS: Final = {"uniform": "Uniform", "dynamic": "Dynamic", "curriculum": "Curriculum"}
_TRACKERS: Final = {
    "jsonl": "Jsonl",
    "console": "Console",
    "tensorboard": "TensorBoard",
    "wandb": "WandB",
}


def _add_functions(registry: Registrar, names: tuple[str, ...]) -> None:
    for name in names:
        registry.add(name, f"rlx.plugins.{registry.kind}.{name}:{name}")


@hookimpl
def rlx_register_estimators(registry: Registrar) -> None:
    _add_functions(registry, _ESTIMATORS)


@hookimpl
def rlx_register_losses(registry: Registrar) -> None:
    _add_functions(registry, _LOSSES)


@hookimpl
def rlx_register_corrections(registry: Registrar) -> None:
    _add_functions(registry, _CORRECTIONS)


@hookimpl
def rlx_register_rewards(registry: Registrar) -> None:
    _add_functions(registry, _REWARDS)
    for name, attribute in _REWARD_CLASSES.items():
        registry.add(name, f"rlx.plugins.rewards.{name}:{attribute}")


@hookimpl
def rlx_resolve(kind: str, ref: str) -> ComponentRef | None:
    if kind == "rewards" and ref.startswith(_REWARD_SCHEMES):
        from rlx.plugins.rewards import adapters

        return adapters.resolve(ref)
    if kind == "agents" and ref.startswith(_AGENT_SCHEMES):
        from rlx.plugins.agents import openrlhf

        return openrlhf.resolve(ref)
    if kind == "rewards" and ref.startswith("model:"):
        return _model_by_path(ref)
    return None


def _model_by_path(ref: str) -> ComponentRef | None:
    """`model:PATH`, the reward model in a folder; None where `model` is a module."""
    from rlx.core.references import ComponentRef

    path = Path(ref.removeprefix("model:")).expanduser()
    if not path.is_dir():
        return None
    target = f"rlx.plugins.rewards.model:{_REWARD_CLASSES['model']}"
    return ComponentRef(
        kind="rewards", name=ref, target=target, params={"model": str(path.resolve())}
    )


@hookimpl
def rlx_register_objectives(registry: Registrar) -> None:
    _add_functions(registry, _OBJECTIVES)


@hookimpl
def rlx_register_agents(registry: Registrar) -> None:
    _add_functions(registry, _AGENTS)
    for name, attribute in _AGENT_CLASSES.items():
        registry.add(name, f"rlx.plugins.agents.{name}:{attribute}")


@hookimpl
def rlx_register_samplers(registry: Registrar) -> None:
    for name, attribute in _SAMPLERS.items():
        registry.add(name, f"rlx.plugins.samplers.{name}:{attribute}")


@hookimpl
def rlx_register_trackers(registry: Registrar) -> None:
    for name, attribute in _TRACKERS.items():
        registry.add(name, f"rlx.plugins.trackers.{name}:{attribute}")
