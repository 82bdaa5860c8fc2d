"""Rows become tasks: prompts, labels, token ids, lengths, and the errors on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from rlx.core import tasks as tasks_module
from rlx.core.config import DataConfig
from rlx.core.errors import UsageError
from rlx.core.tasks import TaskSet, load_tasks

PLAIN, CHAT = tiny_tokenizer(), tiny_tokenizer(CHATML)
SUM = {"prompt": "1+1=", "label": "2"}


def load(
    tmp_path: Path,
    rows: list[Any],
    *,
    tokenizer: Any = PLAIN,
    limit: int = 100,
    needs_label: str | None = None,
    **settings: Any,
) -> TaskSet:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return load_tasks(
        DataConfig(path=str(path), **settings),
        tokenizer=tokenizer,
        max_prompt_tokens=limit,
        needs_label=needs_label,
    )


def failure(tmp_path: Path, rows: list[Any], **settings: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, rows, **settings)
    return str(caught.value)


def text_of(tokens: Any) -> str:
    return str(PLAIN.decode(tokens))


def test_a_text_prompt_is_encoded_as_it_is(tmp_path: Path) -> None:
    task = load(tmp_path, [SUM | {"level": 3}]).tasks[0]
    assert (task.id, task.prompt, task.label, task.source) == ("data/0", "1+1=", "2", "data")
    assert list(task.tokens) == PLAIN("1+1=")["input_ids"]
    assert task.columns == SUM | {"level": 3}


def test_system_prompt_and_template_surround_the_text(tmp_path: Path) -> None:
    task = load(
        tmp_path,
        [SUM | {"unit": "m"}],
        system_prompt="Be brief.",
        template="Q: {prompt} in {unit}, \\boxed{{}}\nA:",
    ).tasks[0]
    assert text_of(task.tokens) == "Be brief.\n\nQ: 1+1= in m, \\boxed{}\nA:"


def test_text_goes_through_the_chat_template(tmp_path: Path) -> None:
    task = load(tmp_path, [SUM], tokenizer=CHAT, system_prompt="S").tasks[0]
    assert task.prompt == [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1="}]
    expected = CHAT.apply_chat_template(
        list(task.prompt), tokenize=True, add_generation_prompt=True
    )["input_ids"]
    assert list(task.tokens) == expected
    assert expected[0] == CHAT.convert_tokens_to_ids("<|im_start|>")


def test_a_row_of_messages_keeps_its_own_system_message(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    other = [{"role": "user", "content": "yo", "name": "bob"}]
    rows = [{"prompt": messages}, {"prompt": other}]
    found = load(tmp_path, rows, tokenizer=CHAT, system_prompt="S", template="<{prompt}>").tasks
    assert found[0].prompt == [messages[0], {"role": "user", "content": "<hi>"}]
    assert found[1].prompt == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "<yo>", "name": "bob"},
    ]


def test_chat_template_off_gives_plain_text(tmp_path: Path) -> None:
    task = load(tmp_path, [SUM], tokenizer=CHAT, chat_template=False).tasks[0]
    assert task.prompt == "1+1="
    assert list(task.tokens) == PLAIN("1+1=")["input_ids"]


def test_long_prompts_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * length} for length in (3, 9, 5, 20)]
    found = load(tmp_path, rows, limit=5)
    assert [task.id for task in found.tasks] == ["data/0", "data/2"]
    assert (found.skipped_too_long, found.rows, found.max_prompt_tokens) == (2, 4, 5)
    assert found.longest_prompt == 5
    assert load(tmp_path, rows, limit=100, max_prompt_tokens=9).skipped_too_long == 1


def test_large_data_is_not_tokenised_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "EAGER_ROWS", 10)
    rows = [{"prompt": "x" * (20 if i == 600 else 3)} for i in range(1000)]
    found = load(tmp_path, rows, limit=5)
    assert (len(found.tasks), found.lengths_checked, found.skipped_too_long) == (1000, False, 0)
    assert found.tasks.max_prompt_tokens == 5  # type: ignore[attr-defined]
    assert found.longest_prompt is None
    assert "row 600 has 20 tokens, 5 fit" in failure(tmp_path, rows, limit=5, too_long="error")
    assert "all 1000 prompts are too long" in failure(tmp_path, rows, limit=2)


def test_tasks_are_a_sequence(tmp_path: Path) -> None:
    found = load(tmp_path, [{"prompt": c} for c in "abc"]).tasks
    assert [task.prompt for task in found] == ["a", "b", "c"]
    assert found[-1].id == "data/2"
    assert [task.prompt for task in found[1:]] == ["b", "c"]
    with pytest.raises(IndexError):
        found[3]


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        ([{"promt": "x", "label": 1}], {}, "did you mean 'promt'?"),
        ([{"promt": "x", "label": 1}], {}, "one of: promt, label"),
        ([{"prompt": "x", "answer": 1}], {"needs_label": "math"}, "(the reward 'math' compares"),
        ([{"prompt": "x", "answer": 1}], {"label": "anwser"}, "did you mean 'answer'?"),
        ([SUM], {"label": None, "needs_label": "math"}, "data.label is null"),
        ([SUM, {"prompt": "x"}], {"needs_label": "math"}, "row 1 has no label"),
        ([SUM, {"prompt": "x", "label": None}], {"needs_label": "math"}, "row 1 has no label"),
        ([SUM, {"prompt": " \n"}], {}, "the prompt of row 1 is empty"),
        ([SUM, {"label": "2"}], {}, "the prompt of row 1 is empty"),
        ([{"prompt": 3}], {}, "can't be a prompt: it holds int64"),
        ([{"prompt": [{"text": "x"}]}], {}, "can't be a prompt"),
        ([{"prompt": [{"role": "user", "content": "x"}]}, {"prompt": []}], {}, "row 1 is empty"),
        ([{"prompt": [{"role": "user", "content": "x"}]}], {}, "no chat template is applied"),
        ([SUM], {"chat_template": True}, "the tokenizer has no chat template"),
        ([SUM], {"template": "{promt}"}, "did you mean 'prompt'?"),
        ([SUM], {"template": "\\boxed{"}, "no format string"),
        ([SUM], {"template": "Answer:"}, "has no {prompt}"),
        ([SUM | {"n": 1}, SUM], {"template": "{prompt}{n:d}"}, "can't be filled with row 1"),
        (
            [SUM],
            {"limit": 2},
            "the only prompt is too long: the shortest has 4 tokens or more, 2 fit",
        ),
        ([SUM], {"limit": 2, "too_long": "error"}, "the prompt of row 0 has 4 tokens, 2 fit"),
    ],
)
def test_each_mistake_has_its_message(
    tmp_path: Path, rows: list[Any], settings: dict[str, Any], expected: str
) -> None:
    assert expected in failure(tmp_path, rows, **settings)


def test_a_chat_template_that_refuses_is_a_usage_error(tmp_path: Path) -> None:
    strict = tiny_tokenizer("{{ raise_exception('roles must alternate') }}")
    message = failure(tmp_path, [SUM], tokenizer=strict)
    assert "refuses the prompt of row 0: roles must alternate" in message


def test_data_without_labels_is_fine_when_no_reward_compares(tmp_path: Path) -> None:
    assert load(tmp_path, [{"prompt": "x"}]).tasks[0].label is None
    assert load(tmp_path, [SUM], label=None).tasks[0].label is None


def test_loader_rows_are_checked_like_file_rows(tmp_path: Path) -> None:
    file = tmp_path / "loader.py"
    file.write_text('def load(): return [{"prompt": "x", "label": 1}, {"prompt": 5, "label": 2}]')
    with pytest.raises(UsageError, match="the prompt of row 1 is neither text nor messages"):
        load_tasks(
            DataConfig(path=f"{file}:load"), tokenizer=PLAIN, max_prompt_tokens=9, needs_label=None
        )


def test_the_embedded_task_loads(tmp_path: Path) -> None:
    found = load_tasks(
        DataConfig(max_samples=50), tokenizer=PLAIN, max_prompt_tokens=64, needs_label="exact_match"
    )
    assert (len(found.tasks), found.sources[0].name) == (50, "embedded")
    assert found.tasks[7].id == "embedded/7"
    assert isinstance(found.tasks[7].label, str)


def test_a_line_of_a_hundred_megabytes_is_a_prompt_too_long(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "lorem ipsum " * (100 * 2**20 // 12)}, {"prompt": "b"}]
    found = load(tmp_path, rows, limit=1000)
    assert [task.id for task in found.tasks] == ["data/0", "data/2"]
    assert found.skipped_too_long == 1
