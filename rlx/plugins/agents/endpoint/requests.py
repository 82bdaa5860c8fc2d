"""What programs may ask for, and what they are told of what they may not.

Everything that would sample from another distribution than the run's is refused: its log-probs are
those that training goes by. Fields that change nothing (`user`, `metadata`, `seed`, …) are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rlx.core.episode import Episode
from rlx.core.http_server import RefusedError

OtherSampling = Literal["refuse", "ignore"]

_NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "typical_p": 1,
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": [],
    "allowed_token_ids": [],
    "guided_json": "",
    "guided_regex": "",
    "guided_choice": [],
    "guided_grammar": "",
    "structured_outputs": {},
    "logit_bias": {},
    "top_logprobs": 0,
    "echo": False,
    "suffix": "",
    "functions": [],
    "audio": {},
    "prediction": {},
}
"""Values at which a field of a request changes nothing."""


class Asked(BaseModel):
    """What requests of all kinds have in common."""

    model_config = ConfigDict(extra="allow")

    model: str = "policy"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False


class UnsupportedError(RefusedError):
    """A request for something that a session does not give: 400, with the field's name."""

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        super().__init__(400, message)
        self.field = field
        self.code = code
        """What clients tell errors apart by."""


R = TypeVar("R", bound=Asked)


def parsed(kind: type[R], body: Any) -> R:
    """The request as `kind`; raises RefusedError (400) that names the first wrong field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UnsupportedError(place, f"{place or 'the request'}: {first['msg']}") from None


def check_sampling(asked: Asked, episode: Episode, policy: OtherSampling) -> None:
    """Raise RefusedError where a request would sample in another way than the run does.

    A greedy episode (an evaluation) is greedy whatever is asked for.
    """
    given = asked.model_extra or {}
    for field, neutral in _NEUTRAL.items():
        value = given.get(field)
        if value is not None and value != neutral:
            raise UnsupportedError(field, f"{field}={value!r} is not possible here, leave it out")
    form = given.get("response_format")
    if isinstance(form, Mapping) and form.get("type", "text") != "text":
        raise UnsupportedError("response_format", "answers can't be constrained to a format")
    run = episode.sampling
    if policy == "ignore" or run.temperature == 0:
        return
    _same("temperature", asked.temperature, run.temperature)
    _same("top_p", asked.top_p, run.top_p)
    _same("top_k", None if asked.top_k == -1 else asked.top_k, run.top_k)


def _same(field: str, asked: float | None, run: float) -> None:
    if asked is not None and not math.isclose(asked, run, rel_tol=1e-6):
        raise UnsupportedError(
            field,
            f"{field}={asked:g} is asked for, but the run samples with {field}={run:g}, and its "
            f"log-probs are those of that distribution: leave {field} out, train with "
            f"rollout.{field}={asked:g}, or set agent.other_sampling=ignore, which takes the run's",
        )


def overrides(
    episode: Episode, max_tokens: int | None, stop: str | Sequence[str] | None
) -> dict[str, Any]:
    """Options of one engine call; more tokens than the run allows are not given."""
    found: dict[str, Any] = {}
    if max_tokens is not None:
        if max_tokens < 1:
            raise UnsupportedError("max_tokens", f"max_tokens is at least 1, not {max_tokens}")
        found["max_new_tokens"] = min(max_tokens, episode.sampling.max_new_tokens)
    words = [stop] if isinstance(stop, str) else [word for word in stop or () if word]
    if words:
        found["stop"] = words
    return found
