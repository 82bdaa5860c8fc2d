"""Episodes and the two forms of agents: exact tokens, limits, rewards, failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import CHATML, tiny_tokenizer

from rlx.core.agents import (
    Episode,
    EpisodeEnded,
    Limits,
    Reply,
    Step,
    Turn,
    agent_form,
    run_agent,
)
from rlx.core.component import component
from rlx.core.engine.interfaces import Generation, Sampling
from rlx.core.errors import ComponentError, EngineError, UsageError
from rlx.core.references import Bound, ComponentRef
from rlx.core.rollouts import Rollout, Task
from rlx.plugins.agents.retry import retry
from rlx.plugins.agents.single_turn import single_turn

PLAIN, CHAT = tiny_tokenizer(), tiny_tokenizer(CHATML)
EOS = int(CHAT.eos_token_id)


@dataclass
class Engine:
    """Answers from a script; a text ends with the end-of-sequence token unless it is cut off."""

    script: Sequence[str | Exception]
    calls: list[tuple[list[int], Sampling, int]] = field(default_factory=list)
    abort_at: int | None = None

    async def __call__(self, prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        number = len(self.calls)
        self.calls.append((prompt, sampling, seed))
        await asyncio.sleep(0)
        text = self.script[number]
        if isinstance(text, Exception):
            raise text
        tokens = [*PLAIN(text)["input_ids"], EOS]
        cut = tokens[: sampling.max_new_tokens]
        reason = "length" if len(cut) < len(tokens) else "stop"
        return Generation(
            request_id=number,
            tokens=np.array(cut, dtype=np.int32),
            logprobs=-np.arange(1, len(cut) + 1, dtype=np.float32) - number,
            finish_reason="abort" if self.abort_at == number else reason,  # type: ignore[arg-type]
            version=number // 2,
        )


def make_episode(
    script: Sequence[str | Exception],
    *,
    prompt: Any = "1+1=",
    max_new_tokens: int = 50,
    context_length: int = 10_000,
    label: Any = None,
    abort_at: int | None = None,
    chat_template: str = CHATML,
    **limits: Any,
) -> tuple[Episode, Engine]:
    engine = Engine(script, abort_at=abort_at)
    chat = not isinstance(prompt, str)
    tokenizer, text = PLAIN, prompt
    if chat:
        tokenizer = CHAT if chat_template == CHATML else tiny_tokenizer(chat_template)
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    episode = Episode(
        task=Task(
            id="data/0",
            prompt=prompt,
            tokens=tokenizer(text)["input_ids"],
            label=label,
            columns={"unit": "m"},
        ),
        group_id=7,
        index=2,
        seed=11,
        generate=engine,
        tokenizer=tokenizer,
        sampling=Sampling(max_new_tokens=max_new_tokens),
        limits=Limits(context_length=context_length, **limits),
    )
    return episode, engine


def bind(obj: Any, **params: Any) -> Bound:
    ref = ComponentRef(kind="agents", name="probe", target="test:probe")
    return Bound(ref=ref, obj=obj, params=params)


def play(agent: Any, episode: Episode, **params: Any) -> Rollout:
    return asyncio.run(run_agent(bind(agent, **params), episode))


def raw(tokens: Any) -> str:
    return str(CHAT.decode(tokens, skip_special_tokens=False))


def actions(rollout: Rollout) -> list[str]:
    return [raw(rollout.tokens[span.start : span.stop]) for span in rollout.spans]


def test_single_turn_keeps_what_was_sampled() -> None:
    episode, engine = make_episode(["2"])
    rollout = play(single_turn, episode)
    assert engine.calls[0][0] == list(episode.task.tokens)
    assert rollout.tokens.tolist() == [*episode.task.tokens, *PLAIN("2")["input_ids"], EOS]
    assert rollout.tokens.dtype == np.int32
    assert rollout.logprobs.tolist() == [-1.0, -2.0]
    assert rollout.logprobs.dtype == np.float32
    assert (rollout.text, rollout.finish_reason, rollout.reward, rollout.parts) == (
        "2",
        "stop",
        0.0,
        {},
    )
    assert (rollout.group_id, rollout.index, rollout.action_count) == (7, 2, 2)
    assert rollout.messages == [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
    ]
    assert rollout.task is episode.task


def test_a_cut_off_answer_has_the_reason_length() -> None:
    episode, _ = make_episode(["a long answer"], max_new_tokens=3)
    rollout = play(single_turn, episode)
    assert (rollout.text, rollout.finish_reason) == ("a l", "length")


texts = st.text(min_size=0, max_size=12)


@given(
    script=st.lists(texts, min_size=1, max_size=5),
    observations=st.lists(texts, min_size=5, max_size=5),
    chat=st.booleans(),
    plain=st.booleans(),
    cap=st.integers(1, 20),
)
def test_action_tokens_are_exactly_the_sampled_ones(
    script: list[str], observations: list[str], chat: bool, plain: bool, cap: int
) -> None:
    prompt = [{"role": "user", "content": "hi"}] if chat else "hi"
    episode, engine = make_episode(script, prompt=prompt, max_new_tokens=cap)
    sampled: list[Reply] = []

    async def talk(episode: Episode) -> None:
        for observation in observations[: len(script)]:
            sampled.append(await episode.generate())
            as_text = plain or not chat
            episode.observe(observation if as_text else {"role": "tool", "content": observation})

    rollout = play(talk, episode)
    found = [rollout.tokens[span.start : span.stop].tolist() for span in rollout.spans]
    assert found == [list(reply.tokens) for reply in sampled]
    assert len(rollout.logprobs) == rollout.action_count == sum(map(len, found))
    # each engine call was given the tokens before its span, and nothing else
    for (prompt_tokens, _, _), span in zip(engine.calls, rollout.spans, strict=True):
        assert prompt_tokens == rollout.tokens[: span.start].tolist()
    assert rollout.tokens[: len(episode.task.tokens)].tolist() == list(episode.task.tokens)
    assert len(rollout.tokens) == rollout.spans[-1].stop  # nothing after the last action
    seeds = [seed for _, _, seed in engine.calls]
    assert len(set(seeds)) == len(seeds)


@given(
    script=st.lists(texts, min_size=1, max_size=5), extra=st.lists(texts, min_size=5, max_size=5)
)
def test_a_chat_has_the_tokens_of_its_rendered_messages(
    script: list[str], extra: list[str]
) -> None:
    """With a template that shows earlier turns unchanged, appending equals rendering anew."""
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    episode, _ = make_episode(script, prompt=prompt, max_new_tokens=1000)

    async def talk(episode: Episode) -> None:
        for text in extra[: len(script)]:
            await episode.generate()
            episode.observe({"role": "user", "content": text})
            episode.observe([{"role": "tool", "content": "t"}])

    rollout = play(talk, episode)
    whole = CHAT.apply_chat_template(
        list(rollout.messages), tokenize=True, add_generation_prompt=True
    )["input_ids"]
    assert whole[: len(rollout.tokens)] == rollout.tokens.tolist()


def test_an_answer_that_was_cut_off_is_closed_by_the_observation() -> None:
    episode, engine = make_episode(
        ["abcdef", "x"], prompt=[{"role": "user", "content": "hi"}], max_new_tokens=3
    )

    async def talk(episode: Episode) -> None:
        await episode.generate()
        episode.observe({"role": "user", "content": "go on"})
        await episode.generate()

    rollout = play(talk, episode)
    assert actions(rollout) == ["abc", "x<|im_end|>"]
    assert raw(engine.calls[1][0]).endswith(
        "assistant\nabc<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


THOUGHTFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
"""As reasoning templates do: only the last answer keeps its thoughts."""


async def two_turns(episode: Episode) -> None:
    for _ in range(2):
        await episode.generate()
        episode.observe({"role": "user", "content": "more"})


def thoughtful_episode(history: str) -> tuple[Episode, Engine]:
    return make_episode(
        ["a</think>b", "c"],
        prompt=[{"role": "user", "content": "hi"}],
        chat_template=THOUGHTFUL,
        history=history,
    )


def test_history_that_the_template_rewrites_begins_a_new_segment() -> None:
    episode, engine = thoughtful_episode("split")
    rollout = play(two_turns, episode)
    begin = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    again = f"{begin}b<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n<think>"
    assert raw(engine.calls[0][0]) == f"{begin}<think>"
    assert raw(engine.calls[1][0]) == again
    assert raw(rollout.tokens) == f"{begin}<think>a</think>b<|im_end|>{again}c<|im_end|>"
    second = rollout.segments[1]
    assert list(rollout.segments) == [0, len(rollout.tokens) - len(engine.calls[1][0]) - 2]
    assert rollout.tokens[second:].tolist()[:-2] == engine.calls[1][0]
    assert actions(rollout) == ["a</think>b<|im_end|>", "c<|im_end|>"]
    assert rollout.text == "a</think>b\nc"
    assert len(rollout.logprobs) == rollout.action_count


def test_history_can_be_kept_though_the_template_rewrites_it() -> None:
    episode, engine = thoughtful_episode("append")
    rollout = play(two_turns, episode)
    assert raw(engine.calls[1][0]).endswith(
        "a</think>b<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n<think>"
    )
    assert list(rollout.segments) == [0]


def test_a_run_can_stop_where_a_template_rewrites_history() -> None:
    with pytest.raises(ComponentError, match=r"rewrites what .*history=split"):
        play(two_turns, thoughtful_episode("error")[0])


@component(form="step")
async def countdown(turn: Turn, *, turns: int = 2) -> Step:
    turn.state.setdefault("seen", []).append((turn.index, turn.observation))
    done = turn.index + 1 == turns
    return Step(observation=f"[{turn.index}]", reward=0.5, done=done, metrics={"last": turn.index})


def test_the_step_form_is_driven_until_done() -> None:
    episode, engine = make_episode(["a", "b", "c"])
    rollout = play(countdown, episode, turns=3)
    assert episode.state["seen"] == [(0, "1+1="), (1, "[0]"), (2, "[1]")]
    assert raw(rollout.tokens) == "1+1=a<|im_end|>[0]b<|im_end|>[1]c<|im_end|>"
    assert rollout.text == "a[0]b[1]c"
    assert [span.reward for span in rollout.spans] == [0.5, 0.5, 0.5]
    assert [span.version for span in rollout.spans] == [0, 0, 1]
    assert rollout.version == 0
    assert (rollout.finish_reason, rollout.metrics) == ("stop", {"last": 2.0})
    assert rollout.messages[-1] == {"role": "user", "content": "[2]"}
    assert len(engine.calls) == 3


@pytest.mark.parametrize(
    ("limits", "expected", "turns"),
    [
        ({"max_turns": 2}, "max_turns", 2),
        # prompt 4, turn 1: 2 tokens, observation 3; a second turn would need 1 more
        ({"max_tokens": 5}, "max_tokens", 1),
        ({"context_length": 9}, "max_tokens", 1),
        ({"max_tokens": 6}, "max_tokens", 2),
        ({"context_length": 12}, "max_tokens", 2),
    ],
)
def test_limits_end_an_episode(limits: dict[str, int], expected: str, turns: int) -> None:
    episode, _ = make_episode(["a", "b", "c", "d"], **limits)
    rollout = play(countdown, episode, turns=4)
    assert (rollout.finish_reason, len(rollout.spans)) == (expected, turns)
    assert len(rollout.tokens) <= limits.get("context_length", 100)
    assert len(rollout.tokens) - 4 <= limits.get("max_tokens", 100)


def test_an_agent_can_catch_the_end_and_finish_in_good_order() -> None:
    async def polite(episode: Episode) -> None:
        try:
            while True:
                await episode.generate()
                episode.observe("?")
        except EpisodeEnded:
            episode.reward(0.25)

    episode, _ = make_episode(["a", "b"], max_turns=2)
    rollout = play(polite, episode)
    assert (rollout.finish_reason, rollout.spans[-1].reward) == ("max_turns", 0.25)


def test_an_aborted_call_ends_the_episode_with_its_partial_output() -> None:
    episode, _ = make_episode(["a", "b", "c"], abort_at=1)
    rollout = play(countdown, episode, turns=3)
    assert (rollout.finish_reason, len(rollout.spans)) == ("abort", 2)


def test_overrides_hold_for_one_call() -> None:
    episode, engine = make_episode(["abc", "def"])

    async def talk(episode: Episode) -> None:
        await episode.generate(max_new_tokens=2, stop_token_ids=(5,))
        await episode.generate()

    play(talk, episode)
    assert [call[1].max_new_tokens for call in engine.calls] == [2, 50]
    assert [call[1].stop_token_ids for call in engine.calls] == [(5,), ()]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0.5}, "can't change temperature"),
        ({"max_tokens": 5}, r"did you mean 'max_new_tokens'\?"),
    ],
)
def test_other_overrides_are_refused(options: dict[str, Any], expected: str) -> None:
    async def bad(episode: Episode) -> None:
        await episode.generate(**options)

    with pytest.raises(ComponentError, match=expected):
        play(bad, make_episode(["a"])[0])


def test_metadata_reaches_the_rewards_through_the_task() -> None:
    async def notes(episode: Episode) -> None:
        assert episode.metadata == {"unit": "m"}
        await episode.generate()
        episode.metadata["board"] = "x"

    episode, _ = make_episode(["a"])
    rollout = play(notes, episode)
    assert rollout.task.columns == {"unit": "m", "board": "x"}
    assert episode.task.columns == {"unit": "m"}


def test_turn_seeds_depend_on_episode_and_turn_only() -> None:
    first, second = make_episode([])[0], make_episode([])[0]
    assert [first.turn_seed(i) for i in range(3)] == [second.turn_seed(i) for i in range(3)]
    assert all(0 <= first.turn_seed(i) < 2**31 for i in range(100))


async def never_generates(episode: Episode) -> None:
    episode.metric("x", 1)


async def returns_something(episode: Episode) -> float:
    await episode.generate()
    return 1.0


async def rewards_too_early(episode: Episode) -> None:
    episode.reward(1.0)


async def two_at_once(episode: Episode) -> None:
    await asyncio.gather(episode.generate(), episode.generate())


async def not_a_number(episode: Episode) -> None:
    await episode.generate()
    episode.reward(float("nan"))


async def message_in_plain_text(episode: Episode) -> None:
    await episode.generate()
    episode.observe({"role": "user", "content": "x"})


async def no_message(episode: Episode) -> None:
    await episode.generate()
    episode.observe([{"text": "x"}])


def not_async(episode: Episode) -> None:
    pass


async def no_step(turn: Turn) -> str:
    return "x"


async def silent_step(turn: Turn) -> Step:
    return Step()


async def fails(turn: Turn) -> Step:
    raise ValueError("no such move")


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (never_generates, "ended without an engine call"),
        (returns_something, "returned float"),
        (rewards_too_early, "before the first generate"),
        (two_at_once, "while another call was running"),
        (not_a_number, "was given nan"),
        (message_in_plain_text, "the task's prompt is plain text"),
        (no_message, "text or messages with role and content"),
        (not_async, "must be `async def`"),
        (no_step, "returned str, not a Step"),
        (silent_step, "without an observation after a finished turn"),
        (fails, "failed in task data/0, turn 1: ValueError: no such move"),
    ],
)
def test_mistakes_of_agents_are_component_errors(agent: Any, expected: str) -> None:
    with pytest.raises(ComponentError, match=expected):
        play(agent, make_episode(["a", "b"])[0])


def test_a_failed_agent_can_be_kept_with_the_reason_error() -> None:
    episode, _ = make_episode(["a"])
    rollout = asyncio.run(run_agent(bind(fails), episode, on_error="keep"))
    assert (rollout.finish_reason, actions(rollout)) == ("error", ["a<|im_end|>"])


@pytest.mark.parametrize("error", [EngineError("engine died"), RuntimeError("socket closed")])
def test_errors_of_the_engine_are_not_the_agents(error: Exception) -> None:
    episode, _ = make_episode([error])
    with pytest.raises(type(error)) as caught:
        asyncio.run(run_agent(bind(single_turn), episode, on_error="keep"))
    assert caught.value is error


def test_an_agent_can_not_hide_an_error_of_the_engine() -> None:
    async def hides(episode: Episode) -> None:
        with contextlib.suppress(Exception):
            await episode.generate()

    error = EngineError("engine died")
    with pytest.raises(EngineError) as caught:
        play(hides, make_episode([error])[0])
    assert caught.value is error


def test_an_engine_that_gives_no_tokens_is_an_error() -> None:
    async def nothing(prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        empty = np.zeros(0, dtype=np.int32)
        return Generation(
            request_id=0, tokens=empty, logprobs=empty, finish_reason="stop", version=0
        )

    episode, _ = make_episode([])
    episode._generate = nothing
    with pytest.raises(EngineError, match="no tokens"):
        play(single_turn, episode)


def test_a_step_that_writes_on_after_a_cut_off_turn_needs_no_observation() -> None:
    async def write_on(turn: Turn) -> Step:
        return Step(done=turn.finish_reason == "stop")

    episode, _ = make_episode(["abcd", "e"], max_new_tokens=3)
    assert play(write_on, episode).text == "abce"


class StepClass:
    def __init__(self, *, word: str = "x") -> None:
        self.word = word

    async def step(self, turn: Turn) -> Step:
        return Step(done=True, metrics={"length": len(self.word)})


class CallClass:
    def __init__(self, *, reward: float = 1.0) -> None:
        self.reward = reward

    async def __call__(self, episode: Episode) -> None:
        await episode.generate()
        episode.reward(self.reward)


def slow_step(turn):  # type: ignore[no-untyped-def]
    """No annotation and not async: the parameter's name says the form, a thread runs it."""
    return Step(done=True, reward=2.0)


