"""Whether the packages that selected components import only when they run are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

from rlx.core.component import singular, tags_of
from rlx.core.preflight_case import Finding, error
from rlx.core.references import ComponentRef


def check_libraries(components: Sequence[ComponentRef]) -> Iterator[Finding]:
    """An error for each package that is missing."""
    for ref in components:
        for library in tags_of(ref.load()).libraries:
            if importlib.util.find_spec(library) is None:
                yield error(
                    f"the {singular(ref.kind)} '{ref.name}' needs the package {library}, which is "
                    "not installed",
                    ref.kind,
                    f"`pip install {library}`, or leave it out",
                )
