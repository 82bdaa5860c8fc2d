"""What `rlx eval` and `rlx generate` have in common: a rollout engine and rewards, no learner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlx.core.config import RunConfig
from rlx.core.engine import workers
from rlx.core.engine.collector import unwrap
from rlx.core.engine.crew import Crew
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.prepare import load_tokenizer
from rlx.core.engine.reaper import start_reaper, stop_reaper
from rlx.core.engine.rewards import RewardRunner
from rlx.core.engine.signals import STOPPED, Signals, stopped_by
from rlx.core.errors import RunInterrupted
from rlx.core.models import ModelInfo, policy_info, resolve_model
from rlx.core.plugins import PluginSystem
from rlx.core.preflight import check
from rlx.core.preflight_case import Finding, Rule
from rlx.core.selection import Selection, select

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that is known before the data is read."""

    config: RunConfig
    selection: Selection
    plugins: PluginSystem
    model: str
    info: ModelInfo
    tokenizer: Any
    context_length: int
    """What the engine could take, before the data's limits."""
    warnings: tuple[Finding, ...]

    def needed_context(self, new_tokens: int) -> int:
        """The engines' context: no longer than prompts of `data.max_prompt_tokens` need."""
        config = self.config
        if config.rollout.context_length is None and config.data.max_prompt_tokens is not None:
            return min(self.context_length, config.data.max_prompt_tokens + new_tokens)
        return self.context_length


def set_up(
    config: RunConfig,
    *,
    plugins: PluginSystem | None,
    origins: Mapping[str, str] | None,
    rules: tuple[Rule, ...],
) -> Setup:
    """Check names, parameters and sizes; start nothing. Raises UsageError."""
    plugins = plugins or PluginSystem.load(
        disable=config.plugins.disable, required=config.plugins.required
    )
    selection = select(config, plugins, origins=origins)
    model = resolve_model(config.model)
    info = policy_info(model)
    findings = check(config, selection, info, origins=origins, rules=rules)
    plugins.control("rlx_configure", config=config)
    return Setup(
        config=config,
        selection=selection,
        plugins=plugins,
        model=model,
        info=info,
        tokenizer=load_tokenizer(model, config.data, selection.agent),
        context_length=min(
            info.context_length, config.rollout.context_length or info.context_length
        ),
        warnings=tuple(findings),
    )


def run_inference(
    setup: Setup,
    use: Callable[[RolloutEngines, RewardRunner], Awaitable[T]],
    *,
    context_length: int,
    folder: Path,
    status: Callable[[str], None],
) -> T:
    """Start an engine and the rewards, await `use`, end every worker.

    Args:
        context_length: of the engine.
        folder: where the workers' logs go.
        status: told what is being waited for.

    Raises:
        EngineError: a worker failed.
        RunInterrupted: Ctrl-C or SIGTERM.
    """
    return asyncio.run(_run(setup, use, context_length, folder, status))


async def _run(
    setup: Setup,
    use: Callable[[RolloutEngines, RewardRunner], Awaitable[T]],
    context_length: int,
    folder: Path,
    status: Callable[[str], None],
) -> T:
    main = asyncio.current_task()
    assert main is not None
    crew = Crew(setup.config, setup.selection, plugins=setup.plugins, folder=folder, status=status)
    reaper = start_reaper()
    with Signals(
        lambda number: main.cancel(),
        where=lambda: "sampling",
        saved=lambda: f"what is done is in {folder}",
    ) as signals:
        try:
            engines, rewards = await _start(setup, crew, context_length)
            return await use(engines, rewards)
        except BaseException as error:
            found = unwrap(error)
            if signals.number is not None and isinstance(found, STOPPED):
                text = stopped_by(signals.number)
                raise RunInterrupted(text, signal=signals.number) from None
            if found is error:
                raise
            raise found from None
        finally:
            await crew.close()
            stop_reaper(reaper)


async def _start(
    setup: Setup, crew: Crew, context_length: int
) -> tuple[RolloutEngines, RewardRunner]:
    config = setup.config
    reward_specs = workers.reward_specs(config, setup.selection)
    dtype = setup.info.dtype if config.learner.dtype == "auto" else config.learner.dtype
    engine_specs = workers.engine_specs(
        config,
        setup.model,
        context_length=context_length,
        dtype=dtype if config.rollout.dtype == "auto" else config.rollout.dtype,
    )
    started = await crew.start([*engine_specs, *reward_specs])
    engines = workers.rollout_engines(
        config, crew.settled(engine_specs), started, renew=crew.engine_renewal()
    )
    return engines, crew.reward_runner(reward_specs, started)
