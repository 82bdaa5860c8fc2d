"""Configuration of what goes in and what is looked at: data sets, evaluation, generation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from rlx.core.config_base import Part, as_list


class SourceConfig(Part):
    """One of several data sets. What it leaves out, it takes from the `data` section."""

    path: str
    name: str | None = None
    """In task ids and metrics; unset: the path's short name."""
    probability: float | None = Field(None, gt=0, le=1)
    """Share of the tasks that come from here; unset for all: every row once an epoch."""
    split: str = "train"
    params: dict[str, Any] = {}
    prompt: str = "prompt"
    label: str | None = None
    system_prompt: str | None = None
    template: str | None = None
    chat_template: bool | Literal["auto"] = "auto"
    max_samples: int | None = Field(None, ge=1)

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A value that is written out would no longer be taken from the `data` section."""
        return {key: item for key, item in write(self).items() if key in self.model_fields_set}


def _as_sources(value: Any) -> Any:
    return [{"path": item} if isinstance(item, str) else item for item in as_list(value)]


Sources = Annotated[list[SourceConfig], BeforeValidator(_as_sources)]


class DataConfig(Part):
    """Where tasks come from and how a row becomes a prompt."""

    path: str = "embedded"
    """File (json, jsonl, csv, parquet; also .gz and .zst), `*` pattern, folder of a saved dataset,
    hub name, `file.py:load` or `pkg.mod:load`; `embedded` is the task that ships with rlx."""
    sources: Sources = []
    """Several data sets in place of `path`."""
    split: str = "train"
    params: dict[str, Any] = {}
    """Keyword arguments of a loader function (`pkg.mod:load`)."""
    prompt: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    label: str | None = "label"
    """Column with the label that rewards compare with; null when rewards need none."""
    system_prompt: str | None = None
    template: str | None = None
    """Python format string around the prompt, for example `Question: {prompt}\\nAnswer:`."""
    chat_template: bool | Literal["auto"] = "auto"
    """Apply the tokenizer's chat template; `auto`: when it has one."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, for example `{enable_thinking: false}`."""
    max_samples: int | None = Field(None, ge=1)
    """Rows taken from the start of each data set."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt; unset: what the model's context leaves beside `rollout.max_new_tokens`."""
    too_long: Literal["skip", "error"] = "skip"
    """What happens to longer prompts; skipped ones are counted and reported."""
    shuffle: bool = True

    def of(self, source: SourceConfig) -> DataConfig:
        """The settings of one source: its own, and these for what it leaves out."""
        own = {name: getattr(source, name) for name in source.model_fields_set}
        own = {name: value for name, value in own.items() if name in type(self).model_fields}
        return self.model_copy(update={"sources": [], **own})


class EvalConfig(Part):
    """Evaluation on held-out tasks, during training and with `rlx eval`."""

    sources: Sources = []
    """Data sets; what they leave out (columns, template, …), they take from the `data` section."""
    every: int = Field(0, ge=0)
    """Training steps between evaluations; 0: only after the last step."""
    before_training: bool = False
    """Evaluate the starting weights too, as step 0."""
    samples: int = Field(1, ge=1)
    """n, rollouts per task; pass@k is reported for k = 1, 2, 4, … ≤ n."""
    temperature: float | None = Field(None, ge=0)
    """0 is greedy; unset: greedy for one sample, else `rollout.temperature`."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Unset: `rollout.max_new_tokens`."""
    max_tasks: int | None = Field(None, ge=1)
    """Most tasks of each source, taken from its start."""
    part: str | None = None
    """Reward whose score counts; unset: the first one. `total`: the whole reward."""
    threshold: float = 1.0
    """A rollout passes when that score is at least this."""

    def sampling_temperature(self, training: float) -> float:
        """`training` is `rollout.temperature`."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.samples == 1 else training


class GenerateConfig(Part):
    """Batch inference with `rlx generate`: samples of every task of `data`, and rows from them."""

    samples: int = Field(4, ge=1)
    """n, rollouts per task."""
    temperature: float | None = Field(None, ge=0)
    """0 is greedy; unset: `rollout.temperature`."""
    select: Annotated[
        list[Literal["all", "best", "pairs", "conditioned"]], BeforeValidator(as_list)
    ] = ["all"]
    """Files that are written: `all` samples; the `best` ones of each task, to fine-tune on; `pairs`
    of its best and its worst, for preferences; all with the reward in the prompt, `conditioned`."""
    keep: int = Field(1, ge=1)
    """`best`: most rows of a task, the highest rewards first."""
    min_reward: float | None = None
    """`best`: least reward of a row. Unset: any, but a task whose rewards are all equal is left
    out, because its best is no better than its worst."""
    min_margin: float = Field(0.0, ge=0)
    """`pairs`: least difference of the rewards; equal ones never make a pair."""
    condition: str = "{prompt}\nReward: {reward:.1f}"
    """`conditioned`: format string that takes the (last user) prompt's place."""
    truncated: Literal["drop", "keep"] = "drop"
    """Samples that ran out of tokens: `drop` leaves them out of all files but `all`, because
    training on them would teach to stop in mid-sentence."""
    parquet: bool = False
    """Write Parquet in place of JSON lines."""


class OfflineConfig(Part):
    """Training an objective on fixed data.

    Model, data, evaluation, learner and reference (`kl.reference`) have sections of their own. For
    answers without pairs, `data.label` is the column that says which are desirable.
    """

    epochs: float = Field(1.0, gt=0)
    """Passes over the data; with probabilities of sources, draws of as many rows."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps; unset: as many as the epochs take."""
    batch_size: int = Field(32, ge=1)
    """Rows (a pair is one) of an optimizer step, over all ranks."""
    max_length: int | None = Field(None, ge=8)
    """Most tokens of a sequence; unset: the model's context. Longer ones lose their end, and where
    a whole sequence gets one score, their start."""
    train_on: Literal["answers", "last", "all"] = "answers"
    """Tokens that conversations train: all `answers` of assistants, the `last` one, or `all` tokens
    (going on with pre-training)."""
    messages: str = "messages"
    """Column with a whole conversation, in place of prompt and completion."""
    completion: str = "completion"
    """Column with the answer to the prompt (`data.prompt`): text, or messages."""
    chosen: str = "chosen"
    """Column with the better answer of a pair. Without a prompt column, both answers begin with the
    prompt, which is what they have in common."""
    rejected: str = "rejected"
    margin: str | None = None
    """Column with the number by which the chosen answer is better."""
    step_texts: str = "completions"
    """Column with the list of an answer's steps."""
    step_labels: str = "labels"
    """Column with the judgement of each step: true or false, or a share."""
    separator: str = "\n"
    """Text after each step; its last token is the one at which the step is judged."""
    teacher: str | None = None
    """Model folder or hub name whose distributions an objective may require; it has the trained
    model's vocabulary."""
    teacher_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights of the teacher; `auto`: as they are stored."""
    reference_cache: Path | None = None
    """Folder in which log-probs of the reference model are kept for other runs; unset: the run's
    own `reference/`."""
