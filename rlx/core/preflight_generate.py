"""Whether the settings of batch generation fit together."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.core.config import GenerateConfig, RunConfig
from rlx.core.preflight_case import Case, Finding, error

_RANKED = {"best", "pairs"}
_REWARDED = {*_RANKED, "conditioned"}


def check_generation(case: Case) -> Iterator[Finding]:
    """There is something to choose among, something to choose by, and it can be written."""
    config = case.config
    settings = config.generate
    yield from _check_samples(settings)
    yield from _check_condition(settings)
    rewarded = sorted(_REWARDED & set(settings.select))
    if not rewarded:
        return
    if all(weight == 0 for _, weight in case.selection.rewards) and not _own_agent(config):
        yield error(
            f"`{rewarded[0]}` needs rewards, and none is selected",
            "rewards",
            "`--reward NAME` (`rlx plugins list rewards`)",
        )


def _check_samples(settings: GenerateConfig) -> Iterator[Finding]:
    if settings.samples > 1 and settings.temperature == 0:
        yield error(
            f"{settings.samples} greedy samples of a task would all be the same",
            "generate.temperature",
            "a temperature above 0, or `--samples 1`",
        )
    if "pairs" in settings.select and settings.samples < 2:
        yield error(
            "a pair needs two samples of a task", "generate.samples", "`--samples 2` or more"
        )
    if "best" in settings.select and settings.keep > settings.samples:
        yield error(
            f"the best {settings.keep} of {settings.samples} samples can't be kept",
            "generate.keep",
            f"at most {settings.samples}, or more `--samples`",
        )


def _check_condition(settings: GenerateConfig) -> Iterator[Finding]:
    if "conditioned" not in settings.select:
        return
    fix = "for example '{prompt}\\nReward: {reward:.1f}'"
    try:
        texts = {settings.condition.format(prompt="\0", reward=reward) for reward in (0.0, 1.0)}
    except (KeyError, ValueError, IndexError, AttributeError, TypeError) as problem:
        what = f"{type(problem).__name__}: {problem}"
        yield error(f"generate.condition can't be filled: {what}", "generate.condition", fix)
        return
    if not all("\0" in text for text in texts) or len(texts) < 2:
        missing = "{reward}" if len(texts) < 2 else "{prompt}"
        yield error(f"generate.condition has no {missing}", "generate.condition", fix)


def _own_agent(config: RunConfig) -> bool:
    """Another agent than the default one may give rewards itself."""
    return (
        config.agent.name
        != RunConfig.model_fields["agent"].get_default(call_default_factory=True).name
    )
