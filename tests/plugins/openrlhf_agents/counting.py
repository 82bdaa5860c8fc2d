"""An agent file in OpenRLHF's form: an environment with feedback, two steps an episode."""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.step_idx += 1
        right = states["label"] in states["action_text"]
        assert states["action_text"].endswith("<|im_end|>")
        assert states["observation_text"].startswith("1+1=")
        return {
            "rewards": torch.tensor(float(right)),
            "scores": torch.tensor([float(right)]),
            "environment_feedback": "\nAgain:" if self.step_idx < 2 else "\nDone.",
            "done": self.step_idx == 2,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"steps": torch.tensor(self.step_idx)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)


class OlderExecutor(MultiTurnAgentExecutor):
    """As files were written when the executor was given the engine."""

    def __init__(self, max_steps, max_length, llm_engine, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, result_queue)


class OldExecutor(MultiTurnAgentExecutor):
    """As files were written in between."""

    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(
            AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue
        )

    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)


class WithImages(AgentInstance):
    async def step(self, states: dict, **kwargs):
        return {**await super().step(states), "environment_images": ["a picture"]}


class Doubling(MultiTurnAgentExecutor):
    """Changes the reward afterwards."""

    def __init__(self):
        super().__init__(AgentInstance)

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        result = await super().execute(
            prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine
        )
        return {**result, "reward": 2 * result["reward"]}
