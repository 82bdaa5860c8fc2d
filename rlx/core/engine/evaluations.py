"""The evaluations of a training run: when one is due, where its results go, which was best."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from rlx.core.engine.evaluation import Evaluator
from rlx.core.engine.reporting import Reporter
from rlx.core.evaluation import Evaluation, lower_is_better
from rlx.core.plugins import PluginSystem
from rlx.core.run import EVALS_NAME, Run

_MIB = 2**20
_SHOW_EVERY = 10.0
"""Seconds between lines about progress."""


class Evaluations:
    """Evaluates when it is time to.

    The state says which step was evaluated last, so that a run that was interrupted before its
    evaluation was over makes up for it when it is resumed.
    """

    def __init__(
        self, evaluator: Evaluator, *, run: Run, reporter: Reporter, plugins: PluginSystem
    ) -> None:
        self._evaluator = evaluator
        self._run = run
        self._reporter = reporter
        self._plugins = plugins
        self._done: int | None = None
        self.best_step: int | None = None
        """The step with the best `checkpoint.best` so far (the first of equals); None without
        that setting."""
        self._best_value = float("-inf")
        """Of that metric; its negative where lower is better."""
        self._shown = 0.0

    def due(self, step: int) -> bool:
        """Whether the weights after `step` are to be evaluated and have not been."""
        config = self._run.config
        if step == self._done:
            return False
        if step == 0:
            return config.eval.before_training
        every = config.eval.every
        return step >= config.steps or (every > 0 and step % every == 0)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the weights after `step`; the metrics are for the caller to log."""
        self._reporter.status("evaluating")
        self._shown = time.monotonic()
        evaluation = await self._evaluator.evaluate(self._show)
        metrics = evaluation.metrics
        self._done = step
        name = self._run.config.checkpoint.best
        if name is not None:
            value = -metrics[name] if lower_is_better(name) else metrics[name]
            if value > self._best_value:
                self._best_value, self.best_step = value, step
        if self._run.config.logging.rollouts:
            self._write_samples(step, evaluation)
        self._plugins.notify("rlx_on_eval_end", run=self._run, step=step, results=metrics)
        return metrics

    def _show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown > _SHOW_EVERY:
            self._shown = now
            self._reporter.status(f"evaluating: {done} of {total} tasks")

    def _write_samples(self, step: int, evaluation: Evaluation) -> None:
        folder = self._run.folder / EVALS_NAME
        folder.mkdir(exist_ok=True)
        written = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
        text = "".join(
            json.dumps({"step": step, **record}, ensure_ascii=False, default=str) + "\n"
            for record in evaluation.records()
        )
        if written + len(text) > self._run.config.logging.rollouts_max_mib * _MIB:
            (folder / "FULL").touch()
            return
        path = folder / f"step-{step:06d}.jsonl"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")

    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done, "best_step": self.best_step, "best_value": self._best_value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state; an empty one is of a run that did not evaluate."""
        self._done = state.get("done")
        self.best_step = state.get("best_step")
        self._best_value = state.get("best_value", float("-inf"))
