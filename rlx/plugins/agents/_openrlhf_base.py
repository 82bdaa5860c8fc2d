"""Stand-ins for the base classes that OpenRLHF's agent files import, where it is not installed.

They hold to the signatures and results of `openrlhf.utils.agent`
(https://github.com/OpenRLHF/OpenRLHF), over an engine that is an rlx episode.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rlx.core.errors import ComponentError


class AgentInstanceBase:
    """An environment: `reset(states)`, then `step(states)` after each action."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states


class AgentExecutorBase:
    """Runs one episode in `execute`; older files name the environment's class here."""

    def __init__(self, agent_instance_cls: Any = None, *args: Any, **kwargs: Any) -> None:
        self.agent_instance_cls = agent_instance_cls
        self.max_length: int | None = None
        self.hf_tokenizer: Any = None
        self.llm_engine: Any = None

    async def generate(self, prompt_token_ids: Any, sampling_params: Any) -> Any:
        """The engine's, for older files."""
        return await self.llm_engine.generate(prompt_token_ids, sampling_params)

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int | None = None,
        hf_tokenizer: Any = None,
        llm_engine: Any = None,
    ) -> dict[str, Any]:
        """One call of the engine, or as many as the environment takes.

        Older files leave out the last three, which are then attributes.
        """
        hf_tokenizer = hf_tokenizer or self.hf_tokenizer
        llm_engine = llm_engine or self.llm_engine
        if self.agent_instance_cls is not None:
            return await play(
                self.agent_instance_cls, prompt, label, sampling_params, hf_tokenizer, llm_engine
            )
        tokens = encode(hf_tokenizer, prompt)
        output = await llm_engine.generate(tokens, copy.deepcopy(sampling_params))
        start, sampled = len(tokens), list(output.outputs[0].token_ids)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens + sampled,
            "action_ranges": [(start, start + len(sampled))],
            "rollout_log_probs": None,
            "reward": None,
            "scores": None,
            "extra_logs": {},
        }


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Plays an environment, a new object of it for each episode."""


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One answer; a reward from elsewhere is rlx's own business (`rewards`)."""

    def __init__(self, remote_rm_url: Any = None) -> None:
        super().__init__()


async def play(
    environment: type,
    prompt: str,
    label: Any,
    sampling_params: Any,
    hf_tokenizer: Any,
    llm_engine: Any,
) -> dict[str, Any]:
    """The loop of actions and feedback; every step's reward goes to its turn."""
    instance = await _constructed(environment)
    states = {"observation": prompt, "prompt": prompt, "label": label}
    observation = (await _awaited(instance.reset(states)))["observation"]
    tokens = encode(hf_tokenizer, observation)
    ranges: list[tuple[int, int]] = []
    total, scores = 0.0, 0.0
    logs: dict[str, Any] = {}
    while True:
        output = await llm_engine.generate(tokens, copy.deepcopy(sampling_params))
        action = output.outputs[0]
        ranges.append((len(tokens), len(tokens) + len(action.token_ids)))
        states = {
            "observation_text": observation,
            "action_text": action.text,
            "label": label,
            "sampling_params": sampling_params,
        }
        result = await _awaited(instance.step(states))
        if result.get("environment_images"):
            raise ComponentError("its environment answers with images, and the model reads text")
        total += (reward := float(result["rewards"]))
        llm_engine.reward(reward)
        scores = result.get("scores", total)
        logs = result.get("extra_logs") or {}
        feedback = result["environment_feedback"]
        observation += action.text + feedback
        tokens = [*tokens, *action.token_ids, *encode(hf_tokenizer, feedback)]
        sampling_params = result.get("sampling_params") or sampling_params
        if result["done"]:
            break
    return {
        "prompt": prompt,
        "label": label,
        "reward": total,
        "scores": scores,
        "observation_tokens": tokens,
        "action_ranges": ranges,
        "rollout_log_probs": None,
        "extra_logs": logs,
    }


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without special tokens of the tokenizer's own."""
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def provide() -> None:
    """Let `openrlhf.utils.agent` be imported; nothing where OpenRLHF is installed."""
    if "openrlhf" in sys.modules or importlib.util.find_spec("openrlhf") is not None:
        return
    agent = ModuleType("openrlhf.utils.agent")
    for kind in (
        AgentInstanceBase,
        AgentExecutorBase,
        MultiTurnAgentExecutor,
        SingleTurnAgentExecutor,
    ):
        setattr(agent, kind.__name__, kind)
    logs = ModuleType("openrlhf.utils.logging_utils")
    logs.init_logger = logging.getLogger  # type: ignore[attr-defined]
    utils = ModuleType("openrlhf.utils")
    utils.agent, utils.logging_utils = agent, logs  # type: ignore[attr-defined]
    package = ModuleType("openrlhf")
    package.utils = utils  # type: ignore[attr-defined]
    for parent in (package, utils):
        parent.__path__ = []
    for module in (package, utils, agent, logs):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


async def _constructed(environment: type) -> Any:
    """An object of a class whose `__init__` may be a coroutine, as in OpenRLHF's examples."""
    instance: Any = object.__new__(environment)
    await _awaited(instance.__init__())
    return instance


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
