"""The learner's state in a folder, so that training goes on bit by bit as if never interrupted.

learner.json      written last: world size, ZeRO stage, optimizer steps taken
rank-0.pt …       each rank's random state and component state
deepspeed/        weights and optimizer, in DeepSpeed's layout
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlx.core.engine.learner.distributed import barrier
from rlx.core.engine.learner.sharded import ShardedModel
from rlx.core.errors import EngineError

_FACTS = "learner.json"
_TAG = "deepspeed"


def save_learner(
    model: ShardedModel,
    folder: str,
    *,
    rank: int,
    world: int,
    updates: int,
    components: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write the checkpoint into `folder`. All ranks call it.

    Args:
        updates: optimizer steps taken.
        components: state of the components, of primitives, their containers and tensors.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    # Frozen weights are those of the model that the run starts from.
    frozen = model.adapter is not None
    model.engine.save_checkpoint(
        str(root), tag=_TAG, save_latest=False, exclude_frozen_parameters=frozen
    )
    torch.save(
        {"random": _random_state(), "components": {k: dict(v) for k, v in components.items()}},
        root / f"rank-{rank}.pt",
    )
    barrier()
    if rank == 0:
        facts = {"world": world, "zero_stage": model.stage, "updates": updates}
        (root / _FACTS).write_text(json.dumps(facts))
    barrier()


def load_learner(
    model: ShardedModel, folder: str, *, rank: int, world: int
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Restore the checkpoint; returns optimizer steps taken and component state.

    Raises:
        EngineError: there is no whole checkpoint, or it is of other ranks or another ZeRO stage.
    """
    root = Path(folder)
    try:
        facts = json.loads((root / _FACTS).read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{root} holds no learner checkpoint: {error}") from error
    _require_same_layout(root, facts, model.stage, world)
    strict = model.adapter is None
    path, _ = model.engine.load_checkpoint(str(root), tag=_TAG, load_module_strict=strict)
    if path is None:
        raise EngineError(f"DeepSpeed could not read the checkpoint in {root}")
    own = root / f"rank-{rank}.pt"
    # With ZeRO 0 a new rank may have joined, which starts from the first rank's state.
    state = torch.load(own if own.exists() else root / "rank-0.pt", weights_only=True)
    _restore_random_state(state["random"])
    return facts["updates"], state["components"]


def _require_same_layout(root: Path, facts: Mapping[str, int], stage: int, world: int) -> None:
    if facts["zero_stage"] != stage:
        raise EngineError(
            f"{root} was written with ZeRO stage {facts['zero_stage']} and can't be resumed with "
            f"{stage}; set learner.zero_stage: {facts['zero_stage']}"
        )
    if stage > 0 and facts["world"] != world:
        raise EngineError(
            f"{root} was written by {facts['world']} ranks with ZeRO stage {stage} and can't be "
            f"resumed with {world}; set learner.ranks: {facts['world']}"
        )


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
