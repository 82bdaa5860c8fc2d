"""A reward model: conversations in, one number each out.

    score = w · h(last token),   in float32 whatever the dtype of the model's body

The last token is the last one that is not the padding token, as transformers' classifiers read it,
so that a published model gives the numbers that it was published with. A model that does something
else (an encoder with a pooler) is run as it is; which one it is, is measured when it is loaded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlx.core.errors import UsageError
from rlx.core.rewards import MEAN_KEY, STD_KEY, conversation
from rlx.core.soft_capping import exact_attention

Dtype = Literal["auto", "float32", "bfloat16"]
_HEADS = ("score", "classifier")
"""What transformers' classifiers call their last layer."""
_TOLERANCE = 2e-2
"""By which the head's two ways may differ, relative: the model's own runs in its dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One tokenised conversation."""

    tokens: list[int]
    truncated: bool


class ScoringModel:
    """A sequence classifier with one label, and its tokenizer.

    Args:
        path: folder or hub name.
        dtype: of the body; `auto`: as stored.
        device: `auto`: the GPU where there is one.
        batch_tokens: tokens of one forward pass, padding included.
        max_length: longest conversation; longer ones lose their start.
        chat_template: write conversations with the tokenizer's template; `auto`: if it has one.

    Raises `UsageError` for a folder that holds no such model.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: Dtype,
        device: str,
        batch_tokens: int,
        max_length: int | None,
        chat_template: bool | Literal["auto"],
    ) -> None:
        self.name = Path(path).name or path
        self._model, self.tokenizer = _load(path, dtype, _device(device))
        self._device = next(self._model.parameters()).device
        config = self._model.config
        self.mean, self.std = normalisation(config.to_dict(), path)
        self._pad = config.get_text_config().pad_token_id
        own = getattr(config.get_text_config(), "max_position_embeddings", None)
        lengths = [max_length, own, getattr(self.tokenizer, "model_max_length", None)]
        self._longest = min(length for length in lengths if length)
        self._batch_tokens = batch_tokens
        self._templated = (
            bool(self.tokenizer.chat_template) if chat_template == "auto" else chat_template
        )
        if self._templated and not self.tokenizer.chat_template:
            raise UsageError(
                f"the tokenizer of the reward model {path} has no chat template",
                where="chat_template",
                fix="chat_template=auto, or a template in the model's folder",
            )
        self._head = _linear_head(self._model)
        if self._head is not None and not self._head_is_all():
            self._head = None

    def encode(
        self, prompt: str | Sequence[Mapping[str, Any]], messages: Any, response: str
    ) -> Text:
        """Return the tokens of a conversation that ends with the response.

        Without a chat template it is prompt and response as they stand, and the end token.
        """
        if self._templated:
            talk = list(messages) or conversation(prompt, response)
            text = self.tokenizer.apply_chat_template(talk, tokenize=False)
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            before = prompt if isinstance(prompt, str) else _lines(prompt)
            tokens = self.tokenizer(before + response)["input_ids"]
            end = self.tokenizer.eos_token_id
            if end is not None and tokens[-1:] != [end]:
                tokens = [*tokens, end]
        tokens = tokens or [self._pad or 0]
        return Text(tokens=tokens[-self._longest :], truncated=len(tokens) > self._longest)

    @torch.inference_mode()
    def score(self, texts: Sequence[Text]) -> list[float]:
        """Return the model's number for each text, not normalised."""
        scores = [math.nan] * len(texts)
        for rows in batches([len(text.tokens) for text in texts], self._batch_tokens):
            ids, mask = self._padded([texts[row].tokens for row in rows])
            for row, score in zip(rows, self._forward(ids, mask).tolist(), strict=True):
                scores[row] = score
        return scores

    def _forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores [R] float32 of padded rows `ids` [R, L]; `mask`: [R, L], 1 at tokens."""
        if self._head is None:
            return self._model(input_ids=ids, attention_mask=mask).logits[:, 0].float()
        hidden = self._model.base_model(
            input_ids=ids, attention_mask=mask, use_cache=False
        ).last_hidden_state
        last = self._read_at(ids, mask)
        rows = torch.arange(len(ids), device=ids.device)
        weight, bias = self._head
        return hidden[rows, last].float() @ weight + bias

    def _read_at(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Position [R] of the last token that is no padding, neither here nor in the text."""
        places = torch.arange(ids.shape[1], device=ids.device)
        wanted = mask.bool() if self._pad is None else mask.bool() & (ids != self._pad)
        last = (places * wanted).argmax(-1)
        return torch.where(wanted.any(-1), last, mask.sum(-1) - 1)

    def _padded(self, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        width = max(len(row) for row in rows)
        ids = torch.full((len(rows), width), self._pad or 0)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        return ids.to(self._device), mask.to(self._device)

    @torch.inference_mode()
    def _head_is_all(self) -> bool:
        """Whether a linear layer on the last token is all that the model does after its body."""
        vocabulary = self._model.config.get_text_config().vocab_size
        row = [token for token in range(1, min(vocabulary, 24)) if token != self._pad]
        ids, mask = self._padded([row])
        try:
            ours = self._forward(ids, mask)
        except (AttributeError, TypeError, RuntimeError):
            return False  # a body that takes or gives something else
        theirs = self._model(input_ids=ids, attention_mask=mask).logits[:, 0].float()
        return torch.allclose(ours, theirs, rtol=_TOLERANCE, atol=_TOLERANCE)


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the rows of each forward pass: alike in length, at most `most` tokens when padded.

    A longer text is alone. Which texts share a pass depends on the lengths only.

    >>> list(batches([5, 2, 2, 9], 10))
    [[3], [0], [1, 2]]
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if rows and lengths[rows[0]] * (len(rows) + 1) > most:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def normalisation(config: Mapping[str, Any], path: str) -> tuple[float, float]:
    """Return mean and standard deviation from a model's config, 0 and 1 when it has none."""
    mean, std = config.get(MEAN_KEY, 0.0), config.get(STD_KEY, 1.0)
    try:
        mean, std = float(mean), float(std)
        if math.isfinite(mean) and math.isfinite(std) and std > 0:
            return mean, std
    except (TypeError, ValueError):
        pass
    raise UsageError(
        f"config.json of the reward model {path} has {MEAN_KEY}={mean!r}, {STD_KEY}={std!r}",
        fix="numbers, the second one above 0",
    )


def _load(path: str, dtype: Dtype, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = Path(path).expanduser()
    name = str(folder) if folder.is_dir() else path
    _check_config(folder, path)
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=exact_attention(AutoConfig.from_pretrained(name)),
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        what = f"the reward model {path} can't be loaded: {error}"
        raise UsageError(what, fix="a folder or hub name of a sequence classifier") from None
    if missing := [key for key in info["missing_keys"] if key.startswith(_HEADS)]:
        raise UsageError(
            f"the model {path} has no reward head: its weights lack {', '.join(sorted(missing))}",
            fix="a model that was trained as a reward model",
        )
    if model.config.num_labels != 1:
        raise UsageError(
            f"the model {path} has {model.config.num_labels} labels; a reward model has one"
        )
    return model.to(device).eval().requires_grad_(False), tokenizer


def _check_config(folder: Path, path: str) -> None:
    """A language model's folder would be loaded too, with a head of random numbers."""
    config = folder / "config.json"
    if not config.is_file():
        return
    architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures") or []
    if architectures and not any(name.endswith("Classification") for name in architectures):
        raise UsageError(
            f"{path} holds a {architectures[0]}, not a reward model",
            fix="a folder of an AutoModelForSequenceClassification with one label",
        )


def _linear_head(model: Any) -> tuple[Tensor, Tensor | float] | None:
    """Weight [H] and bias of the last layer in float32; None when that is no linear layer."""
    head = next((getattr(model, name) for name in _HEADS if hasattr(model, name)), None)
    if not isinstance(head, torch.nn.Linear):
        return None
    return head.weight[0].float(), 0.0 if head.bias is None else head.bias[0].float()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            f"there is no device {name!r}: {str(error).splitlines()[0]}",
            where="device",
            fix="auto, cpu or cuda:0",
        ) from None


def cpu_threads() -> int:
    """Threads of a forward pass: what the process was given, else all cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else len(os.sched_getaffinity(0))


def _lines(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"{m.get('role', '?')}: {m.get('content', '')}\n" for m in messages)
