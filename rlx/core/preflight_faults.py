"""Whether `faults.*` fits the run: what is to be gone back to must be there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlx.core.config import RunConfig
from rlx.core.metric_names import misspelt
from rlx.core.preflight_case import Case, Finding, error, warning
from rlx.core.references import ComponentRef
from rlx.core.registry import BUILTIN

_FAMILIES: Mapping[str, set[str]] = {
    "rewards": {"reward"},
    "losses": {"policy"},
    "corrections": {"policy", "correction"},
    "objectives": {"train"},
    "trackers": set(),
}
"""Kind of component → families that metrics of its own may be in; other kinds': any."""
_EVERY = "`--checkpoint-every N`"


def check_faults(case: Case) -> Iterator[Finding]:
    """Yield what is wrong with `faults.*`, and what has no effect."""
    config = case.config
    yield from bounds_findings(config.faults.bounds, case.selection.components)
    yield from restart_findings(config)
    if config.faults.divergence == "rollback":
        if not config.checkpoint.every:
            yield error(
                "there are no checkpoints to roll back to while the run goes on",
                "faults.divergence",
                f"{_EVERY} with it",
            )
        if config.replay is not None:
            yield error(
                "recorded rollouts would lead to the same place again after a rollback",
                "faults.divergence",
                "`stop`, or a run with an engine",
            )


def bounds_findings(bounds: Iterable[str], components: Sequence[ComponentRef]) -> Iterator[Finding]:
    """Names that can only be misspelt. Whatever else no step has is told after the first one."""
    for name in bounds:
        family = name.partition("/")[0]
        own = [ref.name for ref in components]
        foreign = {ref.kind for ref in components if ref.distribution != BUILTIN}
        if any(family in _FAMILIES.get(kind, {family}) for kind in foreign):
            own.append(family)
        if (meant := misspelt(name, own)) is not None:
            hint = f"did you mean {meant!r}?" if meant else "docs/metrics.md lists them"
            yield error(f"faults.bounds: there is no metric {name!r}", "faults.bounds", hint)


def restart_findings(config: RunConfig) -> Iterator[Finding]:
    """The same of `faults.learner`, for training of every kind."""
    if config.faults.learner != "restart":
        return
    if config.runtime.kind == "inline":
        yield warning(
            "faults.learner has no effect: inline, a learner that dies takes the driver with it",
            "faults.learner",
            "`--runtime ray`",
        )
    elif not config.checkpoint.every:
        yield error(
            "a learner can't be started anew from a checkpoint: none is written while the run "
            "goes on",
            "faults.learner",
            f"{_EVERY} with it",
        )
