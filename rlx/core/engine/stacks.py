"""Where every thread of every worker is, in files: what one wants to see when a run hangs.

Nothing is asked of the workers themselves, which may not be able to answer: the driver looks at the
processes of its own node (`rlx.core.engine.process_stacks`), and has the same done on other nodes.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlx.core.engine.process_stacks import stacks_of
from rlx.core.threads import CallTimeoutError, within

Elsewhere = Callable[[str, Sequence[int]], Awaitable[Sequence[str]]]
"""Gets the stacks of processes of another node: (Ray's id of it, their numbers) → texts."""
ELSEWHERE_PATIENCE = 30.0
"""Seconds that another node has to answer: a process that starts there, a signal, py-spy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a worker's process is."""

    node: str
    """Ray's id of the node: hosts may have the same name. Without Ray, the name of the host."""
    host: str
    pid: int

    @property
    def here(self) -> bool:
        return self.node == _own_node()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A worker whose stacks are wanted."""

    name: str
    location: Location
    doing: Sequence[str]
    """Methods that the driver waits for."""


def own_location() -> Location:
    return Location(node=_own_node(), host=socket.gethostname(), pid=os.getpid())


def _own_node() -> str:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return socket.gethostname()
    return str(ray.get_runtime_context().get_node_id())


async def dump_stacks(
    root: Path,
    about: str,
    suspects: Sequence[Suspect],
    elsewhere: Elsewhere,
    *,
    loop: asyncio.AbstractEventLoop | None = None,
) -> Path:
    """Write `<worker>.txt` for each suspect and `driver.txt`, each when it is known, to a new
    folder below `root`.

    Ends within `ELSEWHERE_PATIENCE`, whatever has become of the suspects' nodes.

    Args:
        about: who hangs, for the folder's name: a worker or `driver`.
        loop: the driver's, where that is not the running one.
    """
    folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{about}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "driver.txt").write_text(_own_stacks(loop))
    nodes: dict[str, list[Suspect]] = {}
    for suspect in suspects:
        nodes.setdefault(suspect.location.node, []).append(suspect)
    await asyncio.gather(*(_dump_node(folder, those, elsewhere) for those in nodes.values()))
    return folder


async def _dump_node(folder: Path, suspects: Sequence[Suspect], elsewhere: Elsewhere) -> None:
    """Write the files of suspects that are all on one node."""
    where = suspects[0].location
    numbers = [suspect.location.pid for suspect in suspects]
    if where.here:
        texts: Sequence[str] = await asyncio.gather(*map(stacks_of, numbers))
    else:
        try:
            texts = await within(ELSEWHERE_PATIENCE, elsewhere(where.node, numbers))
        except Exception as error:
            texts = [_unreached(suspect.location, error) for suspect in suspects]
    for suspect, text in zip(suspects, texts, strict=True):
        (folder / f"{suspect.name}.txt").write_text(_head(suspect) + text)


def _unreached(location: Location, error: Exception) -> str:
    why = str(error).strip()
    if isinstance(error, CallTimeoutError):
        why = f"it does not answer within {ELSEWHERE_PATIENCE:g} s"
    return (
        f"It is on another node, which could not be asked for its stacks: {why}\n"
        f"On {location.host}: py-spy dump --pid {location.pid}\n"
    )


def _head(suspect: Suspect) -> str:
    location = suspect.location
    return (
        f"worker {suspect.name}, process {location.pid} on {location.host} (node {location.node})\n"
        f"the driver waits for: {', '.join(suspect.doing) or 'nothing'}\n\n"
    )


def _own_stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Threads of this process, and tasks of a loop in it."""
    out = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        out.write(f"thread {thread} {names.get(thread, '')}\n{stack}\n")
    for task in asyncio.all_tasks(loop):
        out.write(f"task {task.get_name()}\n")
        task.print_stack(file=out)
        out.write("\n")
    return out.getvalue()
