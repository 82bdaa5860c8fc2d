"""Mixtures of data sources: shares, order, resume, and the errors of settings that don't fit."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import CHATML, tiny_tokenizer

from rlx.core.component import component
from rlx.core.config import DataConfig
from rlx.core.errors import UsageError
from rlx.core.mixture import MixedStream, TaskMixture, check_probabilities
from rlx.core.prompts import with_template_variables
from rlx.core.references import Bound, ComponentRef
from rlx.core.rollouts import Task
from rlx.core.samplers import BoundSampler, TaskStream
from rlx.core.tasks import TaskSet, load_tasks

PLAIN = tiny_tokenizer()


def make_tasks(name: str, count: int) -> list[Task]:
    return [Task(id=f"{name}/{i}", prompt="p", tokens=[1], source=name) for i in range(count)]


def mixture(sizes: dict[str, int], shares: dict[str, float] | None) -> TaskMixture:
    return TaskMixture({name: make_tasks(name, size) for name, size in sizes.items()}, shares)


def ids(tasks: Sequence[Task]) -> list[str]:
    return [task.id for task in tasks]


@given(
    weights=st.lists(st.integers(1, 50), min_size=2, max_size=5),
    count=st.integers(1, 300),
)
def test_every_source_has_its_share_at_every_moment(weights: list[int], count: int) -> None:
    shares = {f"s{i}": weight / sum(weights) for i, weight in enumerate(weights)}
    stream = MixedStream(mixture(dict.fromkeys(shares, 3), shares), 0)
    drawn: Counter[str] = Counter()
    for number, task in enumerate(stream.next(count), 1):
        drawn[task.source] += 1
        for name, share in shares.items():
            assert abs(drawn[name] - share * number) < len(weights)


@given(
    sizes=st.lists(st.integers(1, 7), min_size=2, max_size=4),
    seed=st.integers(0, 2**40),
    draws=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    cut=st.integers(0, 8),
    shuffle=st.booleans(),
)
def test_a_resumed_mixture_neither_skips_nor_repeats(
    sizes: list[int], seed: int, draws: list[int], cut: int, shuffle: bool
) -> None:
    shares = {f"s{i}": (i + 1) / sum(range(1, len(sizes) + 1)) for i in range(len(sizes))}
    tasks = mixture({f"s{i}": size for i, size in enumerate(sizes)}, shares)
    whole = MixedStream(tasks, seed, shuffle=shuffle)
    expected = [ids(whole.next(n)) for n in draws]
    first = MixedStream(tasks, seed, shuffle=shuffle)
    found = [ids(first.next(n)) for n in draws[:cut]]
    second = MixedStream(tasks, seed, shuffle=shuffle)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert found + [ids(second.next(n)) for n in draws[cut:]] == expected


def test_each_source_has_epochs_of_its_own() -> None:
    stream = MixedStream(mixture({"a": 2, "b": 100}, {"a": 0.5, "b": 0.5}), 3)
    drawn = stream.next(40)
    a = [task.id for task in drawn if task.source == "a"]
    b = [task.id for task in drawn if task.source == "b"]
    assert [sorted(a[i : i + 2]) for i in range(0, 20, 2)] == [["a/0", "a/1"]] * 10
    assert len(set(b)) == 20


def test_sources_of_one_size_do_not_share_their_order() -> None:
    stream = MixedStream(mixture({"a": 30, "b": 30}, {"a": 0.5, "b": 0.5}), 3)
    drawn = stream.next(60)
    orders = [[int(t.id[2:]) for t in drawn if t.source == name] for name in "ab"]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_without_probabilities_every_row_comes_once_an_epoch() -> None:
    tasks = mixture({"a": 3, "b": 2}, None)
    sampler = BoundSampler(bound(), tasks, 0)
    assert sorted(ids(sampler.next_tasks(5))) == ["a/0", "a/1", "a/2", "b/0", "b/1"]


def test_a_sampler_draws_in_the_shares_and_resumes() -> None:
    tasks = mixture({"a": 3, "b": 9}, {"a": 0.25, "b": 0.75})
    whole, first, second = (BoundSampler(bound(), tasks, 5) for _ in range(3))
    expected = ids(whole.next_tasks(12))
    assert Counter(name[0] for name in expected) == {"a": 3, "b": 9}
    begun = ids(first.next_tasks(5))
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert begun + ids(second.next_tasks(7)) == expected


def test_a_mixture_is_one_sequence() -> None:
    tasks = mixture({"a": 2, "b": 3}, None)
    assert ids(tasks) == ["a/0", "a/1", "b/0", "b/1", "b/2"]
    assert tasks[-1].id == "b/2"
    assert ids(tasks[1:3]) == ["a/1", "b/0"]
    with pytest.raises(IndexError):
        tasks[5]


def test_other_shares_and_other_data_are_refused() -> None:
    tasks = mixture({"a": 2, "b": 3}, {"a": 0.5, "b": 0.5})
    state = MixedStream(tasks, 0).state_dict()
    other = MixedStream(mixture({"a": 2, "b": 3}, {"a": 0.25, "b": 0.75}), 0)
    with pytest.raises(UsageError, match=r"made with 0.5 a, 0.5 b, the data now has 0.25 a"):
        other.load_state_dict(state)
    with pytest.raises(UsageError, match="made with 3 tasks, the data now has 4 tasks"):
        MixedStream(mixture({"a": 2, "b": 4}, {"a": 0.5, "b": 0.5}), 0).load_state_dict(state)
    with pytest.raises(UsageError, match="made with a mixture of data sources"):
        TaskStream(make_tasks("a", 2), 0).load_state_dict(state)
    with pytest.raises(UsageError, match="made with one data set"):
        MixedStream(tasks, 0).load_state_dict(TaskStream(make_tasks("a", 2), 0).state_dict())


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"a": 0.5, "b": 0.6}, "sum to 1.1, not to 1"),
        ({"a": 0.5, "b": 0.6}, "a 0.4545, b 0.5455"),
        ({"a": 0.5, "b": None}, "some data sources have a probability, and b has none"),
        ({"a": 0.5, "b": None, "c": None}, "b, c have none"),
    ],
)
def test_probabilities_that_do_not_fit(given_: dict[str, float | None], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_probabilities(given_)
    assert expected in str(caught.value)


def test_thirds_sum_to_one() -> None:
    check_probabilities({"a": 1 / 3, "b": 1 / 3, "c": 0.33333333})
    check_probabilities({"a": None, "b": None})


# ------------------------------------------------------------------------------ from settings


def load(folder: Path, sources: list[dict[str, Any]], **common: Any) -> TaskSet:
    for item in sources:
        rows = item.pop("rows", None)
        if rows is not None:
            path = folder / item["path"]
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(json.dumps(row) for row in rows))
            item["path"] = str(path)
    return load_tasks(
        DataConfig(sources=sources, **common),  # type: ignore[arg-type]
        tokenizer=PLAIN,
        max_prompt_tokens=100,
        needs_label=None,
    )


def failure(folder: Path, sources: list[dict[str, Any]], **common: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(folder, sources, **common)
    return str(caught.value)


A = [{"prompt": "1+1=", "label": "2"}, {"prompt": "x" * 200, "label": "3"}]
B = [{"question": "why", "answer": "so"}]


def test_a_source_overrides_the_common_settings(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        [
            {"path": "a.jsonl", "rows": A, "probability": 0.75},
            {
                "path": "b.jsonl",
                "rows": B,
                "probability": 0.25,
                "name": "why",
                "prompt": "question",
                "label": "answer",
                "template": "<{prompt}>",
            },
        ],
        template="Q: {prompt}",
    )
    by_id = {task.id: task for task in found.tasks}
    assert list(by_id) == ["a/0", "why/0"]
    assert (by_id["a/0"].prompt, by_id["a/0"].label) == ("Q: 1+1=", "2")
    assert (by_id["why/0"].prompt, by_id["why/0"].label) == ("<why>", "so")
    assert by_id["why/0"].source == "why"
    assert [source.skipped_too_long for source in found.sources] == [1, 0]
    assert (found.rows, found.skipped_too_long, found.lengths_checked) == (3, 1, True)
    assert isinstance(found.tasks, TaskMixture)
    assert found.tasks.probabilities == {"a": 0.75, "why": 0.25}


def test_max_samples_holds_for_each_source(tmp_path: Path) -> None:
    rows = [{"prompt": c} for c in "abc"]
    found = load(
        tmp_path,
        [{"path": "a.jsonl", "rows": rows}, {"path": "b.jsonl", "rows": rows, "max_samples": 1}],
        max_samples=2,
    )
    assert ids(found.tasks) == ["a/0", "a/1", "b/0"]


@pytest.mark.parametrize(
    ("sources", "common", "expected"),
    [
        (
            [{"path": "a.jsonl", "rows": A}, {"path": "b.jsonl", "rows": B}],
            {},
            "the data has no column 'prompt'",
        ),
        (
            [{"path": "a.jsonl", "rows": A}, {"path": "b.jsonl", "rows": B}],
            {},
            "data.sources.1.prompt",
        ),
        (
            [{"path": "a.jsonl", "rows": A}, {"path": "x/a.jsonl", "rows": A}],
            {},
            "two data sets have the name 'a'",
        ),
        ([{"path": "a.jsonl", "rows": A}], {"path": "c.jsonl"}, "two answers to one question"),
        ([{"path": "nowhere.jsonl"}], {}, "data.sources.0.path"),
        (
            [{"path": "a.jsonl", "rows": A, "probability": 0.5}],
            {},
            "sum to 0.5, not to 1",
        ),
    ],
)
def test_each_mistake_names_the_source(
    tmp_path: Path, sources: list[dict[str, Any]], common: dict[str, Any], expected: str
) -> None:
    assert expected in failure(tmp_path, [dict(item) for item in sources], **common)


# ------------------------------------------------------------------- chat-template variables

THINKING = CHATML + "{% if enable_thinking is defined and not enable_thinking %}/no{% endif %}"
HI = [{"role": "user", "content": "hi"}]


def render(tokenizer: Any) -> str:
    return str(tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True))


def test_template_variables_are_in_force_wherever_the_template_is_applied() -> None:
    plain = tiny_tokenizer(THINKING)
    changed = with_template_variables(plain, {"enable_thinking": False})
    assert render(changed) == render(plain) + "/no"
    assert list(changed("hi")["input_ids"]) == list(plain("hi")["input_ids"])
    assert with_template_variables(plain, {}) is plain


@pytest.mark.parametrize(
    ("template", "variables", "expected"),
    [
        (THINKING, {"enable_thinkng": False}, "did you mean 'enable_thinking'?"),
        (THINKING, {"tokenize": True}, "tokenize is not yours to set"),
        (None, {"enable_thinking": False}, "no chat template"),
    ],
)
def test_template_variables_that_would_do_nothing(
    template: str | None, variables: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UsageError) as caught:
        with_template_variables(tiny_tokenizer(template), variables)
    assert expected in str(caught.value)


def test_a_template_that_marks_generations_is_understood() -> None:
    marked = THINKING.replace(
        "{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"
    )
    assert "/no" in render(
        with_template_variables(tiny_tokenizer(marked), {"enable_thinking": False})
    )


@component
def _everything(group: Any) -> bool:
    return True


def bound() -> Bound:
    ref = ComponentRef(kind="samplers", name="all", target="test:all")
    return Bound(ref=ref, obj=_everything, params={})
