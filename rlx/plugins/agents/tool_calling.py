"""The model calls Python functions and answers with what they return.

Each turn's text is read for tool calls (Hermes/Qwen `<tool_call>` marks, or JSON as Llama and
Mistral write it); results, and errors, are the next observation. A turn without a call is the
answer: that is what rewards judge.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from annotated_types import Ge, Gt

from rlx.core.agents import Episode
from rlx.core.component import component
from rlx.core.tool_calls import ToolCalls, parser_of
from rlx.plugins.agents._tools import Toolbox, ToolError, ToolSession, gather_calls

_MARK = "<tool_response>"
"""What comes before a result; a model that writes it itself is about to make the result up."""
_CALCULATOR = "rlx.plugins.agents.calculator:calculate"


@component(form="free")
class ToolCalling:
    """Let the model call functions until it answers without.

    A chat template that takes tools is given them; with any other, a system message describes them.

    Args:
        tools: functions, or classes whose public methods are tools (every episode has an object of
            its own), as `file.py:name` or `pkg.mod:name`. Type hints and docstring become the
            JSON schema; a parameter annotated `rlx.Task` or `rlx.Episode` is filled in.
        max_turns: engine calls; in the last one a tool call gets no result.
        timeout: seconds for one call of a tool.
        format: of the calls in the model's text: `auto`, `hermes` or `json`.
        error_penalty: taken from the reward for each call that failed.
    """

    def __init__(
        self,
        *,
        tools: list[str] = [_CALCULATOR],  # noqa: B006 - never changed
        max_turns: Annotated[int, Ge(1)] = 6,
        timeout: Annotated[float, Gt(0)] = 30.0,
        format: str = "auto",
        error_penalty: Annotated[float, Ge(0)] = 0.0,
    ) -> None:
        self._box = Toolbox(tools)
        self._max_turns = max_turns
        self._timeout = timeout
        self._parse = parser_of(format)
        self._error_penalty = error_penalty

    def chat_tools(self) -> list[dict[str, Any]]:
        """The tools' JSON schemas, for the chat template."""
        return self._box.schemas

    async def run(self, episode: Episode) -> None:
        session = self._box.open(episode, timeout=self._timeout)
        counts: Counter[str] = Counter()
        for turn in range(self._max_turns):
            reply = await episode.generate(stop=[_MARK])
            said = self.calls_of(reply.text)
            episode.response = said.content
            called = bool(said.calls or said.errors)
            if called and turn + 1 < self._max_turns:
                await self._answer(episode, session, said, counts, marked=reply.stop is not None)
            for name in ("tool_calls", "tool_errors"):
                episode.metric(name, counts[name])
            if not called:
                return

    def calls_of(self, text: str) -> ToolCalls:
        """The tool calls in what the model wrote."""
        return self._parse(text)

    async def _answer(
        self,
        episode: Episode,
        session: ToolSession,
        said: ToolCalls,
        counts: Counter[str],
        *,
        marked: bool,
    ) -> None:
        """Run the calls of a message and observe their results.

        `marked`: the model has written the mark before the first one already.
        """
        results: list[tuple[str, str | ToolError]] = [
            ("", ToolError(f"this call can't be read: {error}")) for error in said.errors
        ]
        names = [call.name for call in said.calls]
        results += zip(names, await gather_calls(session, said.calls), strict=True)
        failed = sum(isinstance(result, ToolError) for _, result in results)
        counts["tool_calls"] += len(results)
        counts["tool_errors"] += failed
        if failed and self._error_penalty:
            episode.reward(-self._error_penalty * failed)
        texts = [
            (name, f"Error: {result}" if isinstance(result, ToolError) else result)
            for name, result in results
        ]
        if episode.chat:
            episode.observe([_message(name, text) for name, text in texts])
        else:
            blocks = "\n".join(f"{_MARK}\n{text}\n</tool_response>" for _, text in texts)
            episode.observe((blocks.removeprefix(_MARK) if marked else f"\n{blocks}") + "\n")


def _message(name: str, text: str) -> dict[str, str]:
    return {"role": "tool", "content": text, **({"name": name} if name else {})}
