"""What is settled before the first worker starts: `prepare(config)` checks it all.

Names, parameters, files, sizes and the data; a mistake ends here, and nothing has been started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.core.component import tags_of
from rlx.core.config import DataConfig, RunConfig
from rlx.core.engine.checkpoints import resumable_checkpoint
from rlx.core.engine.evaluation import EvaluationPlan, plan_evaluation
from rlx.core.engine.replay import check_recording
from rlx.core.errors import UsageError
from rlx.core.models import ModelInfo, policy_info, resolve_model
from rlx.core.plugins import PluginSystem
from rlx.core.preflight import check
from rlx.core.prompts import with_template_variables, with_tools
from rlx.core.references import ComponentRef
from rlx.core.run import default_folder
from rlx.core.selection import Selection, select
from rlx.core.tasks import TaskSet, load_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is known before the first worker starts."""

    config: RunConfig
    selection: Selection
    plugins: PluginSystem
    model: str
    info: ModelInfo
    tokenizer: Any
    tasks: TaskSet
    evaluation: EvaluationPlan | None
    context_length: int
    sequence_tokens: int | None
    """Most tokens of a rollout, for agents that make one call; None where that is not known."""
    dtype: str
    resume: bool
    checkpoint: Path | None
    """Where a resumed run goes on; None: from the beginning."""
    origins: Mapping[str, str] = field(default_factory=dict)


def prepare(
    config: RunConfig,
    *,
    plugins: PluginSystem | None = None,
    resume: bool = False,
    origins: Mapping[str, str] | None = None,
) -> Plan:
    """Check names, parameters, files, sizes and the data; start nothing."""
    if config.output is None:
        config = config.model_copy(update={"output": default_folder(config, Path("runs"))})
    assert config.output is not None
    plugins = plugins or PluginSystem.load(
        disable=config.plugins.disable, required=config.plugins.required
    )
    selection = select(config, plugins, origins=origins)
    model = resolve_model(config.model)
    info = policy_info(model)
    check(config, selection, info, resume=resume, origins=origins)
    plugins.control("rlx_configure", config=config)
    context_length = min(info.context_length, config.rollout.context_length or info.context_length)
    tokenizer = load_tokenizer(model, config.data, selection.agent)
    longest = context_length - config.rollout.max_new_tokens
    if config.replay is not None:  # the tasks are in the recording
        rollout = config.rollout
        check_recording(
            config.replay, tokenizer, groups=rollout.groups, group_size=rollout.group_size
        )
        tasks = TaskSet(tasks=(), sources=(), max_prompt_tokens=longest)
    else:
        tasks = load_tasks(
            config.data,
            tokenizer=tokenizer,
            max_prompt_tokens=min(config.data.max_prompt_tokens or longest, longest),
            needs_label=selection.needs_label,
        )
    evaluation = None
    if config.evaluates:
        evaluation = plan_evaluation(
            config, selection, tokenizer=tokenizer, context_length=context_length
        )
    evaluated_tokens = evaluation.sampling.max_new_tokens if evaluation else 0
    if config.rollout.context_length is None and config.data.max_prompt_tokens is not None:
        most = max(_response_tokens(config, selection, context_length), evaluated_tokens)
        context_length = min(context_length, config.data.max_prompt_tokens + most)
    checkpoint = resumable_checkpoint(config.output / "checkpoints") if resume else None
    if checkpoint is not None:
        _require_critic(checkpoint, selection)
    return Plan(
        config=config,
        selection=selection,
        plugins=plugins,
        model=model,
        info=info,
        tokenizer=tokenizer,
        tasks=tasks,
        evaluation=evaluation,
        context_length=context_length,
        sequence_tokens=_sequence_tokens(config, selection, tasks),
        dtype=info.dtype if config.learner.dtype == "auto" else config.learner.dtype,
        resume=resume,
        checkpoint=checkpoint,
        origins=origins or {},
    )


def _require_critic(checkpoint: Path, selection: Selection) -> None:
    """A run can go on without its critic, but not with one that it never had."""
    if "values" in selection.requires and not (checkpoint / "critic").is_dir():
        names = " and ".join(selection.required_by["values"])
        raise UsageError(
            f"{names} requires a critic, and {checkpoint} was written by a run without one",
            where="--resume",
            fix="go on with the run's own estimator, or start a new run from its model: "
            f"--model {checkpoint / 'model'}",
        )


def _sequence_tokens(config: RunConfig, selection: Selection, tasks: TaskSet) -> int | None:
    if tasks.longest_prompt is None or _agent_turns(selection) != 1:
        return None
    return tasks.longest_prompt + config.rollout.max_new_tokens


def _agent_turns(selection: Selection) -> object:
    """Turns that the agent says it takes at most."""
    return tags_of(selection.agent.load()).extra.get("max_turns")


def _response_tokens(config: RunConfig, selection: Selection, context_length: int) -> int:
    """Most tokens after the prompt; an agent that may take several turns can fill the context."""
    if config.rollout.max_response_tokens is not None:
        return config.rollout.max_response_tokens
    single = 1 in (_agent_turns(selection), config.rollout.max_turns)
    return config.rollout.max_new_tokens if single else context_length


def load_tokenizer(model: str, data: DataConfig, agent: ComponentRef) -> Any:
    """The model's tokenizer, with the chat-template variables of `data` and the agent's tools.

    An agent that has tools says so with a method `chat_tools()`, which returns JSON schemas.
    """
    tokenizer = plain_tokenizer(model, data)
    tools = getattr(agent.resolve().instance, "chat_tools", None)
    return with_tools(tokenizer, tools()) if callable(tools) else tokenizer


def plain_tokenizer(model: str, data: DataConfig, *, where: str = "model") -> Any:
    """The model's tokenizer, with the chat-template variables of `data`.

    Raises UsageError, with the setting `where` that names the model, when there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"the tokenizer of the model {model} can't be loaded: {reason}",
            where=where,
            fix="put tokenizer.json and tokenizer_config.json beside the weights",
        ) from error
    return with_template_variables(tokenizer, data.chat_template_kwargs)
