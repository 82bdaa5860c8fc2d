"""Weights & Biases: every metric as a curve, sampled rollouts as a table.

Needs the package `wandb`. Without a network use `mode=offline`: the run then lies in `wandb/` in
the run's folder, and `wandb sync` uploads it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlx.core.component import component
from rlx.core.run import Run

_COLUMNS = ("step", "prompt", "response", "label", "reward", "advantage", "finish_reason")
_ID_NAME = "wandb-id"


@component(libraries=("wandb",))
class WandB:
    """Sends metrics and sampled rollouts to Weights & Biases.

    A resumed run goes on with the same curves: its identity is kept in the run's folder.

    Args:
        project: where the run is shown.
        entity: user or team; unset: wandb's default.
        name: unset: the name of the run's folder.
        group: runs that are shown together.
        tags: words to find the run by.
        mode: unset: wandb's own setting (`WANDB_MODE`, else online).
        samples: rollouts in the table of each step; 0 sends none.
    """

    def __init__(
        self,
        *,
        project: str = "rlx",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        samples: int = 4,
    ) -> None:
        self._options = {
            "project": project,
            "entity": entity,
            "name": name,
            "group": group,
            "tags": tags,
            "mode": mode,
        }
        self._samples = samples
        self._run: Any = None

    def start(self, run: Run) -> None:
        import wandb

        self._run = wandb.init(
            **{**self._options, "name": self._options["name"] or run.name},
            id=_identity(run.folder),
            resume="allow",
            dir=str(run.folder),
            config=run.config.model_dump(mode="json"),
            # The terminal is the console tracker's.
            settings=wandb.Settings(console="off", silent=True),
        )
        # A resumed run repeats steps, which wandb's own counter would refuse.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def log_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        chosen = records[: self._samples]
        if chosen:
            rows = [
                [step, *(str(record.get(key, "")) for key in _COLUMNS[1:])] for record in chosen
            ]
            self._run.log({"rollouts": wandb.Table(list(_COLUMNS), data=rows), "step": step})

    def close(self, error: BaseException | None = None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)


def _identity(folder: Path) -> str:
    """The run's name in wandb's storage: made once, then read."""
    path = folder / _ID_NAME
    if not path.is_file():
        path.write_text(uuid.uuid4().hex[:16])
    return path.read_text().strip()
