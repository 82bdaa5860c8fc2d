"""Distributions that misbehave in every way that a plugin can, as wheels."""

from __future__ import annotations

from pathlib import Path

from environment import write_wheel

SLOW_SECONDS = 5.0

_LOSS = "def same(x):\n    return -x.ratio * x.advantages * {factor}\n"
_RAISES = "raise RuntimeError('{name} was imported')\n"
_MISSPELT = """
import rlx

@rlx.hookimpl
def rlx_on_step_ends(step):
    raise AssertionError("never called")

@rlx.hookimpl
def rlx_on_checkpoint(path="nowhere"):
    raise AssertionError("a default is never filled")
"""
_TAKER = """
import rlx

def mine(x):
    return 0 * x.logprobs

@rlx.hookimpl
def rlx_register_losses(registry):
    registry.add("ppo", mine)
"""
_MIDRUN = """
import rlx

@rlx.hookimpl
def rlx_on_step_end(run, step, metrics):
    with (run.folder / "midrun.txt").open("a") as file:
        print(step, file=file)
    if step == 2:
        raise ValueError("the second step was too much")
"""
_VANDAL_HOOKS = """
import random

import numpy
import rlx

def reseed():
    import torch

    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    torch.rand(3)

@rlx.hookimpl
def rlx_configure(config):
    config.learner.lr = 0.5
    config.rewards.clear()

@rlx.hookimpl
def rlx_on_run_start(run):
    reseed()
    run.config.learner.lr = 0.5

@rlx.hookimpl(tryfirst=True)
def rlx_on_rollouts(groups):
    reseed()
    for group in groups:
        for rollout in group.rollouts:
            rollout.parts.clear()
            rollout.tokens[:] = 0

@rlx.hookimpl(tryfirst=True)
def rlx_step_metrics(batch):
    batch.rewards[:] = 0.0

@rlx.hookimpl(tryfirst=True)
def rlx_on_step_end(metrics):
    metrics.clear()

@rlx.hookimpl(tryfirst=True)
def rlx_should_stop(metrics):
    reseed()
    metrics.clear()

@rlx.hookimpl
def rlx_on_checkpoint():
    raise SystemExit(3)
"""
_VANDAL = """
def estimate(x):
    return x.rewards.sub_(1.0)

def lose(x):
    return -x.ratio * x.advantages.abs_()

def score(sample):
    sample.task["prompt"] = "another one"
    return float(len(sample.response))
"""


def damage(site: Path) -> None:
    """Leave behind what pip itself would not install."""
    for name, points, metadata in (
        (
            "damaged",
            "[rlx.losses]\nx = 1 + 1\n[rlx.loss]\ny = a:b\n",
            "Name: rlx-damaged\nVersion: 1\n",
        ),
        ("nameless", "[rlx.losses]\nx = a:b\n", ""),
    ):
        info = site / f"rlx_{name}-1.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(points)
        (info / "METADATA").write_text(metadata)


def wheels(folder: Path) -> list[Path]:
    """Write them all; their names say what is wrong with them."""
    slow = f"import time\n\ntime.sleep({SLOW_SECONDS})\n\n" + _LOSS.format(factor=1.0)
    return [
        *(
            write_wheel(
                folder,
                f"rlx-twin-{letter}",
                {"rlx.losses": {"same": f"twin_{letter}:same"}},
                {f"twin_{letter}.py": _LOSS.format(factor=factor)},
            )
            for letter, factor in (("a", 1.0), ("b", 2.0))
        ),
        write_wheel(
            folder,
            "rlx-raises",
            {
                "rlx": {"raises": "raises_hooks"},
                "rlx.losses": {"raises": "raises_loss:f"},
                "rlx.commands": {"raises": "raises_command:app"},
            },
            {
                f"raises_{part}.py": _RAISES.format(name=part)
                for part in ("hooks", "loss", "command")
            },
        ),
        write_wheel(
            folder,
            "rlx-quits",
            {
                "rlx": {"quits": "quits_hooks"},
                "rlx.losses": {"quits": "quits_loss:f"},
                "rlx.commands": {"quits": "quits_command:app"},
            },
            {f"quits_{part}.py": "raise SystemExit(0)\n" for part in ("hooks", "loss", "command")},
        ),
        write_wheel(
            folder,
            "rlx-slow",
            {"rlx.losses": {"slow": "slow_loss:same"}, "rlx.commands": {"slow": "slow_loss:app"}},
            {"slow_loss.py": slow},
        ),
        write_wheel(
            folder, "rlx-misspelt", {"rlx": {"misspelt": "misspelt"}}, {"misspelt.py": _MISSPELT}
        ),
        write_wheel(
            folder,
            "rlx-taker",
            {"rlx": {"taker": "taker"}, "rlx.estimators": {"group_norm": "taker:mine"}},
            {"taker.py": _TAKER},
        ),
        write_wheel(folder, "rlx-midrun", {"rlx": {"midrun": "midrun"}}, {"midrun.py": _MIDRUN}),
        write_wheel(
            folder,
            "rlx-vandal",
            {
                "rlx": {"vandal": "vandal_hooks"},
                "rlx.estimators": {"vandal": "vandal:estimate"},
                "rlx.losses": {"vandal": "vandal:lose"},
                "rlx.rewards": {"vandal": "vandal:score"},
            },
            {"vandal.py": _VANDAL, "vandal_hooks.py": _VANDAL_HOOKS},
        ),
    ]
