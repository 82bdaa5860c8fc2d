"""A right answer scores 1; a wrong one less and less each time it is given to the same task.

    r = 1                              when the answer is the label
    r = −penalty · min(n, most)        otherwise, n = earlier steps in which this answer was given

With few distinct rewards whole groups score 0 and teach nothing. Memory tells the wrong answers
apart: what was tried before is worth less than something new.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge

from rlx import Reward, RewardInputs, component


@component(scope="group", needs_label=True)
class Fresh:
    """Scores the last number of a response against the label, and remembers wrong ones by task.

    Args:
        penalty: what a wrong answer loses for each earlier step in which it was given.
        most: earlier steps that count at most.
    """

    def __init__(
        self, *, penalty: Annotated[float, Ge(0)] = 0.1, most: Annotated[int, Ge(1)] = 5
    ) -> None:
        self.penalty = penalty
        self.most = most
        self._seen: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()  # groups are scored side by side

    def __call__(self, samples: Sequence[RewardInputs]) -> list[Reward]:
        with self._lock:
            before = {
                sample.task_id: dict(self._seen.get(sample.task_id, {})) for sample in samples
            }
            for task, text in sorted({(s.task_id, answer(s.response)) for s in samples}):
                counts = self._seen.setdefault(task, {})
                counts[text] = min(counts.get(text, 0) + 1, self.most)
        return [self._score(sample, before[sample.task_id]) for sample in samples]

    def _score(self, sample: RewardInputs, before: Mapping[str, int]) -> Reward:
        text = answer(sample.response)
        right = text == answer(str(sample.label))
        times = 0 if right else before.get(text, 0)
        score = 1.0 if right else -self.penalty * times
        return Reward(score, parts={"right": float(right)}, metrics={"repeats": float(times)})

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {task: dict(counts) for task, counts in self._seen.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = {task: dict(counts) for task, counts in state["seen"].items()}


def answer(text: str) -> str:
    """Return the last number of a text, or the whole text when it has none.

    >>> answer("2 + 2 = 4."), answer("none")
    ('4', 'none')
    """
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    return numbers[-1] if numbers else text.strip()
