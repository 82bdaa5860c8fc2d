"""One engine call; the rewards judge its text."""

from __future__ import annotations

from rlx.core.agents import Episode
from rlx.core.component import component


@component(max_turns=1)
async def single_turn(episode: Episode) -> None:
    """Answer the task in one turn."""
    await episode.generate()
