"""The garbage collector is held back while rollouts are made, and let go afterwards."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from rlx.core.agents import Episode
from rlx.core.engine.garbage import seldom_collected
from rlx.testing.episodes import play_agent


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_the_collector_is_as_it_was_afterwards_even_after_an_error() -> None:
    before = gc.get_threshold()

    def fail() -> None:
        with seldom_collected():
            assert gc.get_threshold() != before
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_what_was_there_before_is_not_looked_at_meanwhile_and_is_afterwards() -> None:
    old = Node()
    gone = weakref.ref(old)
    with seldom_collected():
        del old
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_cycles_among_new_objects_are_found_meanwhile() -> None:
    with seldom_collected():
        new = Node()
        gone = weakref.ref(new)
        del new
        gc.collect()
        assert gone() is None


def test_an_agents_task_is_gone_without_the_collector() -> None:
    tasks: list[weakref.ref[Any]] = []

    async def agent(episode: Episode) -> None:
        tasks.append(weakref.ref(asyncio.current_task()))
        await episode.generate()

    gc.collect()
    gc.disable()
    try:
        play_agent(agent, ["yes"])
        assert [task() for task in tasks] == [None]
    finally:
        gc.enable()
