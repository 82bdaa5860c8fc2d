"""Hook plugins on their way to worker processes: references, as for components.

A worker calls the plugins that the driver has chosen, from the same source, whatever else is
installed where it runs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlx.core.errors import UsageError
from rlx.core.hook_types import WorkerContext
from rlx.core.hooks import Hooks
from rlx.core.importing import extend_path, import_place

HOOK = "rlx_on_worker_start"


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRef:
    """A hook plugin by where it is found; picklable."""

    plugin: str
    """Its label, for messages: `rlx-foo:hooks`."""
    target: str
    """`pkg.mod:attr`, `pkg.mod:` for a module, or `/absolute/rlxfile.py:`."""
    source_hash: str | None = None
    """sha256 of the file that it is defined in."""
    search_path: tuple[str, ...] = ()
    distribution: str | None = None
    payload: None = None
    """Hook plugins are never pickled."""

    def load(self) -> Any:
        """Import the plugin in this process. Raises `UsageError` when it is not there."""
        place, _, attribute = self.target.rpartition(":")
        extend_path(self.search_path)
        try:
            module = import_place(place, self.source_hash)
        except (ModuleNotFoundError, FileNotFoundError) as error:
            raise UsageError(
                f"hook plugin {self.plugin!r} is not in this process: {error}",
                where=self.target,
                fix="install it on every node, or switch it off with --no-plugin",
            ) from error
        return operator.attrgetter(attribute)(module) if attribute else module


def call_in_worker(refs: Iterable[HookRef], ctx: WorkerContext) -> None:
    """Call `rlx_on_worker_start` of the driver's plugins; exceptions propagate.

    Raises:
        UsageError: a plugin is missing here, or its source is not the driver's.
    """
    hooks = Hooks()
    for ref in refs:
        hooks.register(ref.load(), ref.plugin)
        if ref.source_hash is not None and hooks.source_hash(ref.plugin) != ref.source_hash:
            raise UsageError(
                f"the source of hook plugin {ref.plugin!r} differs between the driver and this "
                "process",
                where=ref.target,
                fix="install the same version on every node, and don't edit it during a run",
            )
    hooks.control(HOOK, ctx=ctx)
