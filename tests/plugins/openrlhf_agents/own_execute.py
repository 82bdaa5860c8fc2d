"""An agent file that drives the engine itself, with token ids."""

import asyncio
from copy import deepcopy

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        tokens = tokens["input_ids"][0].tolist()
        params = deepcopy(sampling_params)
        params.max_tokens = min(2, max_length - len(tokens))
        first = (await llm_engine.generate(tokens, params)).outputs[0]
        assert [first.logprobs[i][t].logprob for i, t in enumerate(first.token_ids)] == [-1.0, -2.0]
        params.max_tokens = 50
        output = await llm_engine.generate([*tokens, *first.token_ids], params)
        text = first.text + output.outputs[0].text
        return {
            "prompt": prompt,
            "label": label,
            "reward": float(label in text),
            "scores": 0.5,
            "observation_tokens": tokens,
            "action_ranges": [],
            "rollout_log_probs": None,
            "extra_logs": {},
        }


class Hotter(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        sampling_params.temperature = 0.3
        await llm_engine.generate([1, 2], sampling_params)


class FromAThread(AgentExecutorBase):
    """As executors do that put a server in front of the engine."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        call = llm_engine.generate(tokens, sampling_params)
        output = await asyncio.to_thread(asyncio.run, call)
        return {"reward": float(label in output.outputs[0].text)}


class AgentInstance:
    """Only an environment, without an executor."""

    async def reset(self, states):
        return {"observation": "Other: "}

    async def step(self, states):
        done = "2" in states["action_text"]
        return {"rewards": 0.25, "environment_feedback": "No.", "done": done}
