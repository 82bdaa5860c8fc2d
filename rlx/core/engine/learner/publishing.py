"""A learner rank's part in publications: what is sent, and through which sender."""

from __future__ import annotations

import dataclasses

from rlx.core.engine.interfaces import PublicationPlan, SentWeights, WeightsUpdate
from rlx.core.engine.learner.policy_weights import PolicyWeights
from rlx.core.engine.learner.sharded import ShardedModel
from rlx.core.engine.learner.vllm_sender import VllmSender
from rlx.core.engine.transfer.errors import TransferError
from rlx.core.engine.transfer.sender import Sender
from rlx.core.errors import EngineError


class Publishing:
    """Offers and sends the weights of one policy. All ranks are called together."""

    def __init__(self, policy: ShardedModel, *, rank: int) -> None:
        self._policy = policy
        self._rank = rank
        self._sender: Sender | None = None
        self._vllm: VllmSender | None = None
        self._offered: PublicationPlan | None = None

    def offer(self, plan: PublicationPlan) -> WeightsUpdate | None:
        """Prepare a publication; rank 0 returns what engines must know."""
        if not self._policy.renews_some:
            plan = dataclasses.replace(plan, base=None)
        self._offered = plan
        if plan.transport in ("nccl", "ipc"):
            if self._vllm is None:
                self._vllm = VllmSender(plan, rank=self._rank)
            return self._vllm.offer(plan, self._source(plan))
        if self._rank:
            return None
        if self._sender is None or self._sender.transport != plan.transport:
            self._close_sender()
            self._sender = Sender(
                transport=plan.transport, receivers=plan.receivers, bucket=plan.bucket
            )
        update = self._sender.offer(plan.version, plan.base)
        self._offered = dataclasses.replace(plan, base=update.base)
        return update

    def send(self) -> SentWeights | None:
        """Send what was offered last; rank 0 returns the report.

        Raises:
            EngineError: an engine is gone, or `abort` was called.
        """
        plan = self._offered
        assert plan is not None
        try:
            if self._vllm is not None:
                return self._vllm.send(plan)
            source = self._source(plan)
            if self._sender is not None:
                return self._sender.send(source, plan.version)
            source.gather()
            return None
        except TransferError as error:
            raise EngineError(f"publication of version {plan.version}: {error}") from error

    def abort(self) -> None:
        """Have a running `send` give up; called from another thread."""
        if self._sender is not None:
            self._sender.abort()

    def close(self) -> None:
        self._close_sender()
        if self._vllm is not None:
            self._vllm.close()

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _source(self, plan: PublicationPlan) -> PolicyWeights:
        return PolicyWeights(self._policy, renewed=plan.base is not None)
