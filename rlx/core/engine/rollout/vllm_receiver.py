"""rlx's buckets as a backend of vLLM's weight-transfer API, beside vLLM's own `nccl` and `ipc`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rlx.core.engine.interfaces import WeightsLink
from rlx.core.engine.transfer.errors import TransferError
from rlx.core.engine.transfer.receiver import Received, Receiver


@dataclass
class BucketsInitInfo(WeightTransferInitInfo):
    """The fields of a `WeightsLink`."""

    key: str
    transport: str
    address: str
    port: int


@dataclass
class BucketsUpdateInfo(WeightTransferUpdateInfo):
    """Which publication of the link to take."""

    number: int
    complete: bool
    """All weights are needed; else those that it leaves out stay."""


class BucketsEngine(WeightTransferEngine[BucketsInitInfo, BucketsUpdateInfo]):
    """Loads a publication bucket by bucket, layer by layer, in place."""

    init_info_cls = BucketsInitInfo
    update_info_cls = BucketsUpdateInfo
    _receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: BucketsInitInfo) -> None:
        self.shutdown()
        self._receiver = Receiver(
            WeightsLink(
                key=init_info.key,
                transport=init_info.transport,
                address=init_info.address,
                port=init_info.port,
            )
        )

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._kernels = unpack_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketsUpdateInfo) -> None:
        """Take a publication.

        Raises:
            TransferError: it did not come whole, or does not fit; the model is unusable then.
        """
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        assert self._receiver is not None
        model: Any = self.model
        self._complete = update_info.complete
        self._loaded: set[str] = set()
        with disable_mtp_completeness_check():
            buckets = self._receiver.buckets(update_info.number, complete=update_info.complete)
            for tensors in buckets:
                self._loaded |= model.load_weights(tensors.items()) or set()
                if not self._receiver.stays:
                    keep_unfinished(model, tensors)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        lacking = half_loaded(self.model)
        with _quiet_about_gaps():
            finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._kernels:
            # Experts that did not come keep their packed form, and the kernel for it.
            method.moe_kernel = method.moe_kernel or kernel
        repack_tied_heads(self.model, self._loaded)
        if self._complete:
            lacking += missing_parameters(self.model, self.model_config.hf_config, self._loaded)
        if lacking:
            raise TransferError(f"the published weights lack {', '.join(lacking[:5])}")

    @property
    def received(self) -> Received:
        """About what came last."""
        assert self._receiver is not None
        return self._receiver.received

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def keep_unfinished(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Copy what vLLM still holds of a bucket, before its memory is written again.

    vLLM collects the parts of a layer (query, key, value) and loads them when all are there.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    spaces = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    for layer in model.modules():
        for _, call in get_layerwise_info(layer).loaded_weights:
            for name, value in call.arguments.items():
                if isinstance(value, torch.Tensor) and _starts_in(value, spaces):
                    call.arguments[name] = value.clone()


def _starts_in(tensor: torch.Tensor, spaces: set[int]) -> bool:
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in spaces


def half_loaded(model: Any) -> list[str]:
    """Linear layers of which a part came, and a part did not: that would be random numbers."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if isinstance(layer, LinearBase) and info.can_load():
            total = info.load_numel_total or 0
            if 0 < info.load_numel < total:
                found.append(f"a part of {name}")
    return found


def missing_parameters(model: Any, config: Any, loaded: set[str]) -> list[str]:
    """Parameters that a publication left at their old values."""
    tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    names = {name for name, _ in model.named_parameters()} - loaded
    return sorted(name for name in names if not (tied and "lm_head" in name))


def unpack_experts(model: Any) -> list[tuple[Any, Any]]:
    """Make vLLM's CPU backend pack the experts of a mixture again when new ones arrive.

    Once a layer has a kernel, a reload skips the packing and copies plain weights into packed
    storage: log-probs off by several units, without any error. Returns the methods and their
    kernels, which are taken away.
    """
    from vllm.platforms import current_platform

    found = []
    for module in model.modules() if current_platform.is_cpu() else ():
        method: Any = getattr(module, "quant_method", None)
        if (kernel := getattr(method, "moe_kernel", None)) is not None:
            method.moe_kernel = None
            found.append((method, kernel))
    return found


@contextmanager
def _quiet_about_gaps() -> Iterator[None]:
    """vLLM warns of every layer that keeps its weights; what must come is checked here."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def repack_tied_heads(model: Any, loaded: set[str]) -> None:
    """Refresh the packed copy that vLLM's CPU backend keeps of the output head.

    A reload does not touch the head of a model with tied embeddings, and its packed copy would
    keep the old weights: log-probs off by some hundredths, without any error.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    changed = {parameters[name].data_ptr() for name in loaded if name in parameters}
    for name, module in model.named_modules():
        tied = isinstance(module, ParallelLMHead) and f"{name}.weight" not in loaded
        if tied and module.weight.data_ptr() in changed:
            module.quant_method.process_weights_after_loading(module)
