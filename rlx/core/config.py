"""The configuration of a run: one typed tree for flags, YAML, `--set`, environment and Python.

A part is handed to whoever needs it; nothing below the trainer sees the whole `RunConfig`.
Where each value came from is kept beside it by `rlx.core.settings`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)


class Part(BaseModel):
    """Base of every section: unknown keys are errors, attribute docstrings are the help texts."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


class ComponentConfig(Part):
    """A component by reference, with its parameters.

    Accepts `"zscore"`, `{"name": "zscore", "params": {"eps": 1e-6}}` and the short form
    `{"name": "zscore", "eps": 1e-6}`. In Python also a function or class that its module (a
    notebook's is `__main__`) has under its own name.
    """

    name: str
    """`name`, `dist/name`, `pkg.mod:attr` or `path/to/file.py:attr`."""
    params: dict[str, Any] = {}
    """Keyword-only parameters of the component (`rlx plugins show KIND NAME` lists them)."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if callable(value) and not isinstance(value, BaseModel):
            return {"name": _reference(value)}
        if not isinstance(value, dict):
            return value
        if callable(value.get("name")):
            value = {**value, "name": _reference(value["name"])}
        own = set(cls.model_fields)
        inline = {key: item for key, item in value.items() if key not in own}
        kept = {key: item for key, item in value.items() if key in own}
        return {**kept, "params": {**inline, **kept.get("params", {})}} if inline else kept


class RewardConfig(ComponentConfig):
    """A reward with its weight; on the command line `name` or `name:weight`."""

    weight: float = 1.0

    @model_validator(mode="before")
    @classmethod
    def _weight_suffix(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if isinstance(value, dict) and isinstance(value.get("name"), str) and "weight" not in value:
            name, weight = split_weight(value["name"])
            return {**value, "name": name, "weight": weight}
        return value


def _reference(component: Any) -> str:
    from rlx.core.resolver import object_name, target_of

    target = target_of(component)
    if target is None:
        raise ValueError(
            f"{object_name(component)} is not under its own name in its module; define it with def "
            "or class, outside of functions"
        )
    return target


def split_weight(text: str) -> tuple[str, float]:
    """Split `style:0.5` into name and weight; `pkg.mod:attr` has no weight.

    >>> split_weight("pkg.mod:attr:0.5"), split_weight("pkg.mod:attr")
    (('pkg.mod:attr', 0.5), ('pkg.mod:attr', 1.0))
    """
    head, _, tail = text.rpartition(":")
    try:
        return (head, float(tail)) if head else (text, 1.0)
    except ValueError:
        return text, 1.0


def short_names(names: Sequence[str], *, taken: Collection[str] = ()) -> list[str]:
    """Return a short name for each component, as metrics and settings have it; numbered where one
    comes again or is `taken`.

    >>> short_names(["right", "my.pkg:style", "rewards/file.py:style", "dist/right", "trl.py"])
    ['right', 'style', 'style_2', 'right_2', 'trl']
    """
    used, result = set(taken), []
    for name in names:
        short = name.rpartition(":")[2].rpartition("/")[2].removesuffix(".py") or "component"
        number, unique = 2, short
        while unique in used:
            unique, number = f"{short}_{number}", number + 1
        used.add(unique)
        result.append(unique)
    return result


def _default(setting: str) -> Any:
    """A field with the component, or components, that the built-in plugins name for a setting."""

    def named() -> Any:
        from rlx.plugins.defaults import DEFAULTS

        kind = RewardConfig if setting == "rewards" else ComponentConfig
        components = [kind(name=name) for name in DEFAULTS[setting]]
        return components if setting in ("rewards", "trackers") else components[0]

    return Field(default_factory=named)


def _as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


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
    return [{"path": item} if isinstance(item, str) else item for item in _as_list(value)]


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


class RolloutConfig(Part):
    """How rollouts are made."""

    engine: Literal["vllm", "transformers"] = "vllm"
    groups: int = Field(16, ge=1)
    """P, tasks per training step."""
    group_size: int = Field(8, ge=1)
    """G, rollouts per task."""
    max_new_tokens: int = Field(256, ge=1)
    """Most tokens of one turn."""
    max_turns: int | None = Field(None, ge=1)
    """Most turns of an episode; unset: as many as the agent takes."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Most tokens after the prompt, observations included; unset: what the context leaves."""
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights of the engine; `auto`: the learner's."""
    context_length: int | None = Field(None, ge=8)
    """Unset: the model's own, at most what prompts and `max_new_tokens` need."""
    max_running: int = Field(256, ge=1)
    """Sequences that the engine runs at once."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """KV cache on a CPU host; a GPU uses `gpu_memory_utilization`."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    tensor_parallel: int = Field(1, ge=1)
    enforce_eager: bool = True
    """Start without compiling the model: faster start, somewhat slower generation."""


