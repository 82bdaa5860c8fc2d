"""vLLM's `nccl` and `ipc`: what rlx says to vLLM's classes. No accelerator takes part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_cases import CONTEXT, ModelSource, make_model, settings

from rlx.core.engine.interfaces import PublicationPlan, WeightsLink, WeightsUpdate
from rlx.core.engine.learner.vllm_sender import VllmSender
from rlx.core.engine.rollout.vllm_core import VllmCore
from rlx.core.engine.rollout.vllm_updates import VllmUpdates
from rlx.core.engine.transfer.store import Store

pytestmark = pytest.mark.engine
SOURCE = ModelSource(
    {
        "embedding": torch.randn(7, 4).bfloat16(),
        "transposed": torch.randn(3, 5).T,
        "norm": torch.randn(4),
    }
)


def plan(transport: str, *, version: int = 1) -> PublicationPlan:
    return PublicationPlan(
        version=version, base=None, transport=transport, receivers=4, bucket=3 * 2**20
    )


class Core:
    """In the place of vLLM's engine core: what its workers are told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> list[Any]:
        self.calls.append((method, kwargs))
        return []


def test_nccl_is_described_in_vllms_own_terms() -> None:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    update = VllmSender(plan("nccl"), rank=0).offer(plan("nccl"), SOURCE)
    assert update is not None
    init = NCCLWeightTransferInitInfo(**update.init_info)
    assert (init.rank_offset, init.world_size) == (1, 5)
    assert (init.packed, init.packed_buffer_size_bytes) == (True, 3 * 2**20)
    assert init.master_address == "127.0.0.1"
    told = NCCLWeightTransferUpdateInfo(**update.update_info)
    assert told.names == ["embedding", "transposed", "norm"]
    assert told.dtype_names == ["bfloat16", "float32", "float32"]
    assert told.shapes == [[7, 4], [5, 3], [4]]


def test_nccl_sends_the_weights_that_it_described(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    opened: list[Any] = []
    sent: list[dict[str, torch.Tensor]] = []

    def endpoint(info: Any) -> Any:
        opened.append(info)
        return SimpleNamespace(destroy=lambda: opened.append("destroyed"))

    def broadcast(*, iterator: Iterator[Any], group: Any, src: int, **options: Any) -> None:
        assert options["buffer_size_bytes"] == 3 * 2**20
        sent.append({name: tensor.clone() for name, tensor in iterator})

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", endpoint)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    sender = VllmSender(plan("nccl"), rank=0)
    for version in (1, 2):
        update = sender.offer(plan("nccl", version=version), SOURCE)
        assert update is not None
        report = sender.send(plan("nccl", version=version))
        assert report is not None
        assert (report.version, report.checksum) == (version, "")
        assert report.bytes == 7 * 4 * 2 + 15 * 4 + 4 * 4
    assert len(sent) == 2
    assert all(torch.equal(sent[0][name], SOURCE.tensors[name]) for name in SOURCE.tensors)
    (info,) = opened
    assert (info.rank, info.world_size, info.packed) == (0, 5, True)
    assert info.master_port == update.init_info["master_port"]
    sender.close()
    assert opened[1:] == ["destroyed"]


def test_a_rank_that_does_not_send_only_gathers() -> None:
    gathered: list[str] = []

    class Watched(ModelSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().__iter__():
                gathered.append(name)
                yield name, tensor

    sender = VllmSender(plan("nccl"), rank=1)
    assert sender.offer(plan("nccl"), Watched(SOURCE.tensors)) is None
    assert sender.send(plan("nccl")) is None
    assert gathered == ["embedding", "transposed", "norm"]


def test_with_nccl_every_worker_of_every_engine_has_a_rank_of_its_own() -> None:
    store = Store.serve()
    link = WeightsLink(key="a", transport="nccl", address="127.0.0.1", port=store.port)
    update = WeightsUpdate(
        link=link, number=0, version=1, init_info={"rank_offset": 1}, update_info={"names": ["x"]}
    )
    cores = [Core(), Core()]
    for core in cores:
        updates = VllmUpdates(core, workers=2)
        assert updates.take(update, complete=True).checksum == ""
        assert updates.take(update, complete=True).checksum == ""
    offsets = []
    for core in cores:
        (first, arguments), *rest = core.calls
        assert first == "init_weight_transfer_engine"
        offsets.append(arguments["init_info"]["rank_offset"])
        assert [method for method, _ in rest] == [
            *("start_weight_update", "update_weights", "finish_weight_update")
        ] * 2
        assert rest[1][1] == {"update_info": {"names": ["x"]}}
    assert sorted(offsets) == [1, 3]


def test_a_new_learner_is_connected_to_anew() -> None:
    core = Core()
    updates = VllmUpdates(core, workers=2)
    for key in ("a", "a", "b"):
        link = WeightsLink(key=key, transport="ipc", address="127.0.0.1", port=1)
        update = WeightsUpdate(link=link, number=0, version=1, init_info={"packed": False})
        updates.take(update, complete=True)
    methods = [method for method, _ in core.calls]
    assert methods.count("init_weight_transfer_engine") == 2
    assert core.calls[0][1] == {"init_info": {"packed": False}}


def test_ipc_hands_over_addresses_and_keeps_the_tensors_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.weight_transfer import ipc_engine

    device = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(
        ipc_engine, "reduce_tensor", lambda tensor: (None, (tensor.data_ptr(), tensor.shape))
    )
    sender = VllmSender(plan("ipc"), rank=0)
    update = sender.offer(plan("ipc"), SOURCE)
    assert update is not None
    assert ipc_engine.IPCWeightTransferInitInfo(**update.init_info).packed is False
    told = ipc_engine.IPCWeightTransferUpdateInfo(**update.update_info)
    assert told.names == ["embedding", "transposed", "norm"]
    assert told.tensor_sizes is None
    kept = {tensor.data_ptr() for tensor in sender._source.kept}
    assert {handle["GPU-1"][0] for handle in told.ipc_handles} == kept
    assert SOURCE.tensors["embedding"].data_ptr() in kept, "not a copy"
    report = sender.send(plan("ipc"))
    assert report is not None
    assert sender._source.kept == []


@pytest.mark.parametrize(
    ("transport", "backend"),
    [("auto", "rlx_buckets"), ("gloo", "rlx_buckets"), ("nccl", "nccl"), ("ipc", "ipc")],
)
def test_engine_is_made_for_the_transport(transport: str, backend: str, tmp_path: Path) -> None:
    core = VllmCore(
        model=str(make_model(tmp_path)),
        settings=settings(),
        context_length=CONTEXT,
        dtype="float32",
        seed=0,
        threads=1,
        transport=transport,
    )
    assert core._arguments()["weight_transfer_config"].backend == backend
