"""Rows to train on, from the samples of a task: the best, pairs, or all with their reward.

    best          rejection sampling; RAFT, arXiv:2304.06767
    pairs         the best against the worst; iterative DPO, arXiv:2312.11456
    conditioned   the reward stands in the prompt; Decision Transformer, arXiv:2106.01345, and
                  quark, arXiv:2205.13636

Rewards are compared as they are; of equal ones the sample with the lower index goes first, so the
rows are a function of the samples alone. What is left out is counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rlx.core.config import GenerateConfig
from rlx.core.rollouts import Message
from rlx.core.samples import Sample, SampledTask

Row: TypeAlias = dict[str, Any]

CUT_OFF = "samples cut off"
FAILED = "samples that failed"
SEVERAL_TURNS = "samples of several turns in plain text"
LOW = "samples below generate.min_reward"
SAME_TEXT = "samples with the text of a better one"
EQUAL = "tasks whose rewards are all equal"
TOO_FEW = "tasks with fewer than two samples left"
SMALL_MARGIN = "tasks with a margin below generate.min_margin"
NO_SAMPLES = "tasks without samples"

_FAILED = ("error", "timeout", "abort")
"""Finish reasons of rollouts that are not as the policy would have ended them."""


@dataclass(frozen=True, slots=True)
class Picks:
    """Rows of one task, and what was left out on the way."""

    rows: Sequence[Row]
    dropped: Counter[str] = field(default_factory=Counter)


def pick(form: str, task: SampledTask, settings: GenerateConfig) -> Picks:
    """The rows of one form (`generate.select`) for one task."""
    return _FORMS[form](task, settings)


def all_samples(task: SampledTask, settings: GenerateConfig) -> Picks:
    """Every sample, nothing left out."""
    rows = [
        {
            "task": task.id,
            "index": sample.index,
            "prompt": task.prompt,
            "completion": _answer(task, sample),
            "label": task.label,
            "reward": sample.reward,
            "parts": dict(sample.parts),
            "tokens": sample.tokens,
            "turns": sample.turns,
            "finish_reason": sample.finish_reason,
        }
        for sample in task.samples
    ]
    return Picks(rows, Counter({NO_SAMPLES: 1} if not rows else {}))


def best(task: SampledTask, settings: GenerateConfig) -> Picks:
    """The `keep` samples with the highest rewards."""
    samples, dropped = _usable(task, settings)
    if settings.min_reward is not None:
        high = [sample for sample in samples if sample.reward >= settings.min_reward]
        dropped[LOW] += len(samples) - len(high)
        samples = high
    elif len(task.samples) > 1 and _all_equal(task.samples):
        dropped[EQUAL] += 1
        return Picks([], dropped)
    rows: list[Row] = []
    texts: set[str] = set()
    for sample in _ranked(samples):
        if len(rows) == settings.keep:
            break
        if sample.response in texts:
            dropped[SAME_TEXT] += 1
            continue
        texts.add(sample.response)
        rows.append(_trained(task, sample, task.prompt))
    return Picks(rows, dropped)


def pairs(task: SampledTask, settings: GenerateConfig) -> Picks:
    """The best sample against the worst, when their rewards are far enough apart."""
    samples, dropped = _usable(task, settings)
    ranked = _ranked(samples)
    if len(ranked) < 2:
        dropped[TOO_FEW] += 1
        return Picks([], dropped)
    top, bottom = ranked[0], ranked[-1]
    margin = top.reward - bottom.reward
    if margin <= 0 or margin < settings.min_margin:
        dropped[SMALL_MARGIN if margin > 0 else EQUAL] += 1
        return Picks([], dropped)
    row = {
        "prompt": task.prompt,
        "chosen": _answer(task, top),
        "rejected": _answer(task, bottom),
        "chosen_reward": top.reward,
        "rejected_reward": bottom.reward,
        "task": task.id,
    }
    return Picks([row], dropped)


def conditioned(task: SampledTask, settings: GenerateConfig) -> Picks:
    """Every sample after a prompt that says its reward."""
    samples, dropped = _usable(task, settings)
    rows = [
        _trained(task, sample, with_reward(task.prompt, sample.reward, settings.condition))
        for sample in samples
    ]
    return Picks(rows, dropped)


def with_reward(
    prompt: str | Sequence[Message], reward: float, template: str
) -> str | list[Message]:
    """The prompt with `template` around it; of a chat, around the last user message.

    >>> with_reward("2 + 2?", 1.0, "{prompt} (reward {reward:.1f})")
    '2 + 2? (reward 1.0)'
    """
    if isinstance(prompt, str):
        return template.format(prompt=prompt, reward=reward)
    messages = list(prompt)
    for place in reversed(range(len(messages))):
        message = messages[place]
        if message["role"] == "user" and isinstance(message["content"], str):
            text = template.format(prompt=message["content"], reward=reward)
            messages[place] = {**message, "content": text}
            break
    return messages


def picked(
    form: str, tasks: Iterator[SampledTask], settings: GenerateConfig, dropped: Counter[str]
) -> Iterator[Row]:
    """The rows of all tasks; what is left out is added to `dropped` on the way."""
    for task in tasks:
        found = pick(form, task, settings)
        dropped.update(found.dropped)
        yield from found.rows


def _usable(task: SampledTask, settings: GenerateConfig) -> tuple[list[Sample], Counter[str]]:
    """The samples that can be trained on."""
    dropped: Counter[str] = Counter()
    if not task.samples:
        dropped[NO_SAMPLES] += 1
    usable = []
    for sample in task.samples:
        if sample.truncated and settings.truncated == "drop":
            dropped[CUT_OFF] += 1
        elif sample.finish_reason in _FAILED:
            dropped[FAILED] += 1
        elif sample.turns > 1 and not task.chat:
            # as one text, what the environment said could not be told from what the model said
            dropped[SEVERAL_TURNS] += 1
        else:
            usable.append(sample)
    return usable, dropped


def _ranked(samples: Sequence[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: (-sample.reward, sample.index))


def _all_equal(samples: Sequence[Sample]) -> bool:
    return len({sample.reward for sample in samples}) <= 1


def _trained(task: SampledTask, sample: Sample, prompt: str | Sequence[Message]) -> Row:
    return {
        "prompt": prompt,
        "completion": _answer(task, sample),
        "label": task.label,
        "reward": sample.reward,
        "task": task.id,
    }


def _answer(task: SampledTask, sample: Sample) -> str | Sequence[Message]:
    """Text after a plain prompt, chat messages after a chat."""
    return sample.messages if task.chat else sample.response


_FORMS: Mapping[str, Callable[[SampledTask, GenerateConfig], Picks]] = {
    "all": all_samples,
    "best": best,
    "pairs": pairs,
    "conditioned": conditioned,
}
