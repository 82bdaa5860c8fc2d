"""The configuration of a run: one typed tree for flags, YAML, `--set`, environment and Python.

A part is handed to whoever needs it; nothing below the trainer sees the whole `RunConfig`. The
parts lie by topic in `config_*.py`, and are all imported from here. Where each value came from is
kept beside it by `rlx.core.settings`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlx.core.config_base import (
    ComponentConfig,
    Part,
    RewardConfig,
    as_list,
    default_component,
    short_names,
    split_weight,
    stale_correction,
)
from rlx.core.config_data import (
    DataConfig,
    EvalConfig,
    GenerateConfig,
    OfflineConfig,
    SourceConfig,
)
from rlx.core.config_faults import FaultsConfig
from rlx.core.config_learner import (
    AlgorithmConfig,
    CriticConfig,
    KLConfig,
    LearnerConfig,
)
from rlx.core.config_lora import LoraConfig
from rlx.core.config_placement import PlacementConfig
from rlx.core.config_rollout import (
    EpisodePolicy,
    PublicationConfig,
    RewardPolicy,
    RolloutConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ComponentConfig",
    "CriticConfig",
    "DataConfig",
    "EpisodePolicy",
    "EvalConfig",
    "FaultsConfig",
    "GenerateConfig",
    "KLConfig",
    "LearnerConfig",
    "LoggingConfig",
    "LoraConfig",
    "OfflineConfig",
    "Part",
    "PlacementConfig",
    "PluginsConfig",
    "PublicationConfig",
    "RewardConfig",
    "RewardPolicy",
    "RolloutConfig",
    "RunConfig",
    "RuntimeConfig",
    "SourceConfig",
    "short_names",
    "split_weight",
]


class RuntimeConfig(Part):
    """Where workers live."""

    kind: Literal["ray", "inline"] = "ray"
    ray_address: str | None = None
    """Address of a running Ray cluster, or `auto` for the one that this node is in; unset: what
    `RAY_ADDRESS` says, else a private one on this machine."""
    cpus: int | None = Field(None, ge=1)
    """CPU threads per phase; unset: all cores of the machine."""


class CheckpointConfig(Part):
    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end (and when the run is interrupted)."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay on disk, beside the best one."""
    best: str | None = None
    """Metric of evaluation, such as `eval/gsm8k/mean`: `checkpoints/best` keeps the checkpoint
    where it was highest; of a loss, of `length_mean` and of `truncated_rate`, lowest."""
    asynchronous: bool = False
    """Hold a copy of the state in memory and write it while training goes on. Costs that memory."""
    on_failure: Literal["raise", "continue"] = "raise"
    """What a checkpoint that can't be written does: end the run, or be reported and counted. The
    last one of a run always ends it. Earlier checkpoints stay as they are."""
    export: bool = True
    """Write a Hugging Face folder when the run ends."""


class LoggingConfig(Part):
    rollouts: bool | Literal["complete"] = True
    """Write a sample of each step's rollouts to `rollouts/`; `complete`: all of them, with token
    ids and log-probs, so that `rlx train --replay` can train on them."""
    rollouts_per_step: int = Field(8, ge=1)
    rollouts_max_mib: float = Field(64.0, gt=0)
    """Size cap of `rollouts/` for one run."""
    trace: bool = True
    """Write `trace.json`, for Perfetto: what driver, engines, rewards and learner did when."""
    trace_max_mib: float = Field(64.0, gt=0)
    """Size cap of `trace.json`; what comes later is not in it."""


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
    estimator: ComponentConfig = default_component("estimator")
    loss: ComponentConfig = default_component("loss")
    correction: ComponentConfig = default_component("correction")
    objective: ComponentConfig = default_component("objective")
    """Of offline training."""
    agent: ComponentConfig = default_component("agent")
    sampler: ComponentConfig = default_component("sampler")
    rewards: Annotated[list[RewardConfig], BeforeValidator(as_list)] = default_component("rewards")
    trackers: Annotated[list[ComponentConfig], BeforeValidator(as_list)] = default_component(
        "trackers"
    )
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    rollout: RolloutConfig = RolloutConfig()
    publication: PublicationConfig = PublicationConfig()
    generate: GenerateConfig = GenerateConfig()
    offline: OfflineConfig = OfflineConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()
    kl: KLConfig = KLConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardPolicy = RewardPolicy()
    episode: EpisodePolicy = EpisodePolicy()
    runtime: RuntimeConfig = RuntimeConfig()
    placement: PlacementConfig = PlacementConfig()
    faults: FaultsConfig = FaultsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    plugins: PluginsConfig = PluginsConfig()

    @model_validator(mode="after")
    def _correct_stale_rollouts(self) -> RunConfig:
        if self.rollout.max_staleness and "correction" not in self.model_fields_set:
            self.correction = ComponentConfig(name=stale_correction())
        return self

    @property
    def batch_size(self) -> int:
        """B = P · G."""
        return self.rollout.groups * self.rollout.group_size

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates: there is data to evaluate on, and an engine."""
        return bool(self.eval.sources) and self.replay is None

    @property
    def policy_is_reference(self) -> bool:
        """The policy with its adapters switched off is the reference model."""
        return self.learner.lora.enabled and self.kl.reference in (None, self.model)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per training step."""
        minibatch = self.learner.minibatch_size or self.batch_size
        return self.learner.epochs * -(-self.batch_size // minibatch)
