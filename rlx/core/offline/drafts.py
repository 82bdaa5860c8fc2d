"""From texts and chat messages to drafts: texts in order, some of which are to be trained.

A conversation is written by the tokenizer's chat template. Which of it assistants wrote, the
template says where it has `{% generation %}` marks. Else it is found by prefix difference:

    answer i = whole[len(render(messages[:i], an answer is wanted)) : len(render(messages[:i + 1]))]

which needs both renderings to be prefixes of the whole; an answer for which they are not (the
template rewrites history) can't be trained, and is counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlx.core.errors import UsageError
from rlx.core.rollouts import Message

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A text that is tokenised by itself."""

    text: str
    turn: int | None = None
    """Index of the answer that this is; None: not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One sequence, before it is tokens."""

    segments: Sequence[Segment]
    plain: bool
    """No template was applied: the tokenizer adds its special tokens in front."""
    closed: bool = True
    """The end token closes a plain sequence."""
    rewritten: int = 0
    """Answers that can't be trained, because the template changed what came before them."""
    marked: tuple[Sequence[int], Sequence[int]] | None = None
    """Tokens and mask of a template with marks, in place of `segments`."""


class Drafter:
    """Writes drafts with one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None)
        self._marks = isinstance(template, str) and bool(_MARK.search(template))

    def answer(self, prompt: str, text: str) -> Draft:
        """A plain prompt and its answer."""
        return Draft(segments=(Segment(text=prompt), Segment(text=text, turn=0)), plain=True)

    def everything(self, text: str) -> Draft:
        """A plain text of which all is trained."""
        return Draft(segments=(Segment(text=text, turn=0),), plain=True)

    def whole(self, prompt: str | Sequence[Message], answer: Sequence[Message] | str) -> Draft:
        """A conversation as one text, which gets one score: as scorers of rollouts write it."""
        if isinstance(prompt, str):
            assert isinstance(answer, str)
            return self.everything(prompt + answer)
        text = self.render([*prompt, *as_answer(answer)])
        return Draft(segments=(Segment(text=text, turn=0),), plain=False)

    def conversation(self, messages: Sequence[Message], answers: Sequence[int]) -> Draft:
        """A conversation of which some of the assistants' messages, by index, are trained."""
        if self._marks:
            return self._by_marks(messages, answers)
        return self._by_prefixes(messages, answers)

    def _by_marks(self, messages: Sequence[Message], answers: Sequence[int]) -> Draft:
        found = self._apply(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, mask = list(found["input_ids"]), list(found["assistant_masks"])
        turns = []
        turn = -1
        for place, inside in enumerate(mask):
            turn += bool(inside and not (place and mask[place - 1]))
            turns.append(turn if inside else -1)
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        # a template may leave marks out where nothing is said
        marked = next((some for some in (assistants, answers) if len(some) == turn + 1), None)
        if marked is None:  # which marks belong to which message, nobody knows
            return Draft(segments=(), plain=False, rewritten=len(answers))
        wanted = {list(marked).index(i): turn for turn, i in enumerate(answers)}
        return Draft(
            segments=(),
            plain=False,
            marked=(tokens, [wanted.get(turn, -1) for turn in turns]),
        )

    def _by_prefixes(self, messages: Sequence[Message], answers: Sequence[int]) -> Draft:
        whole = self.render(messages)
        segments: list[Segment] = []
        written = rewritten = 0
        for turn, index in enumerate(answers):
            before = self.render(messages[:index], generation=True)
            after = self.render(messages[: index + 1])
            fits = whole.startswith(after) and after.startswith(before) and len(before) >= written
            if not fits:
                rewritten += 1
                continue
            segments += [
                Segment(text=whole[written : len(before)]),
                Segment(text=whole[len(before) : len(after)], turn=turn),
            ]
            written = len(after)
        return Draft(segments=segments, plain=False, rewritten=rewritten)

    def render(self, messages: Sequence[Message], *, generation: bool = False) -> str:
        """Messages as the chat template writes them; raises UsageError when it refuses."""
        if not messages:
            return ""
        return str(self._apply(messages, tokenize=False, add_generation_prompt=generation))

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], **options
            )
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UsageError(
                f"the chat template refuses a conversation (roles: {roles}): {error}",
                where="data",
                fix="roles and order that the tokenizer's chat template knows",
            ) from error


def as_answer(value: Sequence[Message] | str) -> Sequence[Message]:
    """An answer as messages: a text is one of the assistant's."""
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One sequence as tokens."""

    tokens: list[int]
    positions: list[int]
    """Of the trained tokens, each ≥ 1."""
    turns: list[int]
    """Index of the answer that each trained token belongs to."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return self.positions[0] if self.positions else len(self.tokens)


def encode(drafts: Sequence[Draft], tokenizer: Any) -> list[Encoded]:
    """Tokenise drafts, all of their texts in two calls of the tokenizer."""
    plain = [draft.segments[0].text for draft in drafts if draft.plain]
    rest = [
        segment.text for draft in drafts for segment in draft.segments[1 if draft.plain else 0 :]
    ]
    starts = iter(_tokens(tokenizer, plain, special=True))
    texts = iter(_tokens(tokenizer, rest, special=False))
    ends = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    return [_assembled(draft, starts, texts, tokenizer.eos_token_id, ends) for draft in drafts]


def _assembled(draft: Draft, starts: Any, texts: Any, eos: int | None, ends: set[int]) -> Encoded:
    if draft.marked is not None:
        tokens, turns = list(draft.marked[0]), list(draft.marked[1])
    else:
        tokens, turns = [], []
        for place, segment in enumerate(draft.segments):
            piece = next(starts) if draft.plain and place == 0 else next(texts)
            tokens += piece
            turn = -1 if segment.turn is None else segment.turn
            # What a template writes after the end of a turn, the model is never asked to write.
            kept = len(piece) if draft.plain else _until_end(piece, ends)
            turns += [turn] * kept + [-1] * (len(piece) - kept)
        if draft.plain and draft.closed and eos is not None and tokens[-1:] != [eos]:
            tokens.append(eos)
            turns.append(turns[-1] if turns else -1)
    positions = [place for place, turn in enumerate(turns) if turn >= 0 and place > 0]
    return Encoded(tokens=tokens, positions=positions, turns=[turns[place] for place in positions])


def _until_end(piece: Sequence[int], ends: set[int]) -> int:
    """Tokens up to the last special one, which it includes; all where there is none."""
    special = [place for place, token in enumerate(piece) if token in ends]
    return special[-1] + 1 if special else len(piece)


def _tokens(tokenizer: Any, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    if not texts:
        return []
    encoded = tokenizer(
        list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False
    )
    return [list(tokens) for tokens in encoded["input_ids"]]
