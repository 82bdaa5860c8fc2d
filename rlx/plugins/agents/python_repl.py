"""The model writes Python, sees what it prints, and goes on until it writes none.

Fenced `python` blocks run in a sandboxed session (no network, no files but its own folder, limits)
that lasts for the episode, so what is defined in one turn is there in the next. The text of the
last turn is the answer: that is what rewards judge. Source: program-aided reasoning as in ToRA
(arXiv:2309.17452).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Annotated

from annotated_types import Ge, Gt

from rlx.core.agents import Episode
from rlx.core.component import component
from rlx.core.errors import ComponentError
from rlx.plugins.agents._repl import Output, PythonSession
from rlx.plugins.rewards.sandbox import Limits

_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MARK = "```output"
"""What comes before output; a model that writes it itself is about to make output up."""
_NOTHING = "(it printed nothing)"


@component(form="free")
class PythonRepl:
    """Let the model run Python until it answers without.

    Args:
        max_turns: engine calls; code in the last one is not run.
        timeout: seconds for the code of one turn; a session that takes longer is started anew.
        output: characters that the model sees of what one turn's code printed.
        role: of the message with the output, in a chat.
        site_packages: installed packages can be imported, not only the standard library.
        memory_mib: of the session.
        processes: threads and processes that it may start.
        sessions: at once, over all episodes; each is three processes.
        require_isolation: an error where the system doesn't permit to take network and files away.
    """

    def __init__(
        self,
        *,
        max_turns: Annotated[int, Ge(1)] = 6,
        timeout: Annotated[float, Gt(0)] = 10.0,
        output: Annotated[int, Ge(40)] = 4000,
        role: str = "user",
        site_packages: bool = False,
        memory_mib: Annotated[int, Ge(64)] = 512,
        processes: Annotated[int, Ge(0)] = 16,
        sessions: Annotated[int, Ge(1)] = 64,
        require_isolation: bool = False,
    ) -> None:
        self._max_turns = max_turns
        self._output = output
        self._role = role
        self._site_packages = site_packages
        self._limits = Limits(timeout=timeout, memory_mib=memory_mib, processes=processes)
        self._sessions = sessions
        self._require_isolation = require_isolation
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    async def run(self, episode: Episode) -> None:
        session = PythonSession(
            limits=self._limits,
            pieces=self._max_turns,
            output=self._output,
            site_packages=self._site_packages,
        )
        slots = self._own_slots()
        held = False
        counts: Counter[str] = Counter()
        try:
            for turn in range(self._max_turns):
                reply = await episode.generate(stop=[_MARK])
                episode.response = reply.text
                code = self.code_of(reply.text)
                if not code.strip() or turn + 1 == self._max_turns:
                    break
                if not held:
                    with episode.waiting():
                        held = await slots.acquire()
                output = await session.run(code)
                self._check(session)
                counts["code_runs"] += 1
                counts["code_errors"] += output.failed
                self._show(episode, output, marked=reply.stop is not None)
        finally:
            for name in ("code_runs", "code_errors"):
                episode.metric(name, counts[name])
            await session.close()
            if held:
                slots.release()

    def code_of(self, text: str) -> str:
        """The Python in what the model wrote."""
        return "\n".join(_BLOCK.findall(text))

    def _show(self, episode: Episode, output: Output, *, marked: bool) -> None:
        """Observe the output. `marked`: the model has written the mark before it already."""
        text = f"\n{output.text.rstrip() or _NOTHING}\n```"
        if episode.chat:
            episode.observe({"role": self._role, "content": _MARK + text})
        else:
            episode.observe(f"{text}\n" if marked else f"\n{_MARK}{text}\n")

    def _check(self, session: PythonSession) -> None:
        if self._require_isolation and not (session.isolated and session.confined):
            what = "Landlock (files)" if session.isolated else "namespaces (network)"
            raise ComponentError(f"this system has no {what} to keep code in, and it is required")

    def _own_slots(self) -> asyncio.Semaphore:
        """One count for each event loop: a semaphore belongs to the loop that it waited on."""
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots = {loop: asyncio.Semaphore(self._sessions)}
        return self._slots[loop]
