"""The kit on rewards, agents and samplers: every rule has a component that breaks it alone."""

from __future__ import annotations

import itertools
import sys
import threading
import time

import pytest

import rlx
from rlx import Drop, Reward, Step
from rlx.testing import ConformanceError, check_agent, check_reward, check_sampler, reward_inputs

EXAMPLES = 15
IN_CHILD = sys.argv[0].endswith("nursery.py")
calls = itertools.count()


def broken_rules(check, component, **options) -> list[str]:
    try:
        check(component, examples=EXAMPLES, **options)
    except ConformanceError as error:
        return [violation.rule for violation in error.violations]
    return []


@rlx.component(needs_label=True)
def good_reward(sample, *, right: float = 1.0):
    return Reward(right if sample.label in sample.response else 0.0, metrics={"n": sample.turns})


@rlx.component(needs_label=True)
async def good_async_reward(sample):
    return float(sample.label in sample.response)


@rlx.component(scope="group", needs_label=True)
def good_group_reward(samples):
    best = max(len(sample.response) for sample in samples)
    return [float(len(sample.response) == best) for sample in samples]


def infinite(sample):
    return float("inf")


def crashes_on_empty(sample):
    return 1.0 / len(sample.response)


def only_text_prompts(sample):
    return float(len(sample.prompt.strip()))


def needs_label_untold(sample):
    return float(len(sample.label))


def mutates_task(sample):
    sample.task["seen"] = True
    return 0.0


def counts_calls(sample):
    return float(next(calls))


