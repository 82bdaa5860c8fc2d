"""Agents that fail: the policy applies, the failure is counted and named, the others go on."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from rlx.core.agents import Episode, Limits, Step, Turn
from rlx.core.engine.collector import GroupMaker, unwrap
from rlx.core.engine.interfaces import Generation, Sampling
from rlx.core.engine.metrics import rollout_metrics
from rlx.core.errors import ComponentError
from rlx.core.references import Bound, ComponentRef
from rlx.core.rollouts import Group, Rollout
from rlx.testing.scripted import CharTokenizer, ScriptedEngine, task

LIMITS = Limits(context_length=400, step_timeout=0.5, max_observation=1000)
never = threading.Event()


class Client:
    """The engine's side: every episode gets the same replies."""

    def __init__(self, *script: str) -> None:
        self.engine = ScriptedEngine(script or ("ok",))
        self.after: list[float] = []

    @contextmanager
    def group(self, size: int) -> Iterator[Any]:
        yield self.generate

    async def generate(self, prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        self.after.append(time.monotonic())
        return await self.engine(prompt, sampling, seed)


class Scorer:
    async def score_group(self, rollouts: Sequence[Rollout]) -> list[Rollout] | None:
        return [replace(one, reward=1.0) for one in rollouts]

    def take_metrics(self) -> Mapping[str, float]:
        return {}

    async def state_dict(self) -> Mapping[str, Any]:
        return {}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def maker(agent: Any, limits: Limits, client: Client | None = None) -> GroupMaker:
    ref = ComponentRef(kind="agents", name="probe", target="test:probe")
    return GroupMaker(
        client=cast(Any, client or Client()),
        agent=Bound(ref=ref, obj=agent, params={}),
        scorer=Scorer(),
        tokenizer=CharTokenizer(),
        sampling=Sampling(max_new_tokens=20),
        limits=limits,
        group_size=3,
        seed=0,
    )


def play(
    misbehave: Callable[[Episode], Any], **limits: Any
) -> tuple[Group | None, dict[str, float]]:
    """A group of three whose middle episode misbehaves after its first turn."""

    async def agent(episode: Episode) -> None:
        await episode.generate()
        if episode.index == 1:
            await misbehave(episode)
        episode.observe("more")
        await episode.generate()

    made = maker(agent, replace(LIMITS, **limits))
    group = asyncio.run(made.make(task(), 0))
    return group, made.take_metrics()


async def raises(episode: Episode) -> None:
    raise ValueError("no such move")


async def exits(episode: Episode) -> None:
    raise SystemExit(3)


async def hangs(episode: Episode) -> None:
    await asyncio.sleep(1000)


async def hangs_in_a_tool(episode: Episode) -> None:
    await asyncio.get_running_loop().create_future()


async def cancels_itself(episode: Episode) -> None:
    raise asyncio.CancelledError


async def observes_a_number(episode: Episode) -> None:
    episode.observe(cast(Any, 12))


async def rewards_with_text(episode: Episode) -> None:
    episode.reward(cast(Any, "good"))


async def refuses_to_end(episode: Episode) -> None:
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(1000)
    await episode.generate()


async def never_awaits(episode: Episode) -> None:
    while True:
        pass


async def its_task_never_awaits(episode: Episode) -> None:
    await asyncio.gather(never_awaits(episode), asyncio.sleep(0))


async def counts_without_a_name(episode: Episode) -> None:
    episode.metric(cast(Any, 1), 2.0)


async def never_awaits_and_catches(episode: Episode) -> None:
    for _ in range(2):
        try:
            while True:
                pass
        except Exception:
            continue


@pytest.mark.parametrize(
    ("misbehave", "named"),
    [
        (never_awaits, "AgentBlockedError: it blocked the event loop"),
        (its_task_never_awaits, "AgentBlockedError: it blocked the event loop"),
        (counts_without_a_name, "the name 1, which is no text"),
        (raises, "ValueError: no such move"),
        (exits, r"called sys\.exit\(3\)"),
        (hangs, "longer than 0.5 s between two engine calls"),
        (hangs_in_a_tool, "longer than 0.5 s"),
        (cancels_itself, "cancelled itself"),
        (observes_a_number, "TypeError"),
        (rewards_with_text, "TypeError"),
        (refuses_to_end, "longer than 0.5 s"),
    ],
)
def test_a_failed_agent_is_kept_or_costs_its_group_or_ends_the_run(
    misbehave: Callable[[Episode], Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    group, counted = play(misbehave, failure="keep")
    assert group is not None
    assert [one.finish_reason for one in group.rollouts] == ["stop", "error", "stop"]
    assert [len(one.spans) for one in group.rollouts] == [2, 1, 2]
    assert counted["agent/failed"] == 1
    assert rollout_metrics([group])["rollout/ended/error"] == pytest.approx(1 / 3)
    failed = group.rollouts[1]
    assert failed.error is not None
    for text in (failed.error, caplog.text):
        assert re.search(named, text), text
    assert "'probe' failed in task test/0, turn 1" in caplog.text

    group, counted = play(misbehave, failure="drop_group")
    assert group is None
    assert counted == {"agent/failed": 1.0, "agent/dropped_groups": 1.0}

    with pytest.raises(BaseExceptionGroup) as caught:
        play(misbehave)
    error = unwrap(caught.value)
    assert isinstance(error, ComponentError)
    with pytest.raises(ComponentError, match=f"'probe' failed in task test/0, turn 1: .*{named}"):
        raise error


def test_a_slow_step_that_never_returns_leaves_its_thread_behind() -> None:
    def step(turn: Turn) -> Step:
        if turn.seed == first[0]:
            never.wait(30)
        return Step(done=True)

    first: list[int] = []

    made = maker(step, replace(LIMITS, failure="keep"))
    episodes = [
        made._episode(task(), 0, index, made._sampling, Client().generate) for index in range(3)
    ]
    first.append(episodes[0].turn_seed(0))
    started = time.monotonic()
    rollouts = asyncio.run(made._play(episodes))
    assert rollouts is not None
    assert [one.finish_reason for one in rollouts] == ["error", "stop", "stop"]
    assert time.monotonic() - started < 5
    never.set()


def test_wall_time_ends_an_episode_with_its_own_reason() -> None:
    async def slow(episode: Episode) -> None:
        while True:
            await episode.generate()
            episode.observe("?")
            await asyncio.sleep(0.15)

    made = maker(slow, replace(LIMITS, max_seconds=0.4, context_length=10_000))
    group = asyncio.run(made.make(task(), 0))
    assert group is not None
    assert {one.finish_reason for one in group.rollouts} == {"timeout"}
    assert all(one.error is None and 2 <= len(one.spans) <= 4 for one in group.rollouts)
    assert made.take_metrics() == {}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({}, "max_tokens"), ({"max_turns": 5}, "max_turns"), ({"max_tokens": 90}, "max_tokens")],
)
def test_an_agent_that_loops_for_ever_ends_at_a_limit(limits: dict[str, int], reason: str) -> None:
    async def loops(episode: Episode) -> None:
        while True:
            await episode.generate()
            episode.observe("again")

    group = asyncio.run(maker(loops, replace(LIMITS, **limits)).make(task(), 0))
    assert group is not None
    assert {one.finish_reason for one in group.rollouts} == {reason}
    assert all(len(one.tokens) <= 400 for one in group.rollouts)


async def floods(episode: Episode) -> None:
    episode.observe("x" * 10_000_000)


def test_ten_megabytes_lose_their_middle_and_are_counted() -> None:
    started = time.monotonic()
    group, counted = play(floods, context_length=4000)
    assert group is not None
    assert time.monotonic() - started < 2
    assert counted == {"agent/observations_cut": 1.0}
    assert [one.finish_reason for one in group.rollouts] == ["stop"] * 3
    assert "[… 9,999,000 characters left out …]" in group.rollouts[1].text
    assert len(group.rollouts[1].tokens) < 1200


def test_ten_megabytes_are_a_failure_where_nothing_may_be_cut() -> None:
    group, counted = play(floods, cut_observations=False, failure="keep")
    assert group is not None
    assert counted == {"agent/failed": 1.0}
    assert "longer than 1,000 characters" in str(group.rollouts[1].error)


def test_an_observation_beyond_the_context_ends_the_episode() -> None:
    group, counted = play(floods)
    assert group is not None
    assert [one.finish_reason for one in group.rollouts] == ["stop", "max_tokens", "stop"]
    assert counted == {"agent/observations_cut": 1.0}


def test_long_chat_messages_share_the_limit() -> None:
    from rlx.core.conversation import shortened

    messages = [{"role": "tool", "content": "a" * 900}, {"role": "user", "content": "b" * 90}]
    assert shortened(messages, 990) is messages
    cut = cast(Any, shortened(messages, 600))
    assert cut[1] == messages[1]
    assert len(cut[0]["content"]) < 350
    assert shortened({"role": "tool", "content": "abc"}, 3) == {"role": "tool", "content": "abc"}
    assert messages[0]["content"] == "a" * 900


def test_an_agent_that_was_given_up_gets_no_engine_call_more() -> None:
    client = Client()
    calls: list[str] = []

    async def stubborn(episode: Episode) -> None:
        await episode.generate()
        try:
            await asyncio.sleep(1000)
        finally:
            try:
                await episode.generate()
            except Exception as error:
                calls.append(type(error).__name__)

    made = maker(stubborn, replace(LIMITS, failure="keep"), client)
    asyncio.run(made.make(task(), 0))
    assert len(client.after) == 3
    assert calls == ["EpisodeEnded"] * 3


def test_an_agent_that_blocks_the_loop_is_interrupted_as_often_as_it_takes() -> None:
    group, counted = play(never_awaits_and_catches, failure="keep")
    assert group is not None
    assert [one.finish_reason for one in group.rollouts] == ["stop"] * 3
    assert counted == {}


def test_the_log_says_who_blocks_all_episodes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlx.core.stalls._WARN_AFTER", 0.3)

    async def sleeps_in_c(episode: Episode) -> None:
        time.sleep(1.2)

    group, counted = play(sleeps_in_c, failure="keep", step_timeout=30.0)
    assert group is not None
    assert counted == {}
    assert "agent 'probe' in task test/0 has blocked all episodes" in caplog.text
    assert "time.sleep(1.2)" in caplog.text
    assert caplog.text.count("has blocked") == 1


def test_waiting_for_an_agent_that_blocks_the_loop_is_no_failure() -> None:
    async def agent(episode: Episode) -> None:
        await episode.generate()
        if episode.index == 1:
            time.sleep(1.5)
        await asyncio.sleep(0.1)
        await episode.generate()

    made = maker(agent, replace(LIMITS, failure="keep"))
    group = asyncio.run(made.make(task(), 0))
    assert group is not None
    others = [one.finish_reason for one in group.rollouts if one.index != 1]
    assert others == ["stop", "stop"]


def test_agents_that_take_long_together_and_not_alone_are_not_to_blame() -> None:
    async def agent(episode: Episode) -> None:
        time.sleep(0.45)  # all of them in one turn of the loop
        await episode.generate()

    made = maker(agent, replace(LIMITS, failure="keep", step_timeout=0.9))
    group = asyncio.run(made.make(task(), 0))
    assert group is not None
    assert [one.finish_reason for one in group.rollouts] == ["stop"] * 3


class StuckClient(Client):
    """The second engine call takes for ever."""

    async def generate(self, prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        if chr(prompt[-1]) == "!":
            await asyncio.sleep(1000)
        return await super().generate(prompt, sampling, seed)


def test_time_in_the_engine_is_not_the_agents_but_the_episodes() -> None:
    async def agent(episode: Episode) -> None:
        await episode.generate()
        episode.observe("go on!")
        await episode.generate()

    limits = replace(LIMITS, step_timeout=0.2, max_seconds=1.0)
    group = asyncio.run(maker(agent, limits, StuckClient()).make(task(), 0))
    assert group is not None
    for one in group.rollouts:
        assert (one.finish_reason, one.error, len(one.spans)) == ("timeout", None, 1)
        assert len(one.tokens) == one.spans[0].stop
