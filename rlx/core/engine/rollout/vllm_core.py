"""vLLM's in-process `LLMEngine` as an engine core."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.core.config import RolloutConfig
from rlx.core.engine.interfaces import GenerateRequest, Generation, PublishReport, WeightsUpdate
from rlx.core.engine.rollout.core import (
    Finished,
    Key,
    Stretches,
    check_request,
    end_token_ids,
    merged,
)
from rlx.core.engine.rollout.stats import EngineStats
from rlx.core.engine.rollout.vllm_process import (
    borrowed_process,
    make_engine,
    preserved_generators,
    shut_down,
    vllm_environment,
)
from rlx.core.engine.rollout.vllm_stats import SchedulerReader
from rlx.core.engine.rollout.vllm_updates import BACKEND, OWN_BACKENDS, VllmUpdates
from rlx.core.errors import EngineError
from rlx.core.sizes import KV_BLOCK

PREFILL_TOKENS = 8192
"""Most tokens of one step on CPU."""
EXTENSION = "rlx.core.engine.rollout.vllm_worker.WorkerExtension"


class _Running(NamedTuple):
    request: GenerateRequest
    stretches: Stretches
    internal_id: str


class VllmCore:
    """Samples with vLLM; batching, KV cache and prefix sharing are vLLM's."""

    def __init__(
        self,
        *,
        model: str,
        settings: RolloutConfig,
        context_length: int,
        dtype: str,
        seed: int,
        threads: int,
        sleeps: bool = False,
        transport: str = "auto",
    ) -> None:
        self._model = model
        self._settings = settings
        self._context_length = context_length
        self._dtype = dtype
        self._seed = seed
        self._threads = threads
        self._sleeps = sleeps
        self._asleep = False
        self._transport = transport
        self._engine: Any = None
        self._updates: VllmUpdates | None = None
        self._end_tokens: tuple[int, ...] = ()
        self._vocabulary = 0
        self._version = 0
        self._published: int | None = None
        """Version of the weights that a learner sent last; None: those of the start, or none."""
        self._running: dict[Key, _Running] = {}

    def start(self) -> Mapping[str, Any]:
        variables = vllm_environment(self._model, threads=self._threads)
        with borrowed_process({**variables, "RLX_ENGINE_PID": str(os.getpid())}):
            import torch
            import vllm

            torch.set_num_threads(self._threads)
            self._engine = make_engine(self._arguments())
            self._scheduler = SchedulerReader(self._engine)
        config = self._engine.model_config
        self._end_tokens = end_token_ids(self._model, config.hf_config)
        self._vocabulary = config.get_vocab_size()
        cache = self._engine.vllm_config.cache_config
        return {
            "engine": "vllm",
            "engine_version": vllm.__version__,
            "context_length": config.max_model_len,
            "dtype": str(config.dtype).removeprefix("torch."),
            "kv_cache_tokens": cache.num_gpu_blocks * cache.block_size,
            "end_tokens": list(self._end_tokens),
            "threads": self._threads,
        }

    def _arguments(self) -> dict[str, Any]:
        """Arguments of `EngineArgs`."""
        import torch
        from transformers import AutoConfig
        from vllm.config import WeightTransferConfig

        settings = self._settings
        config = AutoConfig.from_pretrained(self._model)
        dtype = self._dtype
        if dtype == "auto":
            # vLLM's own "auto" turns float32 checkpoints into 16-bit ones.
            dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        arguments: dict[str, Any] = {
            "model": self._model,
            "dtype": dtype,
            "seed": self._seed,
            "max_model_len": self._context_length,
            "max_num_seqs": settings.max_running,
            "tensor_parallel_size": settings.tensor_parallel,
            # Inside a Ray actor vLLM would ask Ray for more actors; children of this process see
            # its GPUs, and end with it.
            "distributed_executor_backend": "mp" if settings.tensor_parallel > 1 else None,
            "enforce_eager": settings.enforce_eager,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "worker_extension_cls": EXTENSION,
            "weight_transfer_config": WeightTransferConfig(
                backend=self._transport if self._transport in OWN_BACKENDS else BACKEND
            ),
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if torch.cuda.is_available():
            return {
                **arguments,
                "gpu_memory_utilization": settings.gpu_memory_utilization,
                "enable_sleep_mode": self._sleeps,
            }
        budget = int(settings.kv_cache_gib * 2**30)
        needed = kv_bytes(
            config, dtype=dtype, sequences=settings.max_running, tokens=self._context_length
        )
        return {
            **arguments,
            "block_size": KV_BLOCK,
            "kv_cache_memory_bytes": min(budget, needed) if needed else budget,
            # vLLM can't rewind a CPU generator after a partial prefill: a seeded request whose
            # prompt is split over two steps would raise "CPU Generator does not use offset".
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(PREFILL_TOKENS, self._context_length),
        }

    def check(self, request: GenerateRequest) -> None:
        if self._asleep:
            raise EngineError("vllm sleeps until it gets new weights")
        check_request(request, context_length=self._context_length, vocabulary=self._vocabulary)

    def add(self, key: Key, request: GenerateRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed,
            max_tokens=sampling.max_new_tokens,
            # All of them by name: vLLM has no tokenizer here to ask for the end token.
            ignore_eos=True,
            stop_token_ids=list(merged(self._end_tokens, sampling.stop_token_ids)),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": [int(token) for token in request.prompt]}
        internal_id = self._engine.add_request(str(key), prompt, parameters)
        self._running[key] = _Running(request, Stretches(self._version), internal_id)

    def busy(self) -> bool:
        return bool(self._running)

    def step(self) -> Finished:
        with preserved_generators():
            outputs = self._engine.step()
        self._scheduler.note(len(outputs))
        return [self._finish(int(output.request_id), output) for output in outputs]

    def abort(self, keys: Sequence[Key]) -> Finished:
        from vllm.v1.engine import FinishReason

        finished = []
        for key in keys:
            output = self._state(key).make_request_output([], None, FinishReason.ABORT, None)
            finished.append(self._finish(key, output))
        self._engine.abort_request([str(key) for key in keys])
        return finished

    def _state(self, key: Key) -> Any:
        """What vLLM knows of a running request."""
        return self._engine.output_processor.request_states[self._running[key].internal_id]

    def _finish(self, key: Key, output: Any) -> tuple[Key, Generation]:
        request, stretches, _ = self._running.pop(key)
        completion = output.outputs[0]
        tokens = np.asarray(completion.token_ids, dtype=np.int32)
        # logprobs=0: one entry per position, the sampled token's.
        logprobs = np.asarray(completion.logprobs.logprobs, dtype=np.float32)
        if len(tokens) != len(logprobs):
            raise RuntimeError(f"{len(tokens)} tokens came with {len(logprobs)} log-probs")
        generation = Generation(
            request_id=request.id,
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            version=stretches.version,
            versions=stretches.of(len(tokens)),
        )
        return key, generation

    def load_weights(self, update: WeightsUpdate) -> PublishReport:
        started = time.perf_counter()
        if self._updates is None:
            self._updates = VllmUpdates(
                self._engine.engine_core, workers=self._settings.tensor_parallel
            )
        if self._asleep:
            self._engine.wake_up(["weights"])
        received = self._updates.take(update, complete=self._needs_all(update))
        if self._asleep:
            self._engine.wake_up(["kv_cache"])
            self._asleep = False
        self.forget()
        for key, running in self._running.items():
            sampled = self._state(key).detokenizer.num_output_tokens()
            running.stretches.replaced(update.version, sampled)
        self._version = self._published = update.version
        return PublishReport(
            version=update.version,
            seconds=time.perf_counter() - started - received.waited,
            checksum=received.checksum,
        )

    def _needs_all(self, update: WeightsUpdate) -> bool:
        return update.base is None or update.base != self._published

    def sleep(self, level: int) -> None:
        if self._sleeps and not self._asleep:
            self._engine.sleep(level)
            self._asleep = True
            if level > 1:
                self._published = None

    def take_stats(self) -> EngineStats:
        return self._scheduler.take()

    def forget(self) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def stop(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            shut_down(engine)


def kv_bytes(config: Any, *, dtype: str, sequences: int, tokens: int) -> int:
    """KV cache that `sequences` of `tokens` each can fill at most; 0 where it can't be told.

    Keeps the cache of a small model from taking (and clearing) all of `kv_cache_gib`.
    """
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    heads = getattr(text, "num_attention_heads", 0)
    if not layers or not heads or getattr(text, "kv_lora_rank", None):
        return 0
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    itemsize = 4 if dtype == "float32" else 2
    blocks = sequences * -(-tokens // KV_BLOCK) + 1
    return int(2 * layers * kv_heads * head_size * itemsize * KV_BLOCK * blocks)
