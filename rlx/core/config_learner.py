"""Configuration of what is trained: learner, critic, KL, and what the core adds to the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlx.core.config_base import Part
from rlx.core.config_lora import LoraConfig


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
    token_budget: Annotated[int, Field(ge=16)] | Literal["auto"] = "auto"
    """Most tokens in one micro-batch; the gradient does not depend on it. `auto`: 4096; on a CPU as
    many as keep about 1 GiB for the backward pass, at least 512."""
    row_tokens: int = Field(512, ge=8)
    """Most tokens in a row of packed sequences, unless one is longer; short ones get short rows."""
    attention: Literal[
        "auto", "ragged", "sdpa", "eager", "flash_attention_2", "flash_attention_3"
    ] = "auto"
    """How the model attends within a row. `ragged`: rlx's own, without pads and foreign tokens;
    `auto`: that on a CPU where the model allows it, else `sdpa` (`eager` where a model caps its
    scores, as Gemma 2 does). Flash attention needs its package and a GPU."""
    shared_prefix: Literal["auto", "on", "off"] = "auto"
    """Whether rollouts of a group share the computation of the tokens that they begin with; the
    gradient is the same. `auto`: where `ragged` attention makes it pay; `on` also shares under
    `sdpa` and `eager`, by a dense mask."""
    logprob_chunk: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Positions per chunk of the vocabulary projection, recomputed backward; 0: in one piece;
    `auto`: in one piece while its logits fit into a sixteenth of the memory."""
    gradient_checkpointing: bool = False
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed ZeRO stage; unset: 0 for one float32 rank, else 1."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the host's memory, where an accelerator's is short."""
    sleep: bool = False
    """Between updates keep gradients and the optimizer's state in the host's memory, so that the
    rollout engine has the accelerator's."""
    fused: Literal["auto", "on", "off"] = "auto"
    """Norms, rotations and gated activations of the model in few passes over the memory, which keep
    less for the backward pass. `auto`: on a CPU, where the model's layers are known to compute
    just that."""
    liger: bool = False
    """Liger's fused kernels in the model, where `liger-kernel` is installed, on a GPU."""
    ranks: int = Field(1, ge=1)
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters, of the policy and the critic."""

    def forward_only(self) -> LearnerConfig:
        """The same, for a model that is not trained."""
        return self.model_copy(update={"gradient_checkpointing": False, "lora": LoraConfig()})


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
