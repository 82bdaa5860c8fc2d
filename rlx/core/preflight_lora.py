"""Rules about low-rank adapters, of RL and of training on fixed data."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.core.config import LoraConfig, RunConfig
from rlx.core.config_lora import ALL_LINEAR
from rlx.core.errors import did_you_mean
from rlx.core.machine import find_gpus
from rlx.core.model_layers import ends_with, linear_layers, module_names
from rlx.core.models import ModelInfo
from rlx.core.preflight_case import Case, Finding, error, warning
from rlx.core.run import CONFIG_NAME
from rlx.core.yaml_text import parse_file

_LOWEST_RATE = 1e-5
"""Below it an adapter hardly moves: what is right for all weights is a tenth of what is for it."""
_CPU_BITSANDBYTES = (0, 46)
"""First release of bitsandbytes that computes in 4 bits without a GPU."""


def check_lora(case: Case) -> Iterator[Finding]:
    """The adapters' settings fit the model, the learner and this machine."""
    yield from lora_complaints(case.config, case.info)


def lora_complaints(config: RunConfig, info: ModelInfo) -> Iterator[Finding]:
    """What is wrong with `learner.lora`."""
    lora = config.learner.lora
    if not lora.enabled:
        yield from _without_rank(lora)
        return
    if importlib.util.find_spec("peft") is None:
        yield error("peft is not installed", "learner.lora.rank", "pip install peft")
    if config.learner.lr < _LOWEST_RATE:
        yield warning(
            f"a learning rate of {config.learner.lr:g} hardly moves an adapter",
            "learner.lr",
            "about ten times the rate that all weights are trained with, such as `--lr 1e-4`",
        )
    yield from _targets(lora, info)
    yield from _whole_modules(lora, info)
    if lora.dora and config.learner.zero_stage == 3:
        yield error(
            "DoRA reads whole weights, which ZeRO 3 takes apart",
            "learner.lora.dora",
            "learner.zero_stage: 2 (or lower), or no DoRA",
        )
    if lora.quantization is not None:
        yield from _quantization(config)


def _without_rank(lora: LoraConfig) -> Iterator[Finding]:
    if lora.quantization is not None:
        yield error(
            "weights in 4 bits can't be trained themselves",
            "learner.lora.quantization",
            "`--lora-rank 16`, for adapters beside them; or leave it out",
        )
    for name, value in lora:
        if name not in ("rank", "quantization") and value != getattr(LoraConfig(), name):
            yield warning(
                f"learner.lora.{name} has no effect while learner.lora.rank is unset",
                f"learner.lora.{name}",
                "`--lora-rank 16`, or leave it out",
            )


def _targets(lora: LoraConfig, info: ModelInfo) -> Iterator[Finding]:
    layers = linear_layers(info)
    if not layers or lora.target_modules == [ALL_LINEAR]:
        return
    known = sorted({name.rpartition(".")[2] for name in layers})
    for wanted in lora.target_modules:
        if not any(ends_with(name, wanted) for name in layers):
            near = did_you_mean(wanted, [*known, ALL_LINEAR])
            yield error(
                f"the model has no linear layer {wanted!r}",
                "learner.lora.target_modules",
                f"{near} ".lstrip() + f"there are: {', '.join(known)} (or {ALL_LINEAR})",
            )


def _whole_modules(lora: LoraConfig, info: ModelInfo) -> Iterator[Finding]:
    names = module_names(info)
    for wanted in lora.modules_to_save if names else ():
        found = [name for name in names if ends_with(name, wanted)]
        if info.tied and (wanted == "lm_head" or any("embed" in name for name in found)):
            yield error(
                f"{wanted} is tied: the model's head and its embedding are one tensor, which can't "
                "be trained in one place alone",
                "learner.lora.modules_to_save",
                "leave it out; to move the embedding, train all weights",
            )
        elif not found:
            known = sorted({name.rpartition(".")[2] for name in names})
            yield error(
                f"the model has no module {wanted!r}",
                "learner.lora.modules_to_save",
                did_you_mean(wanted, known) or f"one of: {', '.join(known)}",
            )


def _quantization(config: RunConfig) -> Iterator[Finding]:
    key = "learner.lora.quantization"
    if config.learner.zero_stage == 3:
        yield error(
            "ZeRO 3 can't take weights in 4 bits apart",
            key,
            "learner.zero_stage: 2 (or lower)",
        )
    found = importlib.util.find_spec("bitsandbytes")
    if found is None:
        yield error(
            "weights in 4 bits need bitsandbytes, which is not installed",
            key,
            "`pip install 'rlx[qlora]'`, or leave learner.lora.quantization out",
        )
    elif not find_gpus() and _bitsandbytes() < _CPU_BITSANDBYTES:
        yield error(
            "this release of bitsandbytes computes in 4 bits on GPUs only, and there is none",
            key,
            "`pip install -U bitsandbytes`, or leave learner.lora.quantization out",
        )


def _bitsandbytes() -> tuple[int, ...]:
    from importlib.metadata import version

    return tuple(int(part) for part in version("bitsandbytes").split(".")[:2] if part.isdigit())


def resumed_complaints(config: RunConfig) -> Iterator[Finding]:
    """A resumed run has the adapters that it was started with; only their dropout may change."""
    path = (config.output or Path()) / CONFIG_NAME
    if not path.is_file():
        return
    tree: Any = parse_file(path.read_text(encoding="utf-8"), str(path))[0] or {}
    before = ((tree.get("learner") or {}).get("lora")) or {}
    for name, now in config.learner.lora.model_dump(mode="json").items():
        was = before.get(name, getattr(LoraConfig(), name))
        if name != "dropout" and now != was:
            yield error(
                f"the run was started with learner.lora.{name} {_shown(was)}, not {_shown(now)}",
                f"learner.lora.{name}",
                f"`--set learner.lora.{name}={_shown(was)}`, or start a new run",
            )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
    )
