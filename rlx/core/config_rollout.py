"""Configuration of how rollouts are made: engine, episodes, rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlx.core.config_base import Part


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
    max_staleness: int = Field(0, ge=0)
    """Policy versions by which a rollout may be behind the weights that it trains. 0: generation
    and training take turns, and a run can be repeated bit by bit; k: generation runs ahead by up to
    k steps while the learner trains."""
    partial_rollout: bool = False
    """With `max_staleness`: new weights are taken in the middle of a response. Without it the
    engine first finishes the responses that it has begun."""
    max_in_flight: int | None = Field(None, ge=1)
    """With `max_staleness`: most groups that are generated at once; unset: as many as fit."""
    max_running: int = Field(256, ge=1)
    """Sequences that the engine runs at once."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """KV cache on a CPU host; a GPU uses `gpu_memory_utilization`."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    engines: int = Field(1, ge=1)
    """Rollout engines. A task's rollouts, and the turns of an episode, go to the same one unless it
    is much fuller than another; `max_running` and the KV cache are of each."""
    tensor_parallel: int = Field(1, ge=1)
    """Devices of one engine, over which its model is split."""
    enforce_eager: bool = True
    """Start without compiling the model: faster start, somewhat slower generation."""


class PublicationConfig(Part):
    """How new weights get from the learner to the rollout engines."""

    transport: Literal["auto", "shared_memory", "gloo", "nccl", "ipc"] = "auto"
    """`shared_memory`: through /dev/shm, on one host; `gloo`: over TCP, also between hosts; `nccl`
    and `ipc`: vLLM's own ways between GPUs and on one. `auto`: on GPUs `ipc` where the learner and
    the engines share them and `nccl` where they don't; otherwise shared memory, and gloo between
    hosts."""
    bucket_mib: int = Field(64, ge=1)
    """Weights travel in pieces of this size: while engines load one, the learner fills the next."""


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


class RewardPolicy(Part):
    """How rewards run and what is done with their results."""

    normalize: Literal["none", "running"] = "none"
    """`running`: rollouts' rewards minus the mean, divided by the standard deviation, of all
    rewards of the run so far; reported rewards stay as they are."""
    clip: float | None = Field(10.0, gt=0)
    """Bound on the absolute value of the composed reward; null: none. What an agent gives for its
    turns comes on top of it; under `normalize` the normalised whole is bounded."""
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
