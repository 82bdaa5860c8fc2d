"""vLLM's own weight transport for accelerators, from the learner's side: `nccl` and `ipc`.

`nccl` broadcasts from rank 0 to the workers of all engines, each on a device of its own. `ipc`
hands the addresses of tensors over to an engine on the same device. vLLM's trainer engines drive
both; the calls that they make to the engines go nowhere here, because the driver makes them: it
passes on what `offer` returns.

Neither has been run on an accelerator by rlx; tests compare the arguments with vLLM's dataclasses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torch import Tensor

from rlx.core.engine.interfaces import (
    PublicationPlan,
    SentWeights,
    WeightsLink,
    WeightsUpdate,
)
from rlx.core.engine.transfer.place import here
from rlx.core.engine.transfer.sender import WeightsSource
from rlx.core.engine.transfer.store import Store
from rlx.core.engine.workers import free_port


class VllmSender:
    """Sends through `NCCLTrainerWeightTransferEngine` or `IPCTrainerWeightTransferEngine`.

    Args:
        plan: of the first publication; transport, receivers and bucket stay.
        rank: among the learner's; 0 sends.
    """

    def __init__(self, plan: PublicationPlan, *, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._store = Store.serve()
        self._address = here().address
        self._nccl_port = free_port()
        self._source = _Source()
        self._calls = _Recorded()
        self._engine: Any = None
        self._number = -1

    def offer(self, plan: PublicationPlan, source: WeightsSource) -> WeightsUpdate | None:
        """Describe what `send` will send; with `ipc` it is sent now. All ranks call it."""
        self._source.inner = source
        self._number += 1
        if plan.transport == "ipc":
            self._source.kept.clear()
            self._start(self._ipc_info())
            self._engine.send_weights()
        if self._rank:
            return None
        return WeightsUpdate(
            link=WeightsLink(
                key=f"{self._address}:{self._store.port}",
                transport=plan.transport,
                address=self._address,
                port=self._store.port,
            ),
            number=self._number,
            version=plan.version,
            base=plan.base if self._number else None,
            init_info=self._worker_init_info(),
            update_info=self._calls.update if plan.transport == "ipc" else self._described(),
        )

    def send(self, plan: PublicationPlan) -> SentWeights | None:
        """Send what was offered; with `ipc`, let go of it, once the engines are done."""
        if plan.transport == "ipc":
            self._source.kept.clear()
        else:
            # It waits until every engine has come.
            self._start(self._nccl_info())
            self._engine.send_weights()
        if self._rank:
            return None
        sizes = (
            shape.numel() * dtype.itemsize for _, dtype, shape in self._source.inner.metadata()
        )
        return SentWeights(version=plan.version, bytes=sum(sizes), checksum="")

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    def _start(self, info: Any) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        if self._engine is None:
            self._engine = WeightTransferTrainerFactory.trainer_init(
                info, client=self._calls, source=_vllm_source(self._source)
            )

    def _nccl_info(self) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(
            rank=self._rank,
            master_address=self._address,
            master_port=self._nccl_port,
            world_size=1 + self._plan.receivers,
            packed=True,
            packed_buffer_size_bytes=self._plan.bucket,
        )

    def _ipc_info(self) -> Any:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        # Not packed: an engine reads the learner's tensors where they are, without a bucket.
        return IPCTrainerInitInfo(rank=self._rank, packed=False)

    def _worker_init_info(self) -> dict[str, Any]:
        """What every engine's workers are told; each engine adds its place to `rank_offset`."""
        if self._plan.transport == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo

            return asdict(IPCWeightTransferInitInfo(packed=False))
        from vllm.distributed.weight_transfer.nccl_common import (
            NCCLWeightTransferInitInfo,
            worker_init_payload,
        )

        info = self._nccl_info()
        return worker_init_payload(
            NCCLWeightTransferInitInfo(
                master_address=info.master_address,
                master_port=info.master_port,
                rank_offset=1,
                world_size=info.world_size,
                packed=info.packed,
                packed_buffer_size_bytes=info.packed_buffer_size_bytes,
                packed_num_buffers=info.packed_num_buffers,
            )
        )

    def _described(self) -> dict[str, Any]:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

        names, dtypes, shapes = zip(*self._source.inner.metadata(), strict=True)
        return asdict(
            NCCLWeightTransferUpdateInfo(
                names=list(names),
                dtype_names=[str(dtype).removeprefix("torch.") for dtype in dtypes],
                shapes=[list(shape) for shape in shapes],
            )
        )


class _Recorded:
    """In the place of vLLM's client: keeps what an engine would be told."""

    def __init__(self) -> None:
        self.update: dict[str, Any] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The driver does."""

    def start_weight_update(self) -> None:
        """The driver does."""

    def update_weights(self, update_info: Any) -> None:
        self.update = update_info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The driver does."""


class _Source:
    """The source of the publication under way, and the tensors whose addresses were given away."""

    inner: WeightsSource

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


def _vllm_source(current: _Source) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [
                ParamMeta(name, dtype, tuple(shape))
                for name, dtype, shape in current.inner.metadata()
            ]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in current.inner:
                whole = tensor.contiguous()
                current.kept.append(whole)
                yield name, whole

    return Source()
