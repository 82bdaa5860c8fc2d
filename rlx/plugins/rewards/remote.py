"""Ask a server for the reward: JSON over HTTP, one or several servers.

    → POST url  {"id": "…", "samples": [{"prompt": …, "response": …, "label": …, …}, …]}
    ← 200       {"rewards": [{"score": 1.0, "parts": {…}, "metrics": {…}}, …]}

One reward per sample, in order; `{"error": "…"}` for one that could not be scored, `score: null`
where the reward does not apply. `id` names the request: when it comes again, because the answer was
lost, a server that keeps its answers scores nothing twice. A request without samples, which is sent
when a run starts, is answered with no rewards. `rlx serve-reward` is such a server; the fields of
a sample are those of `rlx.core.reward_protocol.Sample` (docs/rewards.md).
"""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, Literal

import httpx
from pydantic import Field, ValidationError

from rlx.core.component import component
from rlx.core.errors import UsageError
from rlx.core.reward_protocol import decode_reply, encode_request, first_problem
from rlx.core.rewards import Reward, RewardInputs, excerpt
from rlx.plugins.rewards._http import HttpPool
from rlx.plugins.rewards.adapters import openrlhf

PATH = "/score"
"""Where a server is asked when its address has no path."""


@component(scope="group")
class Remote:
    """A reward that a server computes. Its address is asked when the run starts.

    Args:
        url: address of the server, or of several, between which requests are balanced; without
            a path it is `/score` that is asked.
        scope: what one request carries: a `rollout`, the rollouts of a `group`, or what one
            worker has to score at the moment (`batch`).
        token_env: name of the environment variable with the server's bearer token.
        timeout: seconds for one attempt; `reward.timeout` bounds all of them together.
        retries: further attempts of a request, on another server where there is one.
        backoff: seconds before a server that failed is asked again; doubles up to 8 s.
        format: `rlx`, or `openrlhf` for servers of OpenRLHF's `--remote_rm_url`, which take
            `{"query": […], "prompts": […], "labels": […]}` and answer `{"rewards": […]}`.

    Raises `UsageError` when the server refuses a request, `ComponentError` when none answers.
    """

    def __init__(
        self,
        *,
        url: str | list[str],
        scope: Literal["rollout", "group", "batch"] = "group",
        token_env: str | None = None,
        timeout: Annotated[float, Field(gt=0)] = 30.0,
        retries: Annotated[int, Field(ge=0)] = 8,
        backoff: Annotated[float, Field(gt=0)] = 0.5,
        format: Literal["rlx", "openrlhf"] = "rlx",
    ) -> None:
        component(scope=scope)(self)  # the instance's own tags
        self._single = scope == "rollout"
        self._pool = HttpPool(
            [_with_path(one) for one in ([url] if isinstance(url, str) else url)],
            token_env=token_env,
            timeout=timeout,
            retries=retries,
            backoff=backoff,
        )
        self._ask = self._rlx if format == "rlx" else openrlhf(self._openrlhf)
        if format == "rlx":
            key = _new_key()
            self._pool.check(encode_request([], key=key), key=key)

    async def __call__(self, samples: Any) -> Any:
        """Return the rewards of the samples, or the one of a single sample."""
        rewards = await self._ask([samples] if self._single else samples)
        return rewards[0] if self._single else rewards

    async def _rlx(self, samples: list[RewardInputs]) -> list[Reward | Exception]:
        key = _new_key()
        reply = await self._pool.post(encode_request(samples, key=key), key=key)
        try:
            return decode_reply(reply, len(samples))
        except ValueError as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
            raise UsageError(
                f"the server's answer is not of the protocol: {problem}; {excerpt(str(reply), 120)}"
            ) from None

    async def _openrlhf(self, queries: list[str], prompts: list[str], labels: list[Any]) -> Any:
        body = {"query": queries, "prompts": prompts, "labels": labels}
        reply = await self._pool.post(json.dumps(body, default=str).encode(), key=_new_key())
        if not isinstance(reply, dict) or "rewards" not in reply:
            raise UsageError(f"the server's answer has no 'rewards': {excerpt(str(reply), 120)}")
        return reply


def _new_key() -> str:
    return uuid.uuid4().hex


def _with_path(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return url  # the pool says what is wrong with it
    return str(parsed.copy_with(path=PATH)) if parsed.path in ("", "/") else url
