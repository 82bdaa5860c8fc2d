"""Configuration of who shares which GPUs, on which nodes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from rlx.core.config_base import Part

PlacedRole: TypeAlias = Literal["learner", "reference", "critic", "rewards", "engines"]
_NAMED = {"actor_ref": ["learner", "reference"], "critic_reward": ["critic", "rewards"]}


def _groups(value: Any) -> Any:
    """Names of well-known groups in a list become the groups."""
    if not isinstance(value, (list, tuple)):
        return value
    return [_NAMED.get(item, item) if isinstance(item, str) else item for item in value]


class PlacementConfig(Part):
    """Who shares which GPUs, and on which nodes workers lie (`docs/cluster.md`).

    On machines without GPUs all of this is about nodes only.
    """

    colocate: Annotated[
        Literal["auto", "all", "actor_ref", "critic_reward", "none"] | list[list[PlacedRole]],
        BeforeValidator(_groups),
    ] = "auto"
    """Roles that share GPUs: `all`; `actor_ref`, the learner with the reference; `critic_reward`,
    the critic with the reward models; `none`; or groups, such as `[[learner, engines], [critic,
    rewards]]`. `auto`: `none` where there are GPUs enough, else `all`."""
    gpus: int | None = Field(None, ge=0)
    """Most GPUs that the run takes; unset: all that Ray has; 0: none."""
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    """On few nodes, or on many: what Ray tries for each group of roles."""
    sleep_level: Literal[0, 1, 2] = 1
    """What vLLM gives up while others work on its GPUs, in a run in which generation and training
    take turns. 0: nothing; 1: the cache, and its weights move to the host; 2: both are dropped, and
    the published ones come in their place."""
    patience: float = Field(300.0, gt=0)
    """Seconds to wait for free GPUs and CPUs of a cluster that others use too."""
