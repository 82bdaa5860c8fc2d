"""How a batch gets to those who read it: each array once, however many ranks read it how often.

A step's batch is read in several phases (old log-probs, reference, critic, update) by several
ranks. Under Ray an array is put into the object store when it is first needed and stays there as
long as the driver has it; a rank maps it into its memory and takes its own rollouts out of it. So
neither phases nor ranks add to what the driver copies and sends.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlx.core.engine.batches import take
from rlx.core.rollouts import TrainBatch

_SMALL = 100 * 1024
"""Bytes up to which an array goes along with the call, as Ray itself does with arguments."""


class Depot(Protocol):
    def part(self, batch: TrainBatch, rollouts: np.ndarray) -> Any:
        """An argument that a worker's method gets as the sub-batch of `rollouts`."""
        ...


class LocalDepot:
    """For workers in the driver's process."""

    def part(self, batch: TrainBatch, rollouts: np.ndarray) -> TrainBatch:
        return take(batch, rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A part of a batch on its way."""

    fields: Mapping[str, Any]
    """Each array of the batch, or Ray's reference to it."""
    rollouts: np.ndarray

    def unpack(self) -> TrainBatch:
        """The part, in memory of its own; blocks until the arrays have come to this node."""
        import ray

        stored = {name: one for name, one in self.fields.items() if isinstance(one, ray.ObjectRef)}
        found = dict(zip(stored, ray.get(list(stored.values())), strict=True))
        return take(TrainBatch(**{**self.fields, **found}), self.rollouts)


def unpacked(argument: Any) -> Any:
    """A parcel's contents, also of each parcel in a list; anything else as it is."""
    if isinstance(argument, Parcel):
        return argument.unpack()
    if isinstance(argument, list):
        return [unpacked(one) for one in argument]
    return argument


class RayDepot:
    """For workers in Ray actors."""

    def __init__(self) -> None:
        self._references: dict[int, Any] = {}

    def part(self, batch: TrainBatch, rollouts: np.ndarray) -> Parcel:
        values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        stored = {name: self._stored(value) for name, value in values.items()}
        return Parcel(fields=stored, rollouts=rollouts)

    def _stored(self, array: np.ndarray | None) -> Any:
        """The array itself when it is small, else its reference, put into the store once."""
        if array is None or array.nbytes <= _SMALL:
            return array
        if id(array) not in self._references:
            import ray

            self._references[id(array)] = ray.put(array)
            # As long as the array lives, no other one has its id.
            weakref.finalize(array, self._references.pop, id(array), None).atexit = False
        return self._references[id(array)]

    def close(self) -> None:
        """Let go of everything: references must not outlive Ray."""
        self._references.clear()
