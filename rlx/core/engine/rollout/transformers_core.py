"""Sampling with a plain transformers model as an engine core.

Requests run in static batches of `max_running` in the order of their arrival: one prefill in which
equal prompts are computed once, then one token a step for the rows that still run.

Legend: B rows, P width of the left-padded prompts, L longest continuation, U distinct prompts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from rlx.core.engine.float32_linear import quicken
from rlx.core.engine.interfaces import GenerateRequest, Generation, PublishReport, WeightsUpdate
from rlx.core.engine.rollout.core import (
    Finished,
    Key,
    Stretches,
    check_request,
    end_token_ids,
    merged,
)
from rlx.core.engine.rollout.sampling import processed_logprobs, sample
from rlx.core.engine.rollout.stats import EngineStats
from rlx.core.engine.rollout.transformers_weights import load_weights, without_zero3
from rlx.core.engine.transfer.receiver import Receiver
from rlx.core.rollouts import FinishReason
from rlx.core.soft_capping import exact_attention

PREFILL_TOKENS = 2**16
"""Most positions, padding included, of one prefill."""


_Row: TypeAlias = tuple[Key, GenerateRequest, Stretches]


class TransformersCore:
    """Samples with `AutoModelForCausalLM`, on the GPU when there is one."""

    def __init__(
        self, *, model: str, max_running: int, context_length: int, dtype: str, threads: int
    ) -> None:
        self._path = model
        self._max_running = max_running
        self._context_length = context_length
        self._dtype = dtype
        self._threads = threads
        self._model: Any = None
        self._device = "cpu"
        self._end_tokens: tuple[int, ...] = ()
        self._version = 0
        self._published: int | None = None
        """Version of the weights that a learner sent last; None: those of the start, or none."""
        self._receiver: Receiver | None = None
        self._waiting: deque[_Row] = deque()
        self._batch: _Batch | None = None
        self._stats = EngineStats()

    def start(self) -> Mapping[str, Any]:
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(self._threads)
        with without_zero3():
            model = AutoModelForCausalLM.from_pretrained(
                self._path,
                dtype=self._dtype,
                attn_implementation=exact_attention(AutoConfig.from_pretrained(self._path)),
            )
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.eval().requires_grad_(False).to(self._device)
        quicken(self._model)
        self._end_tokens = end_token_ids(self._path, model.config)
        return {
            "engine": "transformers",
            "engine_version": transformers.__version__,
            "context_length": self._context_length,
            "dtype": str(model.dtype).removeprefix("torch."),
            "end_tokens": list(self._end_tokens),
            "threads": self._threads,
        }

    def check(self, request: GenerateRequest) -> None:
        vocabulary = self._model.config.get_text_config().vocab_size
        check_request(request, context_length=self._context_length, vocabulary=vocabulary)

    def add(self, key: Key, request: GenerateRequest) -> None:
        self._waiting.append((key, request, Stretches(self._version)))

    def busy(self) -> bool:
        return bool(self._waiting) or self._batch is not None

    @torch.no_grad()
    def step(self) -> Finished:
        if self._batch is None:
            self._batch = _Batch(self._model, self._admit(), self._end_tokens)
        self._stats.note(running=len(self._batch), waiting=len(self._waiting))
        finished = self._batch.step()
        if not len(self._batch):
            self._batch = None
        return finished

    def take_stats(self) -> EngineStats:
        stats, self._stats = self._stats, EngineStats()
        return stats

    def _admit(self) -> list[_Row]:
        admitted: list[_Row] = []
        prompts: set[tuple[int, ...]] = set()
        width = 0
        while self._waiting and len(admitted) < self._max_running:
            prompt = tuple(self._waiting[0][1].prompt)
            width = max(width, len(prompt))
            prompts.add(prompt)
            if admitted and len(prompts) * width > PREFILL_TOKENS:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def abort(self, keys: Sequence[Key]) -> Finished:
        wanted = set(keys)
        ended = [
            (key, _generation(request, stretches, np.zeros(0), np.zeros(0), "abort"))
            for key, request, stretches in self._waiting
            if key in wanted
        ]
        self._waiting = deque(item for item in self._waiting if item[0] not in wanted)
        if self._batch is not None:
            ended += self._batch.abort(wanted)
            if not len(self._batch):
                self._batch = None
        return ended

    @torch.no_grad()
    def load_weights(self, update: WeightsUpdate) -> PublishReport:
        started = time.perf_counter()
        self._model.to(self._device)
        if self._receiver is None or self._receiver.link.key != update.link.key:
            self._receiver = Receiver(update.link)
        complete = self._needs_all(update)
        buckets = self._receiver.buckets(update.number, complete=complete)
        load_weights(self._model, buckets, whole=complete)
        for _, _, stretches in self._waiting:
            stretches.replaced(update.version, 0)
        if self._batch is not None:
            self._batch.replaced(update.version)
        self._version = self._published = update.version
        received = self._receiver.received
        return PublishReport(
            version=update.version,
            seconds=time.perf_counter() - started - received.waited,
            checksum=received.checksum,
        )

    def _needs_all(self, update: WeightsUpdate) -> bool:
        return update.base is None or update.base != self._published

    def sleep(self, level: int) -> None:
        """Move the weights to the host, whatever the level: copies are what is loaded into."""
        self._model.to("cpu")

    def forget(self) -> None:
        """Nothing outlives a batch here."""

    def stop(self) -> None:
        self._model = self._batch = None
        self._waiting.clear()
        if self._receiver is not None:
            self._receiver.close()


class _Batch:
    """Rows that started together; row i of every tensor belongs to `self._rows[i]`."""

    def __init__(
        self,
        model: Any,
        rows: list[_Row],
        end_tokens: Sequence[int],
    ) -> None:
        self._model = model
        self._rows = rows
        device = model.device
        samplings = [request.sampling for _, request, _ in rows]
        prompts = [request.prompt for _, request, _ in rows]
        self._width = max(len(prompt) for prompt in prompts)
        self._done = 0
        longest = max(item.max_new_tokens for item in samplings)
        size = (len(rows), self._width + longest)
        # ids, mask: [B, P + L], prompts left-padded so that all rows write the same column.
        self._ids = torch.zeros(size, dtype=torch.int64)
        self._mask = torch.ones(size, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            start = self._width - len(prompt)
            self._ids[row, start : self._width] = torch.as_tensor(prompt)
            self._mask[row, :start] = 0
        positions = (self._mask.cumsum(-1) - 1).clamp_(min=0)
        self._positions = positions.to(device)
        self._padded = not bool(self._mask.all())
        self._ids, self._mask = self._ids.to(device), self._mask.to(device)
        self._logprobs = torch.zeros(len(rows), longest, device=device)
        self._uniforms = _uniforms([request.seed for _, request, _ in rows], longest).to(device)
        self._greedy = torch.tensor([item.temperature == 0 for item in samplings], device=device)
        self._limits = torch.tensor([item.max_new_tokens for item in samplings], device=device)
        self._stops = _stop_table(
            [merged(end_tokens, item.stop_token_ids) for item in samplings]
        ).to(device)
        self._cache: Any = None

    def __len__(self) -> int:
        return len(self._rows)

    def step(self) -> Finished:
        """Sample one token per row; finished rows leave the batch."""
        logits = self._prefill() if self._done == 0 else self._decode()
        samplings = [request.sampling for _, request, _ in self._rows]
        tokens, logprobs = sample(
            processed_logprobs(logits, samplings), self._uniforms[:, self._done], self._greedy
        )
        self._ids[:, self._width + self._done] = tokens
        self._logprobs[:, self._done] = logprobs
        self._done += 1
        stopped = (self._stops == tokens[:, None]).any(1)
        ended = stopped | (self._limits <= self._done)
        if not ended.any():
            return []
        reasons: dict[int, FinishReason] = {
            row: "stop" if stop else "length"
            for row, (stop, end) in enumerate(zip(stopped.tolist(), ended.tolist(), strict=True))
            if end
        }
        return self._remove(reasons)

    def abort(self, keys: set[Key]) -> Finished:
        return self._remove(
            {row: "abort" for row, (key, _, _) in enumerate(self._rows) if key in keys}
        )

    def replaced(self, version: int) -> None:
        """Recompute keys and values of everything so far, after a change of the weights."""
        for _, _, stretches in self._rows:
            stretches.replaced(version, self._done)
        if self._done:
            self._cache = self._forward(
                slice(0, self._width + self._done - 1), None
            ).past_key_values

    def _prefill(self) -> torch.Tensor:
        """Logits [B, V] after the prompts; equal prompts share one row of the computation."""
        first: dict[tuple[int, ...], int] = {}
        index = [
            first.setdefault(tuple(request.prompt), len(first)) for _, request, _ in self._rows
        ]
        representative = torch.tensor(
            [index.index(row) for row in range(len(first))], device=self._ids.device
        )
        output = self._forward(slice(0, self._width), None, rows=representative)
        expand = torch.tensor(index, device=self._ids.device)
        self._cache = output.past_key_values
        self._cache.batch_select_indices(expand)
        return output.logits[expand, -1]

    def _decode(self) -> torch.Tensor:
        last = self._width + self._done - 1
        output = self._forward(slice(last, last + 1), self._cache)
        self._cache = output.past_key_values
        return output.logits[:, -1]

    def _forward(self, columns: slice, cache: Any, rows: torch.Tensor | slice = slice(None)) -> Any:
        """Run the model on some columns of the batch, appending to `cache` (None: a new one)."""
        from rlx.core.engine.rollout.growing_cache import growing_cache

        config, most = self._model.config, self._ids.shape[1]
        return self._model(
            input_ids=self._ids[rows, columns],
            attention_mask=self._mask[rows, : columns.stop] if self._padded else None,
            position_ids=self._positions[rows, columns],
            past_key_values=growing_cache(config, most) if cache is None else cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def _remove(self, reasons: Mapping[int, FinishReason]) -> Finished:
        """Take rows out of the batch, with what they sampled so far."""
        tokens = self._ids[:, self._width : self._width + self._done].cpu().numpy()
        logprobs = self._logprobs[:, : self._done].cpu().numpy()
        finished: Finished = []
        for row, reason in reasons.items():
            key, request, stretches = self._rows[row]
            generation = _generation(request, stretches, tokens[row], logprobs[row], reason)
            finished.append((key, generation))
        kept = [row for row in range(len(self._rows)) if row not in reasons]
        self._rows = [self._rows[row] for row in kept]
        if not kept or not reasons:
            return finished
        index = torch.tensor(kept, device=self._ids.device)
        for name in (
            "ids",
            "mask",
            "positions",
            "logprobs",
            "uniforms",
            "greedy",
            "limits",
            "stops",
        ):
            setattr(self, f"_{name}", getattr(self, f"_{name}")[index])
        if self._cache is not None:
            self._cache.batch_select_indices(index)
        return finished


def _generation(
    request: GenerateRequest,
    stretches: Stretches,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    reason: FinishReason,
) -> Generation:
    return Generation(
        request_id=request.id,
        tokens=tokens.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        finish_reason=reason,
        version=stretches.version,
        versions=stretches.of(len(tokens)),
    )


def _uniforms(seeds: Sequence[int], count: int) -> torch.Tensor:
    """Uniform numbers [B, count] float64; a row depends on its seed alone."""
    rows = [
        torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    return torch.stack(rows)


def _stop_table(stops: Sequence[Sequence[int]]) -> torch.Tensor:
    """Stop tokens [B, most of a row], filled up with −1, which is no token."""
    width = max([len(row) for row in stops] + [1])
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in stops])