class NotThreadSafe:
    """Scores through an attribute that all threads share."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, sample):
        self.text = sample.response
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.001)
            return float(len(self.text) + 1)
        return float(len(self.text))


@rlx.component(scope="group")
def first_of_the_group(samples):
    return [float(index == 0) for index in range(len(samples))]


def process_reward(sample):
    return 2.0 if IN_CHILD else 1.0


def unplain_reward(sample, *, judge: object = object()):
    return 0.0


REWARDS = {
    "returns a finite number per sample": infinite,
    "copes with any response": crashes_on_empty,
    "copes with a chat prompt": only_text_prompts,
    "copes with a task without label, or declares needs_label=True": needs_label_untold,
    "leaves its inputs as they are": mutates_task,
    "gives the same in parallel threads": NotThreadSafe,
    "does not depend on the order of the samples": first_of_the_group,
    "resolves in another process to the same component": process_reward,
    "parameters survive config.yaml": unplain_reward,
}


@pytest.mark.parametrize("component", [good_reward, good_async_reward, good_group_reward])
def test_right_reward_passes(component) -> None:
    check_reward(component, examples=EXAMPLES)


@pytest.mark.parametrize("rule", REWARDS)
def test_wrong_reward_is_caught_by_its_rule_alone(rule: str) -> None:
    assert broken_rules(check_reward, REWARDS[rule]) == [rule]


def test_reward_that_counts_its_calls_is_not_deterministic() -> None:
    assert "is deterministic" in broken_rules(check_reward, counts_calls)


def test_group_reward_must_answer_for_every_sample() -> None:
    @rlx.component(scope="group")
    def too_few(samples):
        return [0.0] * (len(samples) - 1)

    with pytest.raises(ConformanceError, match="returned 0 rewards for 1 samples"):
        check_reward(too_few)


def test_reward_may_bring_its_own_samples_or_columns() -> None:
    def needs_level(sample):
        return float(sample.task["level"])

    assert broken_rules(check_reward, needs_level) == ["returns a finite number per sample"]
    check_reward(needs_level, samples=[reward_inputs(response="x", level=3)], examples=EXAMPLES)
    tagged = rlx.component(example_columns={"level": 3})(needs_level)
    check_reward(tagged, examples=EXAMPLES)


async def good_agent(turn, *, hint: str = "Think again."):
    if turn.index > 0 or "4" in turn.action:
        return Step(reward=float("4" in turn.action), done=True)
    return Step(observation=turn.say(hint) if turn.chat else f"\n{hint}\n")


async def good_free_agent(episode):
    while episode.turns < 3:
        reply = await episode.generate()
        if reply.text:
            return
        episode.observe("?")


async def never_generates(episode):
    return None


async def trusts_every_reply(turn):
    if turn.finish_reason == "length":
        raise ValueError("cut off")
    return Step(done=True)


async def swallows_the_limit(episode):
    for _ in range(1000):
        try:
            await episode.generate()
            if episode.turns > 4:
                return
            episode.observe("go on")
        except Exception:
            if episode.turns < 4:
                raise RuntimeError("lost patience") from None


async def rewrites_what_was_sampled(episode):
    await episode.generate()
    episode._segment.tokens[-1] = ord("4")


async def chats_only_in_text(turn):
    if turn.chat:
        raise TypeError("no chats here")
    return Step(done=True)


async def needs_label_untold_agent(turn):
    return Step(reward=float(turn.action == turn.task.label.strip()), done=True)


async def mutates_the_task(turn):
    turn.task.columns["seen"] = turn.index
    return Step(done=True)


async def rewards_at_random(turn):
    return Step(reward=float(next(calls)), done=True)


class SharedState:
    """Keeps the last observation on itself instead of in turn.state."""

    def __init__(self) -> None:
        self.open = 0

    async def __call__(self, turn):
        import asyncio

        self.open += 1
        for _ in range(3):
            await asyncio.sleep(0)
        crowd, self.open = self.open, 0
        return Step(reward=float(crowd > 1), done=True)

    step = __call__


async def process_agent(turn):
    return Step(reward=2.0 if IN_CHILD else 1.0, done=True)


async def unplain_agent(turn, *, tool: object = object()):
    return Step(done=True)


AGENTS = {
    "plays an episode to its end": never_generates,
    "trains on exactly the tokens that the engine sampled": rewrites_what_was_sampled,
    "copes with a reply that is cut off": trusts_every_reply,
    "ends when the limit on turns is reached": swallows_the_limit,
    "copes with a chat prompt": chats_only_in_text,
    "copes with a task without label, or declares needs_label=True": needs_label_untold_agent,
    "leaves the task as it is": mutates_the_task,
    "keeps episodes that run side by side apart": SharedState,
    "resolves in another process to the same component": process_agent,
    "parameters survive config.yaml": unplain_agent,
}


async def good_agent_that_stops_early(episode):
    reply = await episode.generate(stop=["4", "?"])
    if reply.stop is None:
        episode.observe("Go on.")
        await episode.generate()


@pytest.mark.parametrize("component", [good_agent, good_free_agent, good_agent_that_stops_early])
def test_right_agent_passes(component) -> None:
    check_agent(component, examples=EXAMPLES)


@pytest.mark.parametrize("rule", AGENTS)
def test_wrong_agent_is_caught_by_its_rule_alone(rule: str) -> None:
    assert broken_rules(check_agent, AGENTS[rule]) == [rule]


def test_agent_with_random_rewards_is_not_deterministic() -> None:
    assert "is deterministic for a seed" in broken_rules(check_agent, rewards_at_random)


def good_keep(group, *, least: float = 0.0):
    return True if max(group.rewards) > least else Drop("all wrong")


class GoodRoundRobin:
    """Tasks in their order; remembers its place."""

    def __init__(self) -> None:
        self.place = 0

    def bind(self, tasks, seed):
        self.tasks = tasks

    def next_tasks(self, n):
        chosen = [self.tasks[(self.place + i) % len(self.tasks)] for i in range(n)]
        self.place += n
        return chosen

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class ForgetsItsPlace(GoodRoundRobin):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class OnlyTheFirstTask(GoodRoundRobin):
    def next_tasks(self, n):
        return [self.tasks[0]] * n


def says_maybe(group):
    return "maybe"


def looks_at_the_first(group):
    return group.rollouts[0].reward > 0


def mutates_groups(group):
    group.task.columns["seen"] = True
    return True


def flips(group):
    return next(calls) % 2 == 0


def process_keep(group):
    return not IN_CHILD


def unplain_keep(group, *, judge: object = object()):
    return True


SAMPLERS = {
    "gives tasks and judges groups": says_maybe,
    "judges a group alike in whatever order its rollouts are": looks_at_the_first,
    "leaves the groups as they are": mutates_groups,
    "goes on from a checkpoint as if it had not stopped": ForgetsItsPlace,
    "reaches every task sooner or later": OnlyTheFirstTask,
    "resolves in another process to the same component": process_keep,
    "parameters survive config.yaml": unplain_keep,
}


@pytest.mark.parametrize("component", [good_keep, GoodRoundRobin])
def test_right_sampler_passes(component) -> None:
    check_sampler(component, examples=EXAMPLES)


@pytest.mark.parametrize("rule", SAMPLERS)
def test_wrong_sampler_is_caught_by_its_rule_alone(rule: str) -> None:
    assert broken_rules(check_sampler, SAMPLERS[rule]) == [rule]


def test_sampler_that_flips_is_not_deterministic() -> None:
    assert "is deterministic for a seed" in broken_rules(check_sampler, flips)
