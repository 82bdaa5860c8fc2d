"""The hooks through which plugins offer components by name, one per kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.core.hook_types import spec

if TYPE_CHECKING:
    from rlx.core.registry import Registrar


@spec("collect")
def rlx_register_estimators(registry: Registrar) -> None:
    """Offer advantage estimators by name.

    When: at start, before anything is selected.
    Process: driver.
    Mode: collect; every implementation is called.
    On failure: the plugin is listed as broken with a warning, and the rest goes on
    (`RLX_STRICT_PLUGINS=1` raises).

    Args:
        registry: `registry.add(name, target)` offers an advantage estimator. A target
            `"package.module:attr"` is imported when the name is selected; an object is taken as
            it is.

    Example:
        import rlx

        def zscore(x, *, eps: float = 1e-6):
            return (x.rewards - x.group_mean(x.rewards)) / (x.group_std(x.rewards) + eps)

        @rlx.hookimpl
        def rlx_register_estimators(registry):
            registry.add("zscore", zscore)
    """


@spec("collect")
def rlx_register_losses(registry: Registrar) -> None:
    """Offer policy losses by name.

    When: at start, before anything is selected.
    Process: driver.
    Mode: collect; every implementation is called.
    On failure: the plugin is listed as broken with a warning, and the rest goes on
    (`RLX_STRICT_PLUGINS=1` raises).

    Args:
        registry: `registry.add(name, target)` offers a policy loss. A target
            `"package.module:attr"` is imported when the name is selected; an object is taken as
            it is.

    Example:
        import rlx

        def plain_pg(x):
            return -x.ratio * x.advantages

        @rlx.hookimpl
        def rlx_register_losses(registry):
            registry.add("plain_pg", plain_pg)
    """


@spec("collect")
def rlx_register_rewards(registry: Registrar) -> None:
    """Offer rewards by name.

    When: at start, before anything is selected.
    Process: driver.
    Mode: collect; every implementation is called.
    On failure: the plugin is listed as broken with a warning, and the rest goes on
    (`RLX_STRICT_PLUGINS=1` raises).

    Args:
        registry: `registry.add(name, target)` offers a reward. A target
            `"package.module:attr"` is imported when the name is selected; an object is taken as
            it is.

    Example:
        import rlx

        def short(sample, *, limit: int = 100) -> float:
            return float(len(sample.response) <= limit)

        @rlx.hookimpl
        def rlx_register_rewards(registry):
            registry.add("short", short)
    """


@spec("collect")
def rlx_register_agents(registry: Registrar) -> None:
    """Offer agents by name.

    When: at start, before anything is selected.
    Process: driver.
    Mode: collect; every implementation is called.
    On failure: the plugin is listed as broken with a warning, and the rest goes on
    (`RLX_STRICT_PLUGINS=1` raises).

    Args:
        registry: `registry.add(name, target)` offers an agent. A target
            `"package.module:attr"` is imported when the name is selected; an object is taken as
            it is.

    Example:
        import rlx

        async def one_hint(turn, *, hint: str = "Try again."):
            from rlx import Step

            return Step(observation=hint, reward=0.0, done=turn.index > 0)

        @rlx.hookimpl
        def rlx_register_agents(registry):
            registry.add("one_hint", one_hint)
    """


@spec("collect")
def rlx_register_samplers(registry: Registrar) -> None:
    """Offer samplers by name.

    When: at start, before anything is selected.
    Process: driver.
    Mode: collect; every implementation is called.
    On failure: the plugin is listed as broken with a warning, and the rest goes on
    (`RLX_STRICT_PLUGINS=1` raises).

    Args:
        registry: `registry.add(name, target)` offers a sampler. A target
            `"package.module:attr"` is imported when the name is selected; an object is taken as
            it is.

    Example:
        import rlx

        def mixed_only(group) -> bool:
            return len(set(group.rewards)) > 1

        @rlx.hookimpl
        def rlx_register_samplers(registry):
            registry.add("mixed_only", mixed_only)
    """


@spec("collect")
def rlx_register_corrections(registry: Registrar) -> None:
    """Offer corrections of the engine/learner mismatch by name.

    When: at start, before anything is selected.
    Process: driver.
    Mode: collect; every implementation is called.
    On failure: the plugin is listed as broken with a warning, and the rest goes on
    (`RLX_STRICT_PLUGINS=1` raises).

    Args:
        registry: `registry.add(name, target)` offers a correction. A target
            `"package.module:attr"` is imported when the name is selected; an object is taken as
            it is.

    Example:
        import rlx

        def half_clip(x, *, high: float = 1.5):
            return x.ratio.clamp(max=high)

        @rlx.hookimpl
        def rlx_register_corrections(registry):
            registry.add("half_clip", half_clip)
    """


@spec("collect")
def rlx_register_objectives(registry: Registrar) -> None:
    """Offer offline training objectives by name.

    When: at start, before anything is selected.
    Process: driver.
    Mode: collect; every implementation is called.
    On failure: the plugin is listed as broken with a warning, and the rest goes on
    (`RLX_STRICT_PLUGINS=1` raises).

    Args:
        registry: `registry.add(name, target)` offers an offline objective. A target
            `"package.module:attr"` is imported when the name is selected; an object is taken as
            it is.

    Example:
        import rlx

        def nll(x):
            return -x.logprobs

        @rlx.hookimpl
        def rlx_register_objectives(registry):
            registry.add("nll", nll)
    """


@spec("collect")
def rlx_register_trackers(registry: Registrar) -> None:
    """Offer trackers by name.

    When: at start, before anything is selected.
    Process: driver.
    Mode: collect; every implementation is called.
    On failure: the plugin is listed as broken with a warning, and the rest goes on
    (`RLX_STRICT_PLUGINS=1` raises).

    Args:
        registry: `registry.add(name, target)` offers a tracker. A target
            `"package.module:attr"` is imported when the name is selected; an object is taken as
            it is.

    Example:
        import rlx

        class Stdout:
            def log(self, step, metrics):
                print(step, dict(metrics))

            def log_samples(self, step, samples):
                pass

            def close(self):
                pass

        @rlx.hookimpl
        def rlx_register_trackers(registry):
            registry.add("stdout", Stdout)
    """
