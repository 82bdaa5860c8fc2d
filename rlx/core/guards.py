"""What goes wrong inside of a component is said to be that component's: a change of its inputs in
place, which others go on to use, and an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlx.core.errors import ComponentError, RlxError
from rlx.core.inputs import Ragged
from rlx.core.ragged import Tensor


@contextmanager
def unchanged(x: Ragged, component: Any, kind: str) -> Iterator[None]:
    """Compare the inputs' in-place counters before and after a component ran.

    Raises:
        ComponentError: a tensor of `x` was written to, or the component raised something that is
            no error of rlx; `kind` and the component's name say by whom.
    """
    before = {name: (tensor, tensor._version) for name, tensor in _tensors(x)}
    who = getattr(component, "name", getattr(component, "__name__", repr(component)))
    try:
        yield
    except (RlxError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ComponentError(
            f"The {kind} '{who}' raised {type(error).__name__}: {error}"
        ) from error
    for name, (tensor, version) in before.items():
        if tensor._version != version:
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