@pytest.mark.parametrize(
    ("agent", "form"),
    [
        (single_turn, "free"),
        (retry, "step"),
        (countdown, "step"),
        (StepClass, "step"),
        (CallClass, "free"),
        (slow_step, "step"),
    ],
)
def test_the_form_is_recognised(agent: Any, form: str) -> None:
    assert agent_form(bind(agent)) == form


def test_an_agent_of_no_form_says_what_to_write() -> None:
    async def unclear(x: int) -> None: ...

    with pytest.raises(ComponentError, match="annotate its positional parameter"):
        agent_form(bind(unclear))


def test_classes_and_sync_steps_run() -> None:
    assert play(StepClass, make_episode(["a"])[0], word="abc").metrics == {"length": 3.0}
    assert play(CallClass, make_episode(["a"])[0], reward=0.5).spans[0].reward == 0.5
    assert play(slow_step, make_episode(["a"])[0]).spans[0].reward == 2.0


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1="}]])
def test_retry_gives_feedback_until_the_answer_is_right(prompt: Any) -> None:
    episode, _ = make_episode(["3", "it is 2"], prompt=prompt, label=2)
    rollout = play(retry, episode)
    assert [span.reward for span in rollout.spans] == [0.0, 0.5]
    assert rollout.metrics == {"attempts": 2.0, "solved": 1.0}
    assert "That is not right. Try again." in rollout.text


def test_retry_gives_up_after_its_attempts() -> None:
    episode, _ = make_episode(["3", "4", "2"], label="2")
    rollout = play(retry, episode, attempts=2)
    assert [span.reward for span in rollout.spans] == [0.0, 0.0]
    assert rollout.metrics["solved"] == 0.0
    with pytest.raises(ComponentError, match="no label"):
        play(retry, make_episode(["3"])[0])


def test_many_episodes_run_side_by_side() -> None:
    async def wave() -> list[Rollout]:
        episodes = [make_episode([f"{i}", f"{i + 1}"])[0] for i in range(50)]
        return list(await asyncio.gather(*(run_agent(bind(countdown), e) for e in episodes)))

    assert [r.text for r in asyncio.run(wave())] == [f"{i}[0]{i + 1}" for i in range(50)]


def test_a_usage_error_in_an_agent_passes_as_it_is() -> None:
    async def misconfigured(episode: Episode) -> None:
        raise UsageError("no API key", fix="export KEY=...")

    with pytest.raises(UsageError, match="no API key"):
        play(misconfigured, make_episode(["a"])[0])
