"""Gives a learner's new weights to the rollout engines, and checks that they got them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from rlx.core.config import PublicationConfig
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.interfaces import PublicationPlan, PublishReport, SentWeights, WeightsUpdate
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.engine.transfer.place import remove_left
from rlx.core.errors import EngineError

_MIB = 2**20
_LAST_WORDS = 10.0
"""Seconds that the other side has to notice that one side failed."""


class Publisher:
    """One publication after the other, to the same engines.

    The first sends all weights. Later ones leave out what training does not change.

    Args:
        transport: as `publication_transport` chose it.
        receivers: worker processes of all engines together.
    """

    def __init__(self, settings: PublicationConfig, *, transport: str, receivers: int) -> None:
        self._bucket = settings.bucket_mib * _MIB
        self._transport = transport
        self._receivers = receivers
        self._published: int | None = None
        self._metrics: dict[str, float] = {}
        self._links: set[str] = set()

    async def publish(
        self, learner: LearnerGroup, engines: RolloutEngines, *, version: int
    ) -> None:
        """Replace the engines' weights by the learner's.

        Raises:
            EngineError: the learner or an engine failed, or an engine received other weights than
                the learner sent. Engines that have taken a part of them take no request any more.
        """
        base, self._published = self._published, None
        plan = PublicationPlan(
            version=version,
            base=base,
            transport=self._transport,
            receivers=self._receivers,
            bucket=self._bucket,
        )
        update = await learner.offer_weights(plan)
        self._links.add(update.link.key)
        sent, reports = await self._transfer(learner, engines, update)
        _compare(sent, reports)
        self._published = version
        seconds = max(*(report.seconds for report in reports), 1e-9)
        self._metrics = {
            "publish/seconds": seconds,
            "publish/gib": sent.bytes / 2**30,
            "publish/gib_per_s": sent.bytes / 2**30 / seconds,
        }

    async def _transfer(
        self, learner: LearnerGroup, engines: RolloutEngines, update: WeightsUpdate
    ) -> tuple[SentWeights, list[PublishReport]]:
        if update.link.transport == "ipc":
            # The engines read the learner's own memory; it lets go of it afterwards.
            reports = await engines.load_weights(update)
            return await learner.send_weights(), reports
        sending = asyncio.ensure_future(learner.send_weights())
        loading = asyncio.ensure_future(engines.load_weights(update))
        try:
            await _both(sending, loading, learner)
        finally:
            sending.cancel()
            loading.cancel()
        return sending.result(), loading.result()

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def close(self) -> None:
        """Remove what learners leave in shared memory: they are killed, not stopped."""
        for key in self._links:
            remove_left(key)


async def _both(
    sending: asyncio.Future[Any], loading: asyncio.Future[Any], learner: LearnerGroup
) -> None:
    """Wait until both are done; when one fails, end the other and raise the first one's error."""
    _, running = await asyncio.wait({sending, loading}, return_when=asyncio.FIRST_EXCEPTION)
    given_up = sending in running
    if given_up:
        with contextlib.suppress(EngineError):  # it may be gone
            await learner.abort_publication()
    if running:
        await asyncio.wait(running, timeout=_LAST_WORDS)
    # What the learner says is why engines fail, unless it was told to give up.
    tasks = [loading] if given_up else [sending, loading]
    errors = [error for task in tasks if task.done() and (error := task.exception())]
    if not errors:
        return
    for other in errors[1:]:
        errors[0].add_note(f"Then the engines: {other}")
    raise errors[0]


def _compare(sent: SentWeights, reports: list[PublishReport]) -> None:
    for number, report in enumerate(reports):
        if (report.version, report.checksum) != (sent.version, sent.checksum):
            raise EngineError(
                f"publication of version {sent.version}: engine {number} has other weights than "
                f"the learner sent (version {report.version}, checksum {report.checksum} instead "
                f"of {sent.checksum})"
            )
