"""What a command loads before it works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.cli.output import print_notice

if TYPE_CHECKING:
    from rlx.core.config import RunConfig
    from rlx.core.plugins import PluginSystem


def loaded_plugins(config: RunConfig) -> PluginSystem:
    """The plugins that the settings leave, after their notices."""
    from rlx.core.plugins import PluginSystem

    plugins = PluginSystem.load(disable=config.plugins.disable, required=config.plugins.required)
    for notice in plugins.notices:
        print_notice(notice)
    return plugins
