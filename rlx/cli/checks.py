"""What `train` and `plan` check before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.cli.loading import loaded_plugins
from rlx.cli.output import print_warning
from rlx.core.settings import Settings

if TYPE_CHECKING:
    from rlx.core.models import ModelInfo
    from rlx.core.plugins import PluginSystem
    from rlx.core.selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What came out of the checks."""

    plugins: PluginSystem
    selection: Selection
    info: ModelInfo


def checked(settings: Settings, *, resume: bool, elsewhere: bool = False) -> Checked:
    """Check names, parameters, the model and all relations; print the warnings.

    Args:
        elsewhere: the run is not to be on this machine, whose devices and disk say nothing then.

    Raises:
        UsageError: with what is wrong, where it was set and what to write instead.
    """
    from rlx.core.models import policy_info
    from rlx.core.preflight import ELSEWHERE_RULES, check
    from rlx.core.run import default_folder
    from rlx.core.selection import select

    config = settings.config
    plugins = loaded_plugins(config)
    info = policy_info(config.model, where=f"model ({settings.origin('model')})")
    selection = select(config, plugins, origins=settings.origins)
    output = config.output or (None if resume else default_folder(config, Path("runs")))
    whole = config.model_copy(update={"output": output})
    findings = check(
        whole,
        selection,
        info,
        resume=resume,
        origins=settings.origins,
        rules=ELSEWHERE_RULES if elsewhere else None,
    )
    for finding in findings:
        print_warning(finding.what, finding.fix)
    return Checked(plugins=plugins, selection=selection, info=info)
