"""Settings that need an accelerator or a package: what lacks is said before the model is loaded."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from rlx.core.config import LearnerConfig
from rlx.core.errors import UsageError

FLASH = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Attention → the package that it needs."""


def check_settings(settings: LearnerConfig, device: torch.device) -> None:
    """
    Raises:
        UsageError: what is asked for can't be had on this machine.
    """
    package = FLASH.get(settings.attention)
    if package is not None:
        _need_package(package, "learner.attention", settings.attention, "auto")
        _need_accelerator(device, "learner.attention", settings.attention, "auto")
        if settings.shared_prefix == "on":
            raise UsageError(
                f"{settings.attention} can't share prefixes.",
                where="learner.shared_prefix",
                fix="learner.shared_prefix: auto (or learner.attention: auto)",
            )
    if settings.liger:
        _need_package("liger_kernel", "learner.liger", True, False)
        _need_accelerator(device, "learner.liger", True, False)
    for name in ("offload_optimizer", "sleep"):
        if getattr(settings, name):
            _need_accelerator(device, f"learner.{name}", True, False)
            if settings.zero_stage == 0:
                raise UsageError(
                    f"learner.{name} needs a sharded optimizer.",
                    where="learner.zero_stage",
                    fix="learner.zero_stage: 1 (or unset)",
                )


def _need_package(package: str, where: str, value: Any, instead: Any) -> None:
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"{where}: {_text(value)} needs the package '{package}', which is not installed.",
            where=where,
            fix=f"{where}: {_text(instead)}",
        )


def _need_accelerator(device: torch.device, where: str, value: Any, instead: Any) -> None:
    if device.type == "cpu":
        raise UsageError(
            f"{where}: {_text(value)} needs an accelerator, and the learner is on a CPU.",
            where=where,
            fix=f"{where}: {_text(instead)}",
        )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
