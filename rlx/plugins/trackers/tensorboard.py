"""TensorBoard event files under the run folder: `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.core.run import Run


class TensorBoard:
    """Writes every metric as a scalar, and a few rollouts a step as text.

    Args:
        samples: rollouts written as text each step; 0 writes none.
    """

    def __init__(self, *, samples: int = 1) -> None:
        self._samples = samples
        self._writer: Any = None

    def start(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=run.start_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        for number, record in enumerate(records[: self._samples]):
            text = f"{record['prompt']}\n\n→ {record['response']}\n\nreward {record['reward']:.3f}"
            self._writer.add_text(f"rollout/{number}", text, step)

    def close(self, error: BaseException | None = None) -> None:
        if self._writer is not None:
            self._writer.close()
