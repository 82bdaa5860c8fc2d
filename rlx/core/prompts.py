"""A row's prompt as the engine sees it: system prompt, template, chat template, token ids."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, meta
from jinja2.ext import Extension

from rlx.core.config import DataConfig
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.rollouts import Message

_TEMPLATE_ARGUMENTS = {"messages", "conversation", "tokenize", "add_generation_prompt", "tools"}


def as_messages(value: Any) -> list[dict[str, Any]] | None:
    """Chat messages without the None entries that tables fill in; None for anything else."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        return None
    if not all(
        isinstance(item, Mapping) and "role" in item and "content" in item for item in value
    ):
        return None
    return [
        {key: part for key, part in item.items() if part is not None or key == "content"}
        for item in value
    ]


def with_template_variables(tokenizer: Any, variables: Mapping[str, Any]) -> Any:
    """The tokenizer with `data.chat_template_kwargs` in force wherever its template is applied.

    Raises UsageError for a variable that the template does not have, or that rlx sets itself.
    """
    if not variables:
        return tokenizer
    where = "data.chat_template_kwargs"
    if taken := sorted(_TEMPLATE_ARGUMENTS & set(variables)):
        raise UsageError(f"{taken[0]} is not yours to set", where=f"{where}.{taken[0]}")
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise UsageError("the tokenizer has no chat template", where=where, fix="leave it out")
    if isinstance(template, str):
        known = meta.find_undeclared_variables(_template_environment().parse(template))
        for name in variables:
            if name not in known:
                own = sorted(known - _TEMPLATE_ARGUMENTS)
                raise UsageError(
                    f"the chat template has no variable {name!r}",
                    where=f"{where}.{name}",
                    fix=did_you_mean(name, own) or f"it has: {', '.join(own) or 'none'}",
                )
    changed = copy.copy(tokenizer)
    changed.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **variables)
    return changed


_TOOLS_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""What Qwen's and Hermes' own templates say."""


def with_tools(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """The tokenizer with an agent's tools in force wherever its chat template is applied.

    A template that takes `tools` is given them; with any other, a system message describes them.
    Without a chat template nothing changes: the task's own prompt has to say what there is.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not tools or not template:
        return tokenizer
    apply = tokenizer.apply_chat_template
    changed = copy.copy(tokenizer)
    if "tools" in _variables(template):
        changed.apply_chat_template = functools.partial(apply, tools=[*tools])
        return changed
    text = _TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool) for tool in tools))

    def described(messages: Sequence[Message], *args: Any, **options: Any) -> Any:
        first, rest = messages[0], messages[1:]
        if first["role"] in ("system", "developer"):
            first = {**first, "content": f"{first['content']}\n\n{text}"}
            return apply([first, *rest], *args, **options)
        return apply([{"role": "system", "content": text}, *messages], *args, **options)

    changed.apply_chat_template = described
    return changed


def _variables(template: str | Mapping[str, str]) -> set[str]:
    """What a chat template, or any of several, asks for."""
    texts = [template] if isinstance(template, str) else template.values()
    environment = _template_environment()
    return set().union(*(meta.find_undeclared_variables(environment.parse(text)) for text in texts))


def _template_environment() -> Environment:
    """As transformers sets it up, so that every template parses."""
    return Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do", _Generation])


class _Generation(Extension):
    """`{% generation %}` marks what assistants wrote; here it is looked through."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Prompts:
    """Builds prompts and encodes them.

    A built prompt is a list of messages exactly when the chat template is applied to it, so whoever
    holds a task knows how its tokens came about.
    """

    def __init__(self, tokenizer: Any, config: DataConfig, example: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._system = config.system_prompt
        self._template = config.template
        has_template = bool(getattr(tokenizer, "chat_template", None))
        self._chat = has_template if config.chat_template == "auto" else config.chat_template
        if self._chat and not has_template:
            raise UsageError(
                "the tokenizer has no chat template",
                where="data.chat_template: true",
                fix="data.chat_template=false, or data.template='Question: {prompt}\\nAnswer:'",
            )
        if self._template is not None:
            _check_template(self._template, example)

    def build(self, value: Any, row: Mapping[str, Any], number: int) -> str | list[Message]:
        """The prompt of row `number`; raises UsageError when it is neither text nor messages."""
        if isinstance(value, str):
            text = self._fill(value, row, number)
            if not self._chat:
                return f"{self._system}\n\n{text}" if self._system else text
            messages = [{"role": "user", "content": text}]
        else:
            found = as_messages(value)
            if found is None:
                raise UsageError(
                    f"the prompt of row {number} is {type(value).__name__}, "
                    "neither text nor messages (rows count from 0)",
                    where="data.prompt",
                )
            if not self._chat:
                raise UsageError(
                    "the prompts are chat messages, and no chat template is applied",
                    where="data.chat_template",
                    fix="a model whose tokenizer has a chat template, or a column with text",
                )
            messages = self._fill_last_user(found, row, number)
        if self._system and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self._system}, *messages]
        return [*messages]

    def encode(self, prompts: Sequence[str | Sequence[Message]], first: int) -> list[list[int]]:
        """Token ids of each prompt; `first` is the row number of the first, for errors."""
        return self.encode_texts(
            [self.text(prompt, first + offset) for offset, prompt in enumerate(prompts)]
        )

    def text(self, prompt: str | Sequence[Message], number: int) -> str:
        """The prompt of row `number` as text, chat template applied."""
        return prompt if isinstance(prompt, str) else self._render(prompt, number)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        if not texts:
            return []
        # a chat template writes the special tokens itself; `verbose` would warn of long prompts,
        # which the caller counts
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=not self._chat,
            return_attention_mask=False,
            verbose=False,
        )
        return [list(tokens) for tokens in encoded["input_ids"]]

    def _render(self, messages: Sequence[Message], number: int) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:
            raise UsageError(
                f"the chat template refuses the prompt of row {number}: {error}",
                where="data.prompt",
                fix="roles and order that the tokenizer's chat template knows",
            ) from error

    def _fill(self, text: str, row: Mapping[str, Any], number: int) -> str:
        if self._template is None:
            return text
        try:
            return self._template.format_map({**row, "prompt": text})
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(
                f"data.template can't be filled with row {number}: "
                f"{type(error).__name__}: {error} (rows count from 0)",
                where="data.template",
                fix="columns that every row has, with values that the format fits",
            ) from error

    def _fill_last_user(
        self, messages: list[dict[str, Any]], row: Mapping[str, Any], number: int
    ) -> list[dict[str, Any]]:
        """The template goes around the last user message."""
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if self._template is None or not users:
            return messages
        last = messages[users[-1]]
        if isinstance(last["content"], str):
            messages[users[-1]] = {**last, "content": self._fill(last["content"], row, number)}
        return messages


def _check_template(template: str, example: Mapping[str, Any]) -> None:
    """Fill the template once with the first row's columns."""
    fix = "{prompt} or {COLUMN}; other braces are written {{ and }}"
    known = {**example, "prompt": "\0"}
    try:
        filled = template.format_map(known)
    except KeyError as error:
        name = str(error.args[0])
        raise UsageError(
            f"data.template names {name!r}, which is no column",
            where="data.template",
            fix=did_you_mean(name, known) or fix,
        ) from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise UsageError(
            f"data.template is no format string: {error}", where="data.template", fix=fix
        ) from None
    if "\0" not in filled:
        raise UsageError(
            "data.template has no {prompt}: every prompt would be the same",
            where="data.template",
            fix="for example 'Question: {prompt}\\nAnswer:'",
        )
