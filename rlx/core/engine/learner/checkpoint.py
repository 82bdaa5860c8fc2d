"""The learner's state in a folder that any number of ranks under any ZeRO stage can take up.

learner.json            what is trained, optimizer steps taken, by how many ranks under which stage
rank-0.pt …             each rank's random state and component state
shard-0.safetensors …   each rank's pieces of the parameters: float32 weights, Adam's moments

A tensor `<parameter>/<first element>/<kind>` of a shard is a flat piece of one kind of `fragments`.
With the same ranks and stage training goes on bit by bit as if never interrupted. Parameters that
are not trained are not in it: they come from the model that the run starts from.
"""

from __future__ import annotations

import io
import json
import random
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlx.core.engine.interfaces import FileMarks
from rlx.core.engine.learner.fragments import (
    KEYS,
    Fragment,
    fragments,
    take_over,
    trained_shapes,
)
from rlx.core.engine.learner.sharded import ShardedModel
from rlx.core.engine.learner.tensor_file import write_tensors
from rlx.core.errors import EngineError

FORMAT = 2
"""1 was DeepSpeed's own layout, which only the same ranks and stage could read."""
_FACTS = "learner.json"
_STEPS = "steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLearner:
    """A rank's state in memory, on its way to a folder."""

    rank: int
    facts: Mapping[str, Any]
    own: bytes
    """Random state and component state."""
    tensors: Mapping[str, Tensor]

    def write(self, folder: str) -> FileMarks:
        """Write this rank's files; returns what they must turn out to be."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        shard = root / f"shard-{self.rank}.safetensors"
        (root / f"rank-{self.rank}.pt").write_bytes(self.own)
        marks = {shard.name: write_tensors(shard, self.tensors)}
        if self.rank == 0:
            (root / _FACTS).write_text(json.dumps(self.facts))
        return marks


def hold_learner(
    model: ShardedModel,
    *,
    rank: int,
    world: int,
    updates: int,
    components: Mapping[str, Mapping[str, Any]],
    copy: bool,
) -> HeldLearner:
    """Take hold of this rank's state.

    Args:
        updates: optimizer steps taken.
        components: state of the components, of primitives, their containers and tensors.
        copy: training goes on before it is written; else tensors are views.
    """
    tensors = {}
    for number, piece in enumerate(fragments(model)):
        if piece.replicated and number % world != rank:
            continue
        for kind, value in {**piece.values, _STEPS: piece.steps.reshape(1)}.items():
            kept = value.detach().to("cpu", copy=True) if copy else value.detach()
            tensors[f"{piece.name}/{piece.start}/{kind}"] = kept
    buffer = io.BytesIO()
    states = {name: dict(state) for name, state in components.items()}
    torch.save({"random": _random_state(), "components": states}, buffer)
    return HeldLearner(
        rank=rank,
        facts={
            "format": FORMAT,
            "world": world,
            "zero_stage": model.stage,
            "updates": updates,
            "parameters": trained_shapes(model),
        },
        own=buffer.getvalue(),
        tensors=tensors,
    )


def load_learner(
    model: ShardedModel, folder: str, *, rank: int
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Restore a checkpoint; returns optimizer steps taken and component state. All ranks call it.

    Raises:
        EngineError: there is no whole checkpoint, or it is of a model with other parameters.
    """
    root = Path(folder)
    try:
        facts = json.loads((root / _FACTS).read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{root} holds no learner checkpoint: {error}") from error
    if facts.get("format") != FORMAT:
        raise EngineError(
            f"{root} was written by another version of rlx (format {facts.get('format', 1)}, this "
            f"one reads {FORMAT}); resume with that version, or start from its `model/` folder"
        )
    _require_same_parameters(root, facts["parameters"], trained_shapes(model))
    _load_pieces(model, root, ranks=facts["world"])
    own = root / f"rank-{rank}.pt"
    state = torch.load(own if own.exists() else root / "rank-0.pt", weights_only=True)
    if own.exists():  # a rank that was not there before keeps the random state it starts with
        _restore_random_state(state["random"])
    return facts["updates"], state["components"]


def _require_same_parameters(
    root: Path, theirs: Mapping[str, list[int]], ours: Mapping[str, list[int]]
) -> None:
    differing = sorted(
        name for name in {*theirs, *ours} if list(theirs.get(name, ())) != ours.get(name)
    )
    if not differing:
        return
    name = differing[0]
    raise EngineError(
        f"{root} is a checkpoint of another model: {len(differing)} parameters differ, the first "
        f"is {name}: {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here; resume "
        "with the model and the trained parameters that the run began with"
    )


def _load_pieces(model: ShardedModel, root: Path, *, ranks: int) -> None:
    """Copy from all shards what this rank has a piece of."""
    with ExitStack() as stack:
        places: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        try:
            for rank in range(ranks):
                file = stack.enter_context(
                    safe_open(root / f"shard-{rank}.safetensors", framework="pt")
                )
                for key in file.keys():  # noqa: SIM118
                    name, start, kind = key.rsplit("/", 2)
                    if kind == KEYS[0]:
                        places[name].append((int(start), file))
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{root}: shard {rank} can't be read: {error}") from error
        steps: dict[int, tuple[Tensor, float]] = {}
        for piece in fragments(model):
            found = _fill(piece, places[piece.name], root)
            taken = steps.get(id(piece.steps), (None, 0.0))[1]
            steps[id(piece.steps)] = (piece.steps, max(found, taken))
        for counter, value in steps.values():
            counter.fill_(value)
    take_over(model)


@torch.no_grad()
def _fill(piece: Fragment, places: list[tuple[int, Any]], root: Path) -> float:
    """Fill a piece from those that overlap it; returns Adam's count of steps."""
    end, filled, steps = piece.start + piece.count, 0, 0.0
    for start, file in places:
        stored = f"{piece.name}/{start}"
        count = file.get_slice(f"{stored}/{KEYS[0]}").get_shape()[0]
        first, last = max(piece.start, start), min(end, start + count)
        if first >= last:
            continue
        for kind in KEYS:
            source = file.get_slice(f"{stored}/{kind}")[first - start : last - start]
            piece.values[kind][first - piece.start : last - piece.start].copy_(source)
        steps = max(steps, float(file.get_tensor(f"{stored}/{_STEPS}")))
        filled += last - first
    if filled != piece.count:
        raise EngineError(
            f"{root} holds {filled} of the {piece.count} numbers of {piece.name} from "
            f"{piece.start} on: the checkpoint is not whole"
        )
    return steps


def _random_state() -> dict[str, Any]:
    generator, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (generator, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: Mapping[str, Any]) -> None:
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
