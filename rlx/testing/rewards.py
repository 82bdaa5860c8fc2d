"""`check_reward`: what every reward must hold, whatever its scope."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from rlx.core.component import Bound
from rlx.core.rewards import Reward, RewardInputs, as_reward, excerpt
from rlx.testing.cases import require
from rlx.testing.components import (
    bind,
    check_parameters,
    check_state,
    check_travel,
    restarted,
)
from rlx.testing.samples import reward_inputs
from rlx.testing.violations import EXAMPLES, Broken, Checker, label_of

_ANSWERS = ("4", "The answer is 4.", "\\boxed{4}", "no", "1 2 3", "<think>x</think> 4")
_LABELS = ("4", "no", "1/2")
_STRANGE = ("", " ", "\n\n", "\0", "é\u0301🙂\ud7ff", "((((", "\\boxed{", "a " * 3000, "9" * 5000)

COLUMNS_TAG = "example_columns"
"""`@rlx.component(example_columns={"tests": […]})`: columns without which the reward can't work."""


def check_reward(
    target: Any,
    *,
    samples: Sequence[RewardInputs] | None = None,
    examples: int = EXAMPLES,
    **params: Any,
) -> None:
    """Check a reward; raises `ConformanceError` that lists every violation.

    Args:
        target: a reference (`name`, `pkg.mod:attr`, …), a function or a class.
        samples: ordinary samples, where the reward needs columns or labels of a certain form;
            unset: short texts with the labels "4", "no", "1/2", and the columns of the component's
            tag `example_columns`.
        examples: generated samples per rule.
        params: parameters of the component.
    """
    bound = restarted(bind("rewards", target, params))
    checker = Checker(f"reward {label_of(target)}", examples=examples, render=_render)
    columns = bound.tags.extra.get(COLUMNS_TAG, {})
    own = list(samples or ())
    ordinary = st.sampled_from(own).map(copy.deepcopy) if own else _ordinary(columns)
    lists = st.lists(ordinary, min_size=1, max_size=4)
    if checker.holds("returns a finite number per sample", lists, lambda xs: _scores(bound, xs)):
        _check_inputs(checker, bound, ordinary)
        _check_manners(checker, bound, ordinary)
        one = own[:1] or [reward_inputs(prompt="2 + 2 =", response="4", label="4", **columns)]
        check_travel(checker, bound, one, score, _equal)
    check_parameters(checker, bound)
    checker.finish()


def _check_inputs(checker: Checker, bound: Bound, ordinary: SearchStrategy[RewardInputs]) -> None:
    def responses(texts: SearchStrategy[str]) -> SearchStrategy[list[RewardInputs]]:
        changed = st.builds(lambda x, text: replace(x, response=text), ordinary, texts)
        return st.lists(changed, min_size=1, max_size=2)

    strange = st.one_of(st.sampled_from(_STRANGE), st.text(max_size=20))
    checker.holds("copes with any response", responses(strange), lambda xs: _scores(bound, xs))
    talks = ordinary.map(
        lambda x: [replace(x, prompt=[{"role": "user", "content": x.prompt_text}])]
    )
    checker.holds("copes with a chat prompt", talks, lambda xs: _scores(bound, xs))
    if not bound.tags.needs_label:
        bare = ordinary.map(lambda x: [replace(x, label=None, task={**x.task, "label": None})])
        checker.holds(
            "copes with a task without label, or declares needs_label=True",
            bare,
            lambda xs: _scores(bound, xs),
        )


def _check_manners(checker: Checker, bound: Bound, ordinary: SearchStrategy[RewardInputs]) -> None:
    lists = st.lists(ordinary, min_size=1, max_size=4)
    check_state(checker, bound, lists, lambda one, xs, _: score(one, xs), _equal)
    checker.holds("leaves its inputs as they are", lists, lambda xs: _mutates(bound, xs))
    checker.holds("is deterministic", lists, lambda xs: _deterministic(bound, xs))
    checker.holds("gives the same in parallel threads", lists, lambda xs: _threads(bound, xs))
    if bound.tags.scope != "rollout":
        shuffled = lists.flatmap(lambda xs: st.tuples(st.just(xs), st.permutations(range(len(xs)))))
        checker.holds(
            "does not depend on the order of the samples",
            shuffled,
            lambda case: _permuted(bound, *case),
        )


def score(bound: Bound, samples: Sequence[RewardInputs]) -> list[Reward]:
    """Return one reward per sample, whatever the scope and whether or not it is asynchronous."""
    if bound.tags.scope == "rollout":
        return [as_reward(_wait(bound(sample))) for sample in samples]
    answer = _wait(bound(list(samples)))
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise Broken(f"returned a {type(answer).__name__}; with this scope a list, one per sample")
    if len(answer) != len(samples):
        raise Broken(f"returned {len(answer)} rewards for {len(samples)} samples")
    return [as_reward(item) for item in answer]


def _wait(answer: Any) -> Any:
    if not inspect.isawaitable(answer):
        return answer

    async def result() -> Any:
        return await answer

    return asyncio.run(result())


def _ordinary(columns: Mapping[str, Any]) -> SearchStrategy[RewardInputs]:
    return st.builds(
        lambda response, label, index: reward_inputs(
            prompt="How much is 2 + 2?", response=response, label=label, index=index, **columns
        ),
        st.sampled_from(_ANSWERS),
        st.sampled_from(_LABELS),
        st.integers(0, 3),
    )


def _scores(bound: Bound, samples: list[RewardInputs]) -> None:
    try:
        score(bound, samples)
    except (TypeError, ValueError) as error:
        if str(error).startswith("a reward "):  # `as_reward`'s own words
            raise Broken(str(error)) from error
        raise


def _mutates(bound: Bound, samples: list[RewardInputs]) -> None:
    before = copy.deepcopy(samples)
    score(bound, samples)
    for old, new in zip(before, samples, strict=True):
        for name in ("prompt", "messages", "label", "task", "metadata"):
            same = getattr(old, name) == getattr(new, name)
            require(same, f"changed sample.{name} in place")


def _deterministic(bound: Bound, samples: list[RewardInputs]) -> None:
    first, second = score(bound, samples), score(bound, samples)
    require(_equal(first, second), f"two calls give {_shown(first)} and {_shown(second)}")


def _threads(bound: Bound, samples: list[RewardInputs]) -> None:
    alone = score(bound, samples)
    with ThreadPoolExecutor(4) as pool:
        for together in pool.map(lambda _: score(bound, samples), range(4)):
            require(
                _equal(alone, together),
                f"alone it gives {_shown(alone)}, beside others {_shown(together)}",
            )


def _permuted(bound: Bound, samples: list[RewardInputs], order: list[int]) -> None:
    usual = [score(bound, samples)[index] for index in order]
    other = score(bound, [samples[index] for index in order])
    require(
        all(_close(a.score, b.score) for a, b in zip(usual, other, strict=True)),
        f"samples in the order {order} get {_shown(other)} instead of {_shown(usual)}",
    )


def _render(case: Any) -> str:
    samples, order = case if isinstance(case, tuple) else (case, None)
    shown = [
        f"response={excerpt(x.response, 80)!r}, label={x.label!r}, prompt={x.prompt!r}"
        for x in samples
    ]
    return "\n".join([*shown, *([f"order={order}"] if order else [])])


def _close(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return abs(first - second) <= 1e-9 * max(1.0, abs(first))


def _equal(first: list[Reward], second: list[Reward]) -> bool:
    return first == second


def _shown(rewards: list[Reward]) -> list[float | None]:
    return [reward.score for reward in rewards]
