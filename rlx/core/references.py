"""References: what travels to workers in place of a component, and how it becomes callable there.

A `ComponentRef` is a frozen, picklable value; `resolve()` imports the target in whichever process
it is called and gives a `Bound`. Registries, plugin managers and closures never travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from rlx.core.component import Bound as Bound
from rlx.core.component import singular
from rlx.core.errors import RlxError, UsageError
from rlx.core.importing import extend_path, import_target, plugin_traceback, source_files
from rlx.core.parameters import parameter_values, validate_parameters
from rlx.core.shipping import shipped_modules as shipped_modules

_OWN = ("rlx/core/references.py", "rlx/core/component.py")
_live: dict[str, Any] = {}
"""Objects of this process's `__main__` by payload digest, so that the driver keeps the original."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentRef:
    """A component by where it is found, with its parameters; resolvable in every process."""

    kind: str
    name: str
    """As selected: a registered name, `dist/name`, `pkg.mod:attr` or `file.py:attr`."""
    target: str
    """`pkg.mod:attr`, or `/absolute/path.py:attr`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """What was set, checked, as plain values; defaults come from the signature."""
    distribution: str | None = None
    version: str | None = None
    source_hash: str | None = None
    """sha256 over the source files of the target, which `resolve` compares; with a payload, of the
    object's own text."""
    search_path: tuple[str, ...] = ()
    """Folders that are appended to `sys.path` before the import."""
    payload: bytes | None = None
    """The object itself (cloudpickle), where no other process could import it."""
    adapter: str | None = None
    """`pkg.mod:function` that makes the component out of the object at the target."""

    def resolve(self) -> Bound:
        """Import the target and bind the parameters. Raises `UsageError` when that fails here."""
        obj = self.load()
        label = f"{singular(self.kind)} {self.name!r}"
        model = validate_parameters(obj, self.params, label=label)
        try:
            return Bound(ref=self, obj=obj, params=parameter_values(model))
        except RlxError:
            raise
        except Exception as error:
            raise UsageError(
                f"{label} could not be constructed:\n\n{plugin_traceback(error, without=_OWN)}",
                where=self.target,
                fix="other parameters, or repair the component: the traceback above is its own",
            ) from error

    def load(self) -> Any:
        """Return the function or class, unbound; checks that the source is the driver's."""
        label = f"{singular(self.kind)} {self.name!r}"
        if self.payload is not None:
            digest = hashlib.sha256(self.payload).hexdigest()
            if digest not in _live:
                extend_path(self.search_path)
                _live[digest] = cloudpickle.loads(self.payload)
            return _live[digest]
        obj = import_target(
            self.target, label=label, search_path=self.search_path, source_hash=self.source_hash
        )
        if self.source_hash and (found := source_hash(obj, self.target)) != self.source_hash:
            raise UsageError(
                f"the source of {label} differs between the driver and this process "
                f"({self.source_hash[:12]} there, {str(found)[:12]} here)",
                where=", ".join(str(path) for path in source_files(obj, self.target)),
                fix=f"install the same version of {self.distribution or self.target} on every "
                "node, and don't edit it during a run",
            )
        return obj if self.adapter is None else import_target(self.adapter, label=label)(obj)

    def describe(self) -> dict[str, Any]:
        """Return the provenance of the component for a run's manifest."""
        return {
            "kind": self.kind,
            "name": self.name,
            "target": self.target,
            "params": dict(self.params),
            "distribution": self.distribution,
            "version": self.version,
            "source_hash": self.source_hash,
            "pickled": self.payload is not None,
        }


def source_hash(obj: Any, target: str) -> str | None:
    """Return the sha256 over the target's module and the module that defines the object."""
    files = source_files(obj, target)
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()


def pickle_object(obj: Any) -> bytes:
    """Return the payload of an object that only this process has, and keep the original at hand."""
    payload: bytes = cloudpickle.dumps(obj)
    _live[hashlib.sha256(payload).hexdigest()] = obj
    return payload
