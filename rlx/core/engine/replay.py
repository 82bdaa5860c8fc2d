"""Training on recorded rollouts: a collector that reads them, and nothing where an engine would be.

Step k of a replay trains on the rollouts of step k of the recorded run, with the rewards that they
got then. With the settings and the seed of that run, the weights come out bit for bit the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.core.engine.collector import Collected
from rlx.core.engine.records import groups_of
from rlx.core.errors import UsageError
from rlx.core.models import vocabulary_hash
from rlx.core.rollouts import Group
from rlx.core.run import MANIFEST_NAME, ROLLOUTS_NAME


def check_recording(run: Path, tokenizer: Any, *, groups: int, group_size: int) -> None:
    """Raise UsageError when the first step is of another shape, or the tokens mean other text."""
    check_shape(read_step(run / ROLLOUTS_NAME, 1), 1, groups=groups, group_size=group_size)
    try:
        recorded = json.loads((run / MANIFEST_NAME).read_text(encoding="utf-8"))
        before = recorded["facts"].get("tokenizer")
    except (OSError, ValueError, KeyError, AttributeError):
        return  # a recording without a manifest says nothing of its tokenizer
    if before not in (None, vocabulary_hash(tokenizer)):
        raise UsageError(
            f"{run} was recorded with another tokenizer: its token ids mean other text to this "
            "model",
            where="model",
            fix="the model that was recorded, or one with its tokenizer",
        )


def check_shape(
    recorded: Sequence[Group], step: int, *, groups: int, group_size: int | None
) -> None:
    """Raise UsageError when a step was recorded with other numbers than it is trained with."""
    sizes = {len(group.rollouts) for group in recorded}
    empty = any(not len(r.tokens) for group in recorded for r in group.rollouts)
    if len(recorded) != groups:
        raise UsageError(
            f"step {step} was recorded with {len(recorded)} groups, not {groups}",
            where="rollout.groups",
            fix=f"`--groups {len(recorded)}`",
        )
    if group_size is not None and sizes != {group_size}:
        raise UsageError(
            f"step {step} was recorded with {', '.join(map(str, sorted(sizes)))} rollouts in a "
            f"group, not {group_size}",
            where="rollout.group_size",
            fix=f"`--group-size {max(sizes)}`",
        )
    if empty:
        raise UsageError(
            f"step {step} holds a rollout without tokens", where="replay", fix="another recording"
        )


class Replay:
    """The rollouts of a recorded run, step by step.

    Args:
        run: its folder.
        vocabulary: of the model that is trained; other tokens are refused.
    """

    def __init__(self, run: Path, *, vocabulary: int | None) -> None:
        self._folder = run / ROLLOUTS_NAME
        self._vocabulary = vocabulary
        self._done = 0

    async def collect(self, wanted: int) -> Collected:
        """The groups of the next step; UsageError when not `wanted`, or not whole."""
        started = time.perf_counter()
        self._done += 1
        groups = read_step(self._folder, self._done)
        check_shape(groups, self._done, groups=wanted, group_size=None)
        largest = max(int(r.tokens.max()) for group in groups for r in group.rollouts)
        if self._vocabulary is not None and largest >= self._vocabulary:
            raise UsageError(
                f"step {self._done} has the token {largest}, the model's vocabulary is "
                f"{self._vocabulary}",
                where="model",
                fix="the model that was recorded, or one with its tokenizer",
            )
        seconds = time.perf_counter() - started
        return Collected(groups=groups, metrics={}, rollout_seconds=seconds, reward_seconds=0.0)

    def advance(self, version: int) -> None:
        """Nothing to do: the rollouts were made long ago."""

    async def restart(self, step: int) -> None:
        """Go on after `step` recorded steps."""
        self._done = step

    async def close(self) -> None:
        """Nothing is under way."""

    async def state_dict(self) -> dict[str, Any]:
        return {"replayed": self._done}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._done = state["replayed"]


class NoEngine:
    """In the engines' place: there is nothing to end or to leave."""

    async def abort(self) -> None: ...

    async def sleep(self) -> None: ...


class NoPublisher:
    """In the publisher's place: nobody takes the weights."""

    async def publish(self, learner: Any, engine: Any, *, version: int) -> None: ...

    def metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...


def read_step(folder: Path, step: int) -> list[Group]:
    """The groups of a recorded step. Raises UsageError when it is not there or not complete."""
    path = folder / f"step-{step:06d}.jsonl"
    where = "replay"
    if not path.is_file():
        raise UsageError(
            f"{folder} has no rollouts of step {step}", where=where, fix=f"`--steps {step - 1}`"
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return groups_of([json.loads(line) for line in lines])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(
            f"{path} holds no complete rollouts ({type(error).__name__}: {error})",
            where=where,
            fix="record the run with `--set logging.rollouts=complete`",
        ) from error
