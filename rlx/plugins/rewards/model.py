"""A reward model: how good a trained judge of responses finds one.

    score = (r(conversation) − mean) / std

mean and std stand in the model's `config.json` (`rlx_reward_mean`, `rlx_reward_std`), where they
are known. Several models are an ensemble: their mean, or the least of them (arXiv:2310.02743).
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field

from rlx.core.component import component
from rlx.core.rewards import Reward, RewardInputs
from rlx.plugins.rewards._scorer import Dtype, ScoringModel, cpu_threads

_COMBINE: dict[str, Callable[[list[float]], float]] = {"mean": statistics.fmean, "min": min}


@component(requires={"reward_model"}, scope="group", loads="model")
class Model:
    """The score of a sequence classifier with one label, on the whole conversation.

    It is loaded where rewards run, with a tokenizer of its own: it need not share the policy's.
    Its chat template writes the conversation; without one, prompt and response are put together
    as they stand, and the end token after them.

    Args:
        model: folder or hub name, or several.
        combine: of several models' scores, the `mean` or the `min`.
        normalize: use the mean and the standard deviation of the model's `config.json`.
        dtype: of the model's body (its head always runs in float32); `auto`: as stored.
        device: `cpu`, `cuda`, `cuda:1`; `auto`: the GPU where there is one.
        batch_tokens: tokens of one forward pass, padding included.
        max_length: longest conversation in tokens; longer ones lose their start. Unset: what the
            model was made for.
        chat_template: write the conversation with the template; `auto`: when there is one.
        scope: what is scored together: a `group`, so that a score never depends on what else there
            is to do, or all that waits (`batch`), which is faster for short responses.

    Raises `UsageError` when a folder holds no reward model.
    """

    def __init__(
        self,
        *,
        model: str | list[str],
        combine: Literal["mean", "min"] = "mean",
        normalize: bool = True,
        dtype: Dtype = "auto",
        device: str = "auto",
        batch_tokens: Annotated[int, Field(ge=1)] = 8192,
        max_length: Annotated[int | None, Field(ge=8)] = None,
        chat_template: bool | Literal["auto"] = "auto",
        scope: Literal["group", "batch"] = "group",
    ) -> None:
        component(requires={"reward_model"}, scope=scope, loads="model")(self)  # its own tags
        self._combine = _COMBINE[combine]
        self._normalize = normalize
        self._threads = cpu_threads()
        self._lock = threading.Lock()  # a call that timed out may still be running
        self._models = [
            ScoringModel(
                path,
                dtype=dtype,
                device=device,
                batch_tokens=batch_tokens,
                max_length=max_length,
                chat_template=chat_template,
            )
            for path in ([model] if isinstance(model, str) else model)
        ]

    def __call__(self, samples: list[RewardInputs]) -> list[Reward]:
        """Return the rewards; with several models, each one's score as a part."""
        with self._lock:
            torch.set_num_threads(self._threads)
            columns = [self._score(model, samples) for model in self._models]
        if len(columns) == 1:
            return columns[0]
        names = _distinct([model.name for model in self._models])
        return [
            Reward(
                self._combine([reward.score or 0.0 for reward in row]),
                parts={name: reward.score or 0.0 for name, reward in zip(names, row, strict=True)},
                metrics={"truncated": max(reward.metrics["truncated"] for reward in row)},
            )
            for row in zip(*columns, strict=True)
        ]

    def _score(self, model: ScoringModel, samples: list[RewardInputs]) -> list[Reward]:
        texts = [model.encode(one.prompt, one.messages, one.response) for one in samples]
        raw = model.score(texts)
        mean, std = (model.mean, model.std) if self._normalize else (0.0, 1.0)
        return [
            Reward((score - mean) / std, metrics={"raw": score, "truncated": float(text.truncated)})
            for score, text in zip(raw, texts, strict=True)
        ]


def _distinct(names: list[str]) -> list[str]:
    """The names, numbered where one comes again."""
    return [
        name if names.index(name) == i else f"{name}_{names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]
