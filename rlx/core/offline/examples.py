"""One row of data as the drafts of its sequences, by the kind of data that the objective reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlx.core.config import DataConfig, OfflineConfig
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.offline.drafts import Draft, Drafter, Segment, as_answer
from rlx.core.offline.needs import Needs
from rlx.core.prompts import Prompts, as_messages
from rlx.core.rollouts import Message

Answer: TypeAlias = "str | Sequence[Message]"

EMPTY = "empty answers"
NO_ANSWER = "conversations without an assistant's answer"
REWRITTEN = "conversations whose chat template rewrites what came before the answer"
SAME = "pairs whose answers are the same"
NO_STEPS = "answers without steps"
EMPTY_STEP = "answers with an empty step"
SEVERAL = "answers that are not one text, after a prompt without a chat template"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What a row asks for."""

    drafts: Sequence[Draft]
    """One, or those of the chosen and the rejected answer."""
    margin: float = 0.0
    desirable: bool = False
    labels: Sequence[float] = ()
    """Of the steps, one for each trained segment."""
    rewritten: int = 0
    empty: int = 0
    """Answers of a conversation in which nothing is said; they are not trained."""


class Examples:
    """Makes examples of the rows of one data set.

    `make` returns the reason for which a row is left out in place of an example.
    """

    def __init__(
        self,
        needs: Needs,
        offline: OfflineConfig,
        data: DataConfig,
        *,
        tokenizer: Any,
        columns: Sequence[str],
        example: Mapping[str, Any],
    ) -> None:
        self._needs = needs
        self._offline = offline
        self._data = data
        self._columns = set(columns)
        self._drafter = Drafter(tokenizer)
        self._prompts = Prompts(tokenizer, data, example)
        self._make = {
            "conversations": self._conversation,
            "pairs": self._pair,
            "unpaired": self._judged,
            "steps": self._steps,
        }[needs.data]
        self._check_columns(columns)

    def make(self, row: Mapping[str, Any], number: int) -> Example | str:
        """The example of a row, or why there is none.

        Raises:
            UsageError: a value of the wrong type.
        """
        return self._make(row, number)

    def _conversation(self, row: Mapping[str, Any], number: int) -> Example | str:
        offline = self._offline
        if offline.messages in self._columns and row.get(offline.messages):
            if as_messages(row[offline.messages]) is None:
                what = "a list of messages, each with role and content"
                raise _wrong(offline.messages, number, what, "offline.messages")
            messages = self._prompts.build(row[offline.messages], row, number)
            assert not isinstance(messages, str)
            return self._talk(messages, 0)
        if offline.train_on == "all" and offline.completion not in self._columns:
            text = row.get(self._data.prompt)
            if not isinstance(text, str) or not text.strip():
                return EMPTY
            return Example(drafts=[self._drafter.everything(text)])
        answer = self._answer(row, offline.completion, number)
        if answer is None:
            return EMPTY
        return self._one(self._prompt(row, number), answer)

    def _pair(self, row: Mapping[str, Any], number: int) -> Example | str:
        offline = self._offline
        chosen = self._answer(row, offline.chosen, number)
        rejected = self._answer(row, offline.rejected, number)
        if chosen is None or rejected is None:
            return EMPTY
        if chosen == rejected:
            return SAME
        if self._data.prompt in self._columns:
            prompt = self._prompt(row, number)
            chosen, rejected = (_without(prompt, answer) for answer in (chosen, rejected))
        else:
            prompt, chosen, rejected = self._common(chosen, rejected, number)
        if not _has_text(chosen) or not _has_text(rejected):
            return EMPTY
        better, worse = self._one(prompt, chosen), self._one(prompt, rejected)
        if isinstance(better, str) or isinstance(worse, str):
            return better if isinstance(better, str) else str(worse)
        return Example(
            drafts=[*better.drafts, *worse.drafts],
            margin=_number(row, offline.margin, number) if offline.margin else 0.0,
            rewritten=better.rewritten + worse.rewritten,
            empty=better.empty + worse.empty,
        )

    def _judged(self, row: Mapping[str, Any], number: int) -> Example | str:
        answer = self._answer(row, self._offline.completion, number)
        if answer is None:
            return EMPTY
        label = row.get(self._data.label or "label")
        if not isinstance(label, bool) and label not in (0, 1):
            raise _wrong(self._data.label or "label", number, "true or false", "data.label")
        one = self._one(self._prompt(row, number), answer)
        return one if isinstance(one, str) else dataclasses.replace(one, desirable=bool(label))

    def _steps(self, row: Mapping[str, Any], number: int) -> Example | str:
        offline = self._offline
        texts, labels = row.get(offline.step_texts), row.get(offline.step_labels)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise _wrong(offline.step_texts, number, "a list of texts", "offline.step_texts")
        if not isinstance(labels, list) or len(labels) != len(texts):
            what = "as many labels as there are steps"
            raise _wrong(offline.step_labels, number, what, "offline.step_labels")
        if not texts:
            return NO_STEPS
        if not all(text.strip() for text in texts):
            return EMPTY_STEP
        if any(
            not isinstance(label, (bool, int, float)) or not 0 <= label <= 1 for label in labels
        ):
            raise _wrong(offline.step_labels, number, "labels from 0 to 1", "offline.step_labels")
        prompt = self._prompt(row, number)
        plain = isinstance(prompt, str)
        start = prompt if isinstance(prompt, str) else self._drafter.render(prompt, generation=True)
        segments = [Segment(text=start)]
        for turn, text in enumerate(texts):
            segments.append(Segment(text=text + offline.separator, turn=turn))
        return Example(
            drafts=[Draft(segments=segments, plain=plain, closed=False)],
            labels=[float(one) for one in labels],
        )

    @property
    def _trains_all(self) -> bool:
        """Answers that are compared or judged are trained without their prompts in any case."""
        return self._offline.train_on == "all" and self._needs.data == "conversations"

    def _prompt(self, row: Mapping[str, Any], number: int) -> str | list[Message]:
        return self._prompts.build(row.get(self._data.prompt), row, number)

    def _answer(self, row: Mapping[str, Any], column: str, number: int) -> Answer | None:
        """The answer in a column; None where there is nothing in it."""
        value = row.get(column)
        if value is None or value == [] or (isinstance(value, str) and not value.strip()):
            return None
        if isinstance(value, str):
            return value
        found = as_messages(value)
        if found is None:
            raise _wrong(column, number, "text or messages", f"column {column}")
        return found

    def _one(self, prompt: str | list[Message], answer: Answer) -> Example | str:
        """The single sequence of a prompt and its answer."""
        if not isinstance(answer, str):
            said = [one for one in answer if one["role"] == "assistant"]
            if reason := _unsaid(said):
                return reason
            if isinstance(prompt, str):
                text = answer[-1]["content"]
                if len(said) > 1 or answer[-1] is not said[0] or not isinstance(text, str):
                    return SEVERAL
                answer = text
        if self._needs.head == "score":
            return Example(drafts=[self._drafter.whole(prompt, answer)])
        if isinstance(prompt, str):
            assert isinstance(answer, str)
            if self._trains_all:
                return Example(drafts=[self._drafter.everything(prompt + answer)])
            return Example(drafts=[self._drafter.answer(prompt, answer)])
        return self._talk([*prompt, *as_answer(answer)], len(prompt))

    def _talk(self, messages: list[Message], first: int) -> Example | str:
        if self._trains_all or self._needs.head == "score":
            return Example(drafts=[self._drafter.whole(messages, [])])
        places = range(first, len(messages))
        answers = [place for place in places if messages[place]["role"] == "assistant"]
        if self._offline.train_on == "last":
            answers = answers[-1:]
        if reason := _unsaid([messages[place] for place in answers]):
            return reason
        said = [place for place in answers if _has_text([messages[place]])]
        draft = self._drafter.conversation(messages, said)
        if draft.marked is None and not draft.segments:
            return REWRITTEN
        empty = len(answers) - len(said)
        return Example(drafts=[draft], rewritten=draft.rewritten, empty=empty)

    def _common(
        self, chosen: Answer, rejected: Answer, number: int
    ) -> tuple[str | list[Message], Answer, Answer]:
        """Split two whole conversations into the prompt that they share, and the answers."""
        if isinstance(chosen, str) and isinstance(rejected, str):
            end = _shared(chosen, rejected)
            return chosen[:end], chosen[end:], rejected[end:]
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise _wrong(
                self._offline.rejected, number, "of the same type as the chosen one", "data"
            )
        same = 0
        while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
            same += 1
        prompt = self._prompts.build(chosen[:same], {}, number) if same else []
        assert not isinstance(prompt, str)
        return prompt, chosen[same:], rejected[same:]

    def _check_columns(self, columns: Sequence[str]) -> None:
        offline, prompt = self._offline, self._data.prompt
        wanted = {
            "conversations": {prompt: "data.prompt", offline.completion: "offline.completion"},
            "pairs": {offline.chosen: "offline.chosen", offline.rejected: "offline.rejected"},
            "unpaired": {
                prompt: "data.prompt",
                offline.completion: "offline.completion",
                self._data.label or "label": "data.label",
            },
            "steps": {
                prompt: "data.prompt",
                offline.step_texts: "offline.step_texts",
                offline.step_labels: "offline.step_labels",
            },
        }[self._needs.data]
        if self._needs.data == "conversations":
            if offline.messages in self._columns:
                return
            if offline.train_on == "all" and prompt in self._columns:
                return
        if offline.margin:
            wanted[offline.margin] = "offline.margin"
        for column, setting in wanted.items():
            if column not in self._columns:
                near = did_you_mean(column, columns)
                listing = f"--set {setting}=COLUMN, one of: {', '.join(columns)}"
                raise UsageError(
                    f"the data has no column {column!r}",
                    where=setting,
                    fix=f"{near} {listing}".strip(),
                )


