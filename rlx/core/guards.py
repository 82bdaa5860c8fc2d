"""Notices a component that changes in place what it was given, which others go on to use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlx.core.errors import ComponentError
from rlx.core.inputs import Ragged
from rlx.core.ragged import Tensor


@contextmanager
def unchanged(x: Ragged, component: Any, kind: str) -> Iterator[None]:
    """Compare the inputs' in-place counters before and after a component ran.

    Raises:
        ComponentError: a tensor of `x` was written to; `kind` and the component's name say by whom.
    """
    before = {name: (tensor, tensor._version) for name, tensor in _tensors(x)}
    yield
    for name, (tensor, version) in before.items():
        if tensor._version != version:
            who = getattr(component, "name", getattr(component, "__name__", repr(component)))
            raise ComponentError(
                f"The {kind} '{who}' changed its input x.{name} in place, which others go on to "
                f"use: work on a copy, x.{name}.clone(), or use operations without a trailing "
                "underscore."
            )


def _tensors(x: Ragged) -> Iterator[tuple[str, Tensor]]:
    for name, value in x.__dict__.items():
        if isinstance(value, Tensor) and not value.is_inference():
            yield name, value
    for part, value in (x.get("parts") or {}).items():
        if not value.is_inference():
            yield f"parts[{part!r}]", value
