"""An agent in anyone's own code: a program that talks to the model through OpenAI's API.

Each episode has an address and a key of its own; whatever asks there, with the `openai` or the
`anthropic` package or any other client, takes the episode's turns. Tokens and log-probs stay
between the engine and the learner. A request that goes on from an earlier answer extends the
rollout; any other begins a new segment of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from rlx.core.agents import Episode, EpisodeEnded
from rlx.core.component import component
from rlx.core.errors import ComponentError, UsageError
from rlx.core.tool_calls import parser_of
from rlx.plugins.agents.endpoint.programs import Call, CommandProgram, FunctionProgram, Program


@component(form="free")
class OpenAIAgent:
    """Have a program solve each task through an endpoint of its own.

    What the program returns (a command: prints as JSON in its last line) is the episode's reward
    when it is a number, the response that rewards judge when it is text, or
    `{"reward": …, "response": …, "metrics": {…}}`; nothing leaves it all to the rewards.

    Args:
        program: function as `file.py:name` or `pkg.mod:name`; it takes any of `task`, `base_url`,
            `api_key`, `model` and `seed`, by name, and may be a coroutine.
        command: instead of a function, a command that is run for each episode: task as JSON on
            the standard input, endpoint in OPENAI_BASE_URL, OPENAI_API_KEY and their ANTHROPIC_
            counterparts.
        tool_calls: format of the calls in the model's text: `auto`, `hermes`, `json`, or a function
            that reads them, as `file.py:name`.
        other_sampling: requests for another temperature, top_p or top_k than the run's are refused
            (400), or have it ignored.
        model: what the policy is called in the list of models.
        host: where the endpoint listens. Anything but a loopback address lets other machines in,
            though not without a token.
        port: of the endpoint; 0 for any that is free.
    """

    def __init__(
        self,
        *,
        program: str | None = None,
        command: str | None = None,
        tool_calls: str = "auto",
        other_sampling: Literal["refuse", "ignore"] = "refuse",
        model: str = "policy",
        host: str = "127.0.0.1",
        port: Annotated[int, Ge(0), Le(65535)] = 0,
    ) -> None:
        if (program is None) == (command is None):
            raise UsageError(
                "the agent openai needs a program",
                where="agent.program",
                fix="--set agent.program=my_agent.py:solve, or --set agent.command='python x.py'",
            )
        self._program: Program = (
            FunctionProgram(program) if program else CommandProgram(str(command))
        )
        self._parse = parser_of(tool_calls)
        self._options: dict[str, Any] = {
            "model": model,
            "other_sampling": other_sampling,
            "host": host,
            "port": port,
        }
        self._model = model

    async def run(self, episode: Episode) -> None:
        endpoint = self._listening(episode)
        task = episode.task
        with endpoint.session(episode) as token:
            call = Call(
                task={**task.columns, "id": task.id, "prompt": task.prompt, "label": task.label},
                base_url=f"{endpoint.url}/v1",
                api_key=token,
                model=self._model,
                seed=episode.seed,
            )
            try:
                result = await self._program(call, episode)
            except Exception as error:
                # A program is told by an error that a limit was reached, and may end of it.
                reason = episode.ended or ("max_tokens" if episode.overflowed else None)
                if reason is None or isinstance(error, EpisodeEnded):
                    raise
                raise EpisodeEnded(reason) from error
        if episode.turns:  # else that is what is wrong, whatever it returned
            _take(result, episode)

    def _listening(self, episode: Episode) -> Any:
        """The endpoint of this event loop; the first episode starts it, evaluations share it."""
        from rlx.plugins.agents.endpoint.server import listening
        from rlx.plugins.agents.endpoint.texts import Texts

        return listening(Texts(tokenizer=episode.tokenizer, parse=self._parse), **self._options)


def _take(result: Any, episode: Episode) -> None:
    """What the program said of the outcome."""
    said = result if isinstance(result, Mapping) else {}
    if isinstance(result, str):
        said = {"response": result}
    elif isinstance(result, Real):
        said = {"reward": result}
    elif result is not None and not isinstance(result, Mapping):
        raise ComponentError(
            f"its program returned {type(result).__name__}: nothing, a reward, a response or "
            '{"reward": …, "response": …, "metrics": {…}}'
        )
    if unknown := sorted(set(said) - {"reward", "response", "metrics"}):
        raise ComponentError(f"its program returned {unknown[0]!r}: reward, response, metrics")
    if said.get("response") is not None:
        episode.response = str(said["response"])
    for name, value in (said.get("metrics") or {}).items():
        episode.metric(name, value)
    if said.get("reward") is not None:
        episode.reward(float(said["reward"]))
