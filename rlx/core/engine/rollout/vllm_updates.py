"""Weight updates of an `LLMEngine`, through vLLM's weight-transfer API."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlx.core.engine.interfaces import WeightsUpdate
from rlx.core.engine.transfer.errors import TransferError
from rlx.core.engine.transfer.receiver import Received
from rlx.core.engine.transfer.store import Store
from rlx.core.errors import EngineError

BACKEND = "rlx_buckets"
"""Name under which rlx registers its own backend."""
OWN_BACKENDS = ("nccl", "ipc")
"""Transports that vLLM brings."""


class VllmUpdates:
    """What an engine does to take weights.

    Args:
        core: the engine's `engine_core`.
        workers: its worker processes.
    """

    def __init__(self, core: Any, *, workers: int) -> None:
        self._core = core
        self._workers = workers
        self._key = ""

    def take(self, update: WeightsUpdate, *, complete: bool) -> Received:
        """Replace the weights.

        Args:
            complete: all of them, also those that the update leaves out.

        An error leaves the model unusable.
        """
        own = update.link.transport in OWN_BACKENDS
        if own and complete and update.base is not None:
            raise EngineError(
                f"the weights of version {update.version} are changes to version {update.base}, "
                "which this engine has not"
            )
        if self._key != update.link.key:
            init_info = self._init_info(update) if own else asdict(update.link)
            self._call("init_weight_transfer_engine", init_info=init_info)
            self._key = update.link.key
        update_info = (
            dict(update.update_info) if own else {"number": update.number, "complete": complete}
        )
        self._call("start_weight_update")
        self._call("update_weights", update_info=update_info)
        self._call("finish_weight_update")
        return Received(checksum="", waited=0.0) if own else self._received()

    def _init_info(self, update: WeightsUpdate) -> dict[str, Any]:
        """With `nccl` each worker needs a rank of its own among those of all engines."""
        info = dict(update.init_info)
        if update.link.transport == "nccl":
            store = Store.connect(update.link.address, update.link.port)
            info["rank_offset"] += store.add("joined", self._workers) - self._workers
        return info

    def _received(self) -> Received:
        found: list[Received] = self._call("rlx_received")
        if len({worker.checksum for worker in found}) != 1:
            raise TransferError(f"the engine's workers received different weights: {found}")
        return found[0]

    def _call(self, method: str, **arguments: Any) -> list[Any]:
        answers: list[Any] = self._core.collective_rpc(method, kwargs=arguments)
        return answers
