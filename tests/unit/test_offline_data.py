"""Rows of four kinds become sequences; what can't be trained on is counted, never trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from rlx.core.config import DataConfig, OfflineConfig
from rlx.core.errors import UsageError
from rlx.core.offline.needs import Needs
from rlx.core.offline.rows import RowBatch
from rlx.core.offline.sources import Source, load_source

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_WORDS = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
"""Marks what is said alone: nothing, where nothing is."""
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role == 'user' else '(old)' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows an answer only as long as it is the last message."""
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]
PAIRS = Needs(data="pairs", per="pair")
SCORED = Needs(data="pairs", head="score", per="pair")
STEPS = Needs(data="steps", head="token")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load rows given as a list."""

    def load(
        rows: list[dict[str, Any]],
        needs: Needs | None = None,
        *,
        template: str | None = None,
        max_length: int = 200,
        data: dict[str, Any] | None = None,
        **offline: Any,
    ) -> Source:
        monkeypatch.setattr("tiny_tokenizer.ROWS", rows, raising=False)
        monkeypatch.setattr("tiny_tokenizer.load", lambda: rows, raising=False)
        tokenizer = tiny_tokenizer(template)
        return load_source(
            DataConfig(path="tiny_tokenizer:load", **(data or {})),
            needs or Needs(),
            OfflineConfig(**offline),
            tokenizer=tokenizer,
            max_length=max_length,
            pad=tokenizer.pad_token_id,
        )

    return load


def texts(batch: RowBatch) -> list[str]:
    """The sequences as text."""
    parts = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    return [str(tiny_tokenizer().decode(part)) for part in parts]


def trained(batch: RowBatch) -> list[str]:
    """The trained tokens of each sequence as text."""
    tokenizer = tiny_tokenizer()
    parts = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    places = np.split(batch.action_positions, np.cumsum(batch.action_lengths)[:-1])
    return [str(tokenizer.decode(part[at])) for part, at in zip(parts, places, strict=True)]


# ------------------------------------------------------------------------------ conversations


def test_plain_completion_is_trained_up_to_its_end_token(loaded: Any) -> None:
    rows = loaded([{"prompt": "2+2=", "completion": "4"}]).rows
    assert texts(rows) == ["2+2=4<|im_end|>"]
    assert trained(rows) == ["4<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_all_answers_of_a_conversation_are_trained(loaded: Any, template: str) -> None:
    rows = loaded([{"messages": TALK}], template=template).rows
    assert trained(rows) == ["hello<|im_end|>so long<|im_end|>"]
    assert rows.turn.tolist() == [0] * 6 + [1] * 8


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_last_answer_alone_can_be_trained(loaded: Any, template: str) -> None:
    rows = loaded([{"messages": TALK}], template=template, train_on="last").rows
    assert trained(rows) == ["so long<|im_end|>"]


def test_completion_of_a_chat_leaves_its_prompts_answers_untrained(loaded: Any) -> None:
    rows = loaded([{"prompt": TALK[:3], "completion": "so long"}], template=CHATML).rows
    assert trained(rows) == ["so long<|im_end|>"]
    assert texts(rows)[0].startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello")


def test_pretraining_trains_every_token_but_the_first(loaded: Any) -> None:
    data = {"prompt": "text"}
    rows = loaded([{"text": "abc"}], template=CHATML, data=data, train_on="all").rows
    assert texts(rows) == ["abc<|im_end|>"]
    assert trained(rows) == ["bc<|im_end|>"]


def test_template_that_rewrites_history_trains_what_it_can(loaded: Any) -> None:
    """The first answer is not in the whole as it was when it was given."""
    source = loaded([{"messages": TALK}], template=FORGETFUL)
    assert trained(source.rows) == ["so long<|im_end|>"]
    assert source.rewritten == 1
    assert "1 answers not trained" in source.complaints()[0]


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_WORDS])
def test_answer_in_which_nothing_is_said_is_not_trained(loaded: Any, template: str) -> None:
    silent = [TALK[0], {"role": "assistant", "content": ""}, *TALK[2:]]
    source = loaded([{"messages": silent}], template=template)
    (said,) = trained(source.rows)
    assert said.removesuffix("<|im_end|>") == "so long"
    assert source.complaints() == ["tiny_tokenizer.load: 1 answers not trained: they are empty"]
    assert source.describe()["answers_empty"] == 1


def test_conversation_that_a_marked_template_refuses_is_an_error(loaded: Any) -> None:
    with pytest.raises(UsageError, match=r"refuses a conversation \(roles: user, assistant\)"):
        loaded([{"messages": TALK[:2]}], template=MARKED + "{{ raise_exception('no') }}")


@pytest.mark.parametrize("value", ["hello", [{"from": "human", "value": "hi"}]])
def test_messages_that_are_none_are_an_error_that_names_their_column(
    loaded: Any, value: Any
) -> None:
    with pytest.raises(UsageError, match="column 'messages' of row 0 is not a list of messages"):
        loaded([{"messages": value}], template=CHATML)


def test_condition_on_a_column_goes_through_the_prompts_template(loaded: Any) -> None:
    rows = loaded(
        [{"prompt": "say", "completion": "x", "reward": 0.5}],
        data={"template": "{prompt} ({reward:.1f}) "},
    ).rows
    assert texts(rows) == ["say (0.5) x<|im_end|>"]


# ------------------------------------------------------------------------------------- pairs


def test_pair_is_two_sequences_the_chosen_one_first(loaded: Any) -> None:
    row = {"prompt": "q:", "chosen": "yes", "rejected": "no", "by": 2}
    rows = loaded([row], PAIRS, margin="by").rows
    assert trained(rows) == ["yes<|im_end|>", "no<|im_end|>"]
    assert (rows.per_row, rows.rollout_count, rows.margin.tolist()) == (2, 1, [2.0])


def test_answers_of_pairs_are_trained_without_their_prompt_whatever_is_set(loaded: Any) -> None:
    row = {"prompt": "q:", "chosen": "yes", "rejected": "no"}
    assert trained(loaded([row], PAIRS, train_on="all").rows) == ["yes<|im_end|>", "no<|im_end|>"]


def test_prompt_is_what_both_texts_begin_with_up_to_a_word(loaded: Any) -> None:
    rows = loaded([{"chosen": "Q: hi A: good", "rejected": "Q: hi A: golf"}], PAIRS).rows
    assert trained(rows) == [" good<|im_end|>", " golf<|im_end|>"]


def test_prompt_is_the_messages_that_both_begin_with(loaded: Any) -> None:
    other = [*TALK[:3], {"role": "assistant", "content": "never"}]
    rows = loaded([{"chosen": TALK, "rejected": other}], PAIRS, template=CHATML).rows
    assert trained(rows) == ["so long<|im_end|>", "never<|im_end|>"]


def test_whole_conversations_beside_their_prompt_are_not_doubled(loaded: Any) -> None:
    other = [*TALK[:3], {"role": "assistant", "content": "never"}]
    row = {"prompt": TALK[:3], "chosen": TALK, "rejected": other}
    rows = loaded([row], PAIRS, template=CHATML).rows
    assert texts(rows)[1].count("hello") == 1


def test_system_prompt_of_the_settings_does_not_double_the_prompt(loaded: Any) -> None:
    row = {"prompt": "hi", "chosen": TALK[:2], "rejected": [TALK[0], TALK[3]]}
    batch = loaded([row], PAIRS, template=CHATML, data={"system_prompt": "be kind"}).rows
    assert [text.count("hi") for text in texts(batch)] == [1, 1]
    assert [text.count("be kind") for text in texts(batch)] == [1, 1]


def test_score_is_read_at_the_last_token_of_what_a_scorer_would_write(loaded: Any) -> None:
    row = {"prompt": TALK[:1], "chosen": "hello", "rejected": "go"}
    rows = loaded([row], SCORED, template=CHATML).rows
    whole = tiny_tokenizer(CHATML).apply_chat_template(TALK[:2], tokenize=False)
    assert texts(rows)[0] == whole
    assert rows.action_lengths.tolist() == [1, 1]
    assert rows.action_positions.tolist() == (rows.lengths - 1).tolist()


def test_score_of_a_long_sequence_loses_its_start(loaded: Any) -> None:
    row = {"prompt": "0123456789", "chosen": "yes", "rejected": "no"}
    source = loaded([row], SCORED, max_length=6)
    assert texts(source.rows) == ["89yes<|im_end|>", "789no<|im_end|>"]
    assert source.cut == 2


# ------------------------------------------------------------------------ judged, and in steps


def test_judged_answers_carry_their_verdict_and_a_mismatched_partner(loaded: Any) -> None:
    needs = Needs(data="unpaired", per="sequence", requires=frozenset({"kl_baseline"}))
    rows = [{"prompt": f"p{i // 2}:", "completion": f"a{i}", "label": i % 2 == 0} for i in range(6)]
    source = loaded(rows, needs)
    assert source.rows.desirable.tolist() == [True, False] * 3
    for own, other in zip(texts(source.rows), texts(source.others), strict=True):
        answer = int(other.partition("a")[2][0])
        assert own[:3] == other[:3]
        assert own[1] != str(answer // 2), "the partner's prompt is another"
    assert trained(source.others)[0].endswith("<|im_end|>")


def test_answers_to_a_single_prompt_are_matched_with_their_neighbours(loaded: Any) -> None:
    rows = [{"prompt": "p ", "completion": word, "label": True} for word in ("a", "b", "c")]
    needs = Needs(data="unpaired", per="sequence", requires=frozenset({"kl_baseline"}))
    others = loaded(rows, needs).others
    assert [text[2] for text in texts(others)] == ["b", "c", "a"]


def test_steps_are_judged_at_their_last_token(loaded: Any) -> None:
    row = {"prompt": "q ", "completions": ["one", "two"], "labels": [True, 0.25]}
    rows = loaded([row], Needs(data="steps", head="token")).rows
    assert texts(rows) == ["q one\ntwo\n"]
    assert trained(rows) == ["\n\n"]
    assert (rows.labels.tolist(), rows.turn.tolist()) == ([1.0, 0.25], [0, 1])


def test_labels_of_steps_that_are_cut_off_go_too(loaded: Any) -> None:
    row = {"prompt": "q ", "completions": ["one", "two"], "labels": [True, False]}
    rows = loaded([row], Needs(data="steps", head="token"), max_length=7).rows
    assert rows.labels.tolist() == [1.0]


# -------------------------------------------------------------------------- what is left out

GOOD = {"prompt": "p ", "completion": "fine", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("row", "needs", "options", "reason"),
    [
        ({"prompt": "p", "completion": " "}, Needs(), {}, "empty answers"),
        ({"prompt": "p", "completion": None}, Needs(), {}, "empty answers"),
        ({"messages": TALK[:1]}, Needs(), {"template": CHATML}, "without an assistant's answer"),
        (
            {"messages": [TALK[0], {"role": "assistant", "content": ""}]},
            Needs(),
            {"template": CHATML},
            "empty answers",
        ),
        ({"prompt": "p" * 40, "completion": "x"}, Needs(), {"max_length": 30}, "leave no room"),
        (
            {"prompt": "p" * 40, "completion": "x"},
            Needs(),
            {"data": {"max_prompt_tokens": 30}},
            "longer than data.max_prompt_tokens",
        ),
        (
            {"messages": [*TALK[:3], {"role": "assistant", "content": " "}]},
            Needs(),
            {"template": CHATML, "train_on": "last"},
            "empty answers",
        ),
        ({"prompt": "p", "completion": TALK[:1]}, Needs(), {}, "without an assistant's answer"),
        (
            {"prompt": "p", "completion": [TALK[1], {"role": "assistant", "content": None}]},
            Needs(),
            {},
            "not one text",
        ),
        ({"prompt": "p", "completion": TALK}, Needs(), {}, "not one text"),
        (
            {"prompt": TALK[:1], "chosen": TALK[2:3], "rejected": TALK[1:2]},
            SCORED,
            {"template": CHATML},
            "without an assistant's answer",
        ),
        (
            {"prompt": "p", "completions": ["a", " "], "labels": [1, 0]},
            STEPS,
            {},
            "an empty step",
        ),
        (
            {"prompt": "p" * 9, "completions": ["a", "b"], "labels": [1, 0]},
            STEPS,
            {"data": {"max_prompt_tokens": 8}},
            "longer than data.max_prompt_tokens",
        ),
        ({"prompt": "p", "chosen": "x", "rejected": "x"}, PAIRS, {}, "answers are the same"),
        ({"prompt": "p", "chosen": "", "rejected": "x"}, PAIRS, {}, "empty answers"),
        (
            {"prompt": "p ", "chosen": "x" * 40 + "1", "rejected": "x" * 40 + "2"},
            PAIRS,
            {"max_length": 30},
            "the same once they are cut",
        ),
    ],
)
def test_rows_that_can_not_be_trained_on_are_counted(
    loaded: Any, row: dict[str, Any], needs: Needs, options: dict[str, Any], reason: str
) -> None:
    good: dict[str, Any] = {"messages": TALK[:2]} if "messages" in row else GOOD
    if not isinstance(row.get("completion", ""), (str, type(None))):
        good = {**GOOD, "completion": TALK[1:2]}
    if "completions" in row:
        good = {**GOOD, "completions": ["a"], "labels": [1]}
    if isinstance(row.get("prompt"), list):
        good = {"prompt": TALK[:1], "chosen": TALK[1:2], "rejected": TALK[3:]}
    source = loaded([row, {**dict.fromkeys(row), **good}, row], needs, **options)
    assert source.rows.number.tolist() == [1]
    ((found, count),) = source.dropped.items()
    assert (reason in found, count) == (True, 2)
    assert f"2 of 3 rows left out: {found}" in source.complaints()[0]
    assert source.describe()["dropped"] == {found: 2}


def test_data_of_which_nothing_is_left_is_an_error_that_says_why(loaded: Any) -> None:
    with pytest.raises(UsageError, match=r"none of the 2 rows .* 2 empty answers"):
        loaded([{"prompt": "p", "completion": ""}] * 2)


def test_long_prompt_can_be_an_error(loaded: Any) -> None:
    rows = [GOOD, {"prompt": "p" * 40, "completion": "x"}]
    with pytest.raises(UsageError, match="row 1 is one of prompts that leave no room"):
        loaded(rows, max_length=30, data={"too_long": "error"})


def test_long_answer_is_cut_and_counted(loaded: Any) -> None:
    source = loaded([{"prompt": "p ", "completion": "x" * 40}], max_length=10)
    assert (source.rows.lengths.tolist(), source.cut) == ([10], 1)
    assert "1 sequences cut" in source.complaints()[0]


@pytest.mark.parametrize(
    ("rows", "needs", "words"),
    [
        ([{"prompt": "p", "answer": "x"}], Needs(), "no column 'completion'"),
        ([{"prompt": "p", "choosen": "x", "rejected": "y"}], PAIRS, "no column 'chosen'"),
        (
            [{"prompt": "p", "completion": "x", "label": "good"}],
            Needs(data="unpaired", per="sequence"),
            "not true or false",
        ),
        (
            [{"prompt": "p", "completions": ["a"], "labels": [1, 0]}],
            Needs(data="steps", head="token"),
            "as many labels as there are steps",
        ),
        ([{"prompt": "p", "completion": 3}], Needs(), "not text or messages"),
    ],
)
def test_wrong_columns_are_errors_that_name_them(
    loaded: Any, rows: list[dict[str, Any]], needs: Needs, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        loaded(rows, needs)