def _shared(first: str, second: str) -> int:
    """Characters that two texts begin with, up to a word's beginning (its space is the word's):
    cut elsewhere, tokens would be others than where the text is read in one piece."""
    pairs = enumerate(zip(first, second, strict=False))
    end = next((place for place, (one, two) in pairs if one != two), min(len(first), len(second)))
    return max(first.rfind(" ", 0, end), first.rfind("\n", 0, end) + 1, 0)


def _without(prompt: str | list[Message], answer: Answer) -> Answer:
    """The answer without the prompt, where whole conversations stand beside a prompt column."""
    if isinstance(answer, str) or isinstance(prompt, str):
        return answer
    # `data.system_prompt` may stand before a prompt that the data has without it
    own = prompt[1:] if prompt[0]["role"] in ("system", "developer") else prompt
    for start in (prompt, own):
        if start and list(answer[: len(start)]) == list(start):
            return answer[len(start) :]
    return answer


def _unsaid(answers: Sequence[Message]) -> str | None:
    """Why there is nothing to learn from an assistant's messages, if so."""
    if not answers:
        return NO_ANSWER
    return None if _has_text(answers) else EMPTY


def _has_text(answer: Answer) -> bool:
    if isinstance(answer, str):
        return bool(answer.strip())
    return any(one.get("tool_calls") or str(one.get("content") or "").strip() for one in answer)


def _number(row: Mapping[str, Any], column: str, number: int) -> float:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise _wrong(column, number, "a number", "offline.margin")
    return float(value)


def _wrong(column: str, number: int, wanted: str, where: str) -> UsageError:
    return UsageError(
        f"column {column!r} of row {number} is not {wanted} (rows count from 0)",
        where=where,
        fix=f"{wanted} in every row, or another column",
    )
