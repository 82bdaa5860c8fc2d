"""The components of an offline run, as references, and what they declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx.core.config import ComponentConfig, RunConfig
from rlx.core.errors import UsageError
from rlx.core.offline.needs import Needs, needs_of
from rlx.core.references import ComponentRef, shipped_modules
from rlx.core.selection import check_plain, located

if TYPE_CHECKING:
    from rlx.core.plugins import PluginSystem


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSelection:
    """References to all selected components; picklable."""

    objective: ComponentRef
    needs: Needs
    trackers: tuple[ComponentRef, ...]

    @property
    def components(self) -> tuple[ComponentRef, ...]:
        return (self.objective, *self.trackers)

    @property
    def rewards(self) -> tuple[tuple[ComponentRef, float], ...]:
        """None: nothing is generated."""
        return ()

    @property
    def requires(self) -> frozenset[str]:
        return self.needs.requires

    def manifest(self) -> list[dict[str, Any]]:
        """Provenance of every component, for `manifest.json`."""
        return [ref.describe() for ref in self.components]

    def shipped_modules(self) -> list[str]:
        """Files and packages that only the driver has, for Ray's `py_modules`."""
        return [str(path) for path in shipped_modules(self.components)]


def select_offline(
    config: RunConfig, plugins: PluginSystem, *, origins: Mapping[str, str] | None = None
) -> OfflineSelection:
    """Resolve the objective and the trackers, importing them.

    Raises:
        UsageError: an unknown name, a wrong parameter or tag, a component that can't be imported.
    """

    def resolve(kind: str, key: str, chosen: ComponentConfig) -> ComponentRef:
        try:
            ref = plugins.ref(kind, chosen.name, chosen.params, where=key)
            check_plain(ref, key)
            ref.load()
        except UsageError as error:
            raise located(error, key, origins or {}) from error.__cause__
        return ref

    objective = resolve("objectives", "objective", config.objective)
    return OfflineSelection(
        objective=objective,
        needs=needs_of(objective.resolve()),
        trackers=tuple(
            resolve("trackers", f"trackers.{index}", chosen)
            for index, chosen in enumerate(config.trackers)
        ),
    )