class GenerateConfig(Part):
    """Batch inference with `rlx generate`: samples of every task of `data`, and rows from them."""

    samples: int = Field(4, ge=1)
    """n, rollouts per task."""
    temperature: float | None = Field(None, ge=0)
    """0 is greedy; unset: `rollout.temperature`."""
    select: Annotated[
        list[Literal["all", "best", "pairs", "conditioned"]], BeforeValidator(_as_list)
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


class LearnerConfig(Part):
    """How the policy is trained."""

    lr: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: float = Field(1.0, gt=0)
    nonfinite: Literal["raise", "skip"] = "raise"
    """What a NaN or an infinity in a loss, gradient or advantage does: end the run with a report
    of where it came from, or leave that optimizer step out and count it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights of the learner (bfloat16 keeps a float32 master copy); `auto`: the checkpoint's."""
    minibatch_size: int | None = Field(None, ge=1)
    """Rollouts per optimizer step; unset: the whole batch, which keeps training on policy."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch."""
    token_budget: int = Field(4096, ge=16)
    """Most tokens in one micro-batch; the gradient does not depend on it."""
    row_tokens: int = Field(512, ge=8)
    """Most tokens in a row of packed sequences, unless one is longer; short ones get short rows."""
    logprob_chunk: int = Field(0, ge=0)
    """Positions per chunk of the vocabulary projection, recomputed backward; 0: in one piece."""
    gradient_checkpointing: bool = False
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed ZeRO stage; unset: 0 for one float32 rank, else 1."""
    ranks: int = Field(1, ge=1)


class CriticConfig(Part):
    """The value model, trained when a component requires values.

    What is not here (schedule, packing, ranks, …) it has in common with the policy's learner.
    """

    model: str | None = None
    """Folder or hub name that it starts from, a reward model's with its head; unset: the policy's
    starting weights with a head of zeros."""
    lr: float = Field(1e-5, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """First training steps, in which only the critic is trained."""
    value_clip: float | None = Field(0.5, gt=0)
    """Most that a value may gain from moving away from what it was before the step; null: any."""
    coefficient: float = Field(0.5, gt=0)
    """Weight of the value loss; Adam hides it, clipping the gradient's norm does not."""
    max_grad_norm: float = Field(1.0, gt=0)
    epochs: int | None = Field(None, ge=1)
    """Passes over each batch; unset: `learner.epochs`."""
    minibatch_size: int | None = Field(None, ge=1)
    """Rollouts per optimizer step; unset: `learner.minibatch_size`."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed ZeRO stage; unset: `learner.zero_stage`."""
    placement: Literal["colocated", "apart"] = "colocated"
    """`colocated`: in the policy's processes, one trains after the other; `apart`: in processes
    (under `inline`, threads) of its own with half of the cores, both train at the same time."""


class KLConfig(Part):
    """Divergence from the reference model (the starting weights)."""

    coef: float = Field(0.0, ge=0)
    """β, where it starts; at 0 no reference model is loaded."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` moves β after each step so that `policy/kl_ref` nears `target`."""
    target: float = Field(0.1, gt=0)
    """Nats per action token, of the adaptive controller."""
    horizon: int = Field(10_000, ge=1)
    """Rollouts over which the adaptive controller may change β by about 20 %."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    placement: Literal["loss", "reward"] = "loss"
    reference: str | None = None
    """Model folder of the reference; unset: the model that the run starts from."""


class AlgorithmConfig(Part):
    """What the core adds to the loss."""

    aggregation: Literal["auto", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "auto"
    )
    """Reduction over tokens, with denominators over the whole optimizer step; `auto`: what the
    loss or the estimator names, else `token-mean`."""
    entropy_coef: float = Field(0.0, ge=0)
    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    """`auto`: an extra forward pass only when the batch is used for more than one update;
    `rollout`: the engine's log-probs stand in."""


class RewardPolicy(Part):
    """How rewards run and what is done with their results."""

    normalize: Literal["none", "running"] = "none"
    """`running`: rollouts' rewards minus the mean, divided by the standard deviation, of all
    rewards of the run so far; reported rewards stay as they are."""
    clip: float | None = Field(10.0, gt=0)
    """Bound on the absolute value of the composed (and normalised) reward; null: none."""
    timeout: float = Field(60.0, gt=0)
    """Seconds for one call of one reward."""
    retries: int = Field(0, ge=0)
    """Further attempts after a call raised; one that timed out is not called again."""
    retry_backoff: float = Field(0.5, ge=0)
    """Seconds before the first further attempt; doubles with each."""
    workers: int = Field(1, ge=1)
    """Processes (Ray) that run rewards; each runs `concurrency` at once."""
    concurrency: int = Field(8, ge=1)
    failure: Literal["raise", "drop_group", "default"] = "raise"
    default: float = 0.0
    """Score of a failed reward under `failure: default`."""


class EpisodePolicy(Part):
    """How long an agent's episodes may take, and what is done when an agent fails.

    An agent fails when it raises, hangs, or returns what it must not. `rollout.max_turns` and
    `rollout.max_response_tokens` bound turns and tokens.
    """

    max_seconds: float | None = Field(None, gt=0)
    """Wall time of one episode, engine calls included; then it ends as it is (`timeout`)."""
    step_timeout: float = Field(300.0, gt=0)
    """Seconds that an agent may take between two engine calls; one that takes longer has failed."""
    max_observation: int = Field(100_000, ge=100)
    """Characters of one observation."""
    long_observation: Literal["cut", "fail"] = "cut"
    """A longer one loses its middle, and says so; or the agent has failed."""
    failure: Literal["raise", "keep", "drop_group"] = "raise"
    """What a failure does: end the run; keep what there is of the episode (`error`), for rewards to
    judge; leave the whole group out, another takes its place."""
    history: Literal["split", "append", "error"] = "split"
    """Where the chat template rewrites what the model has already seen (earlier thoughts left out,
    for example): `split` begins a new segment of the rollout with what the template writes;
    `append` keeps what was there, a prompt that the template would not write; `error` ends the run
    and says what was rewritten."""


class RuntimeConfig(Part):
    """Where workers live."""

    kind: Literal["ray", "inline"] = "ray"
    ray_address: str | None = None
    """Address of a running Ray cluster; unset: a private one on this machine."""
    cpus: int | None = Field(None, ge=1)
    """CPU threads per phase; unset: all cores of the machine."""


class CheckpointConfig(Part):
    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end (and when the run is interrupted)."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay on disk, beside the best one."""
    best: str | None = None
    """Metric of evaluation, such as `eval/gsm8k/mean`: `checkpoints/best` keeps the checkpoint
    where it was highest; where its name ends with `loss`, lowest."""
    export: bool = True
    """Write a Hugging Face folder when the run ends."""


class LoggingConfig(Part):
    rollouts: bool | Literal["complete"] = True
    """Write a sample of each step's rollouts to `rollouts/`; `complete`: all of them, with token
    ids and log-probs, so that `rlx train --replay` can train on them."""
    rollouts_per_step: int = Field(8, ge=1)
    rollouts_max_mib: float = Field(64.0, gt=0)
    """Size cap of `rollouts/` for one run."""


class PluginsConfig(Part):
    disable: list[str] = []
    """Distributions or plugin names that are not loaded."""
    required: list[str] = []
    """Requirement specifiers that must be installed, for example `rlx-foo>=0.3`."""


class RunConfig(Part):
    """Everything that `rlx train` needs; `runs/<name>/config.yaml` is this tree, resolved."""

    model: str = "embedded"
    """Hugging Face folder or hub name; `embedded` is the small model that ships with rlx."""
    output: Path | None = None
    """Run folder; unset: `runs/<model>-<estimator>-<number>`."""
    seed: int = Field(0, ge=0)
    steps: int = Field(100, ge=1)
    """Training steps in total (a resumed run counts the steps before)."""
    replay: Path | None = None
    """Folder of a run with complete `rollouts/`: train on those, without an engine."""
    estimator: ComponentConfig = _default("estimator")
    loss: ComponentConfig = _default("loss")
    correction: ComponentConfig = _default("correction")
    objective: ComponentConfig = _default("objective")
    """Of offline training."""
    agent: ComponentConfig = _default("agent")
    sampler: ComponentConfig = _default("sampler")
    rewards: Annotated[list[RewardConfig], BeforeValidator(_as_list)] = _default("rewards")
    trackers: Annotated[list[ComponentConfig], BeforeValidator(_as_list)] = _default("trackers")
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    rollout: RolloutConfig = RolloutConfig()
    generate: GenerateConfig = GenerateConfig()
    offline: OfflineConfig = OfflineConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()
    kl: KLConfig = KLConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardPolicy = RewardPolicy()
    episode: EpisodePolicy = EpisodePolicy()
    runtime: RuntimeConfig = RuntimeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    plugins: PluginsConfig = PluginsConfig()

    @property
    def batch_size(self) -> int:
        """B = P · G."""
        return self.rollout.groups * self.rollout.group_size

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates: there is data to evaluate on, and an engine."""
        return bool(self.eval.sources) and self.replay is None

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per training step."""
        minibatch = self.learner.minibatch_size or self.batch_size
        return self.learner.epochs * -(-self.batch_size // minibatch)
