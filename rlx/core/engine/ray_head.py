"""Whether the head of a Ray cluster is there.

Without the head Ray waits for minutes, or for ever, or ends the driver's process. So it is asked,
with a time-out of our own: before a cluster is joined, and as long as a run works on it.

The questioner (`HeadWatch._ask_on`), a thread: Ray may block the event loop itself (`ray.put`)
  consumes:      answers of the head
  waits for:     `faults.heartbeat` seconds, then an answer
  unblocked by:  `close`
  produces:      at most one verdict, which fails whatever waits for the cluster; where the event
                 loop does not take it, the end of the process
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rlx.core.config import FaultsConfig
from rlx.core.engine.signals import end_now, tell
from rlx.core.errors import ClusterLostError

T = TypeVar("T")
KNOCK = 10.0
"""Seconds that the head has to take a connection, and then to answer."""
_QUESTION = 5.0
"""Seconds that it has for an answer in mid-run, before it is asked again."""
_GONE = 45.0
"""Seconds for which nobody may listen where the head was. Ray's own processes end after 60."""
_BLOCKED = 60.0
"""Seconds for which the event loop may leave the verdict lying."""


class HeadSilentError(ConnectionError):
    """Something takes connections there, and does not answer."""


class NodeLostError(Exception):
    """The head has given a node up."""


class Head:
    """A connection to the head.

    Args:
        address: `host:port` of it.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._stub: Any = None

    def ask(self, timeout: float, *, node: str | None = None) -> None:
        """Return when it answers (blocking).

        Args:
            node: Ray's id of a node that should be alive.

        Raises:
            HeadSilentError: it does not answer in time.
            ConnectionError: it is not there.
            NodeLostError: it holds the node for dead.
        """
        import grpc
        from ray.core.generated import gcs_service_pb2

        messages: Any = gcs_service_pb2  # made by protobuf, which tells no types
        request = messages.CheckAliveRequest(node_ids=[bytes.fromhex(node)] if node else [])
        try:
            reply = self._connected().CheckAlive(request, timeout=timeout)
        except grpc.RpcError as error:
            status: Any = error
            if status.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise HeadSilentError(f"it has not answered within {timeout:g} s") from None
            if status.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise ConnectionError("what answers there is no head of a Ray cluster") from None
            if status.code() == grpc.StatusCode.UNAVAILABLE:
                raise ConnectionError(str(status.details())) from None
            return  # it is there, and has its reasons (a token that is missing): Ray tells them
        if node and not all(reply.raylet_alive):
            raise NodeLostError

    def _connected(self) -> Any:
        if self._stub is None:
            from ray._private.grpc_utils import init_grpc_channel
            from ray.core.generated import gcs_service_pb2_grpc

            channel = init_grpc_channel(self.address)
            self._stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        return self._stub


def knock(address: str) -> None:
    """Raise `ConnectionError` where no Ray cluster is, within twice `KNOCK` (blocking).

    Args:
        address: as `ray.init` takes it. Of `ray://host:port` only the port is looked at, and a
            name without a port is left to Ray.
    """
    where = address.removeprefix("ray://").partition("/")[0]
    if address == "auto":
        from ray._private.services import canonicalize_bootstrap_address

        where = canonicalize_bootstrap_address(address) or ""
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error
    if not address.startswith("ray://"):
        Head(where).ask(KNOCK)


class HeadWatch:
    """Notices that the head of the cluster, or the cluster's part on the driver's node, is lost."""

    def __init__(self, settings: FaultsConfig, *, where: Callable[[], str] = lambda: "") -> None:
        """`where`: what the run is at, for the verdict."""
        self._settings = settings
        self._where = where
        self._over: threading.Event | None = None
        self.lost: asyncio.Future[str] | None = None
        """Done with what is wrong."""

    def start(self, head: Head, node: str) -> None:
        """Ask beside the running event loop, until `close`.

        Args:
            node: Ray's id of the driver's.
        """
        if self._over is None:
            loop = asyncio.get_running_loop()
            self._over, self.lost = threading.Event(), loop.create_future()
            parts = (head, node, self._over, loop, self.lost)
            threading.Thread(target=self._ask_on, args=parts, name="rlx-head", daemon=True).start()

    def close(self) -> None:
        if self._over is not None:
            self._over.set()
        self._over = self.lost = None

    def _ask_on(
        self,
        head: Head,
        node: str,
        over: threading.Event,
        loop: asyncio.AbstractEventLoop,
        lost: asyncio.Future[str],
    ) -> None:
        why = self._verdict(head, node, over)
        if why is None:
            return
        why = f"{self._where()}: {why}"
        then = (
            "When the cluster is well again, the same command with `--resume` goes on from the "
            "last whole checkpoint, if there is one."
        )
        taken = threading.Event()

        def take() -> None:
            taken.set()
            if not lost.done():
                lost.set_result(f"{why}. {then}")

        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(take)
        if not taken.wait(_BLOCKED) and not over.is_set():
            tell(f"{why}, and the driver waits for it in Ray, so the process ends. {then}")
            end_now(1)

    def _verdict(self, head: Head, node: str, over: threading.Event) -> str | None:
        """Ask on; returns what is wrong, None at the end."""
        silent = 0.0
        every = self._settings.heartbeat
        while not over.wait(every):
            began = time.monotonic()
            try:
                head.ask(_QUESTION, node=node)
                silent = 0.0
                continue
            except NodeLostError:
                return (
                    f"the Ray cluster at {head.address} has lost the driver's node: Ray's process "
                    "there (raylet) died or does not answer"
                )
            except HeadSilentError:
                limit, what = self._settings.answer_timeout, "has not answered"
            except ConnectionError as error:
                limit, what = min(_GONE, self._settings.answer_timeout), f"is gone ({error})"
            # A time in which the driver itself was stopped counts for one question at most.
            silent += every + min(time.monotonic() - began, 2 * _QUESTION)
            if silent >= limit:
                return f"the head of the Ray cluster at {head.address} {what} for {silent:.0f} s"
        return None


async def unless(lost: asyncio.Future[str] | None, work: Awaitable[T]) -> T:
    """Await `work`; raises `ClusterLostError` with the verdict if that comes first."""
    if lost is None:
        return await work
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    try:
        either: set[asyncio.Future[Any]] = {task, lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClusterLostError(lost.result())
    finally:
        task.cancel()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
