"""From a real learner to a real engine: after each publication the engine is the learner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from engine_cases import settings
from learner_cases import free_port, learner_arguments, random_batch

from rlx.core.engine.client import RolloutClient
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.interfaces import Sampling
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.engine.publication import Publisher
from rlx.core.engine.runtime import InlineRuntime, WorkerSpec

pytestmark = pytest.mark.engine
PROMPTS = [list(range(5, 5 + length)) for length in (3, 9, 40)]
GREEDY = Sampling(max_new_tokens=16, temperature=0.0)
SAMPLED = Sampling(max_new_tokens=16)
ENGINES = {
    "vllm": "rlx.core.engine.rollout.vllm_engine:VllmEngine",
    "transformers": "rlx.core.engine.rollout.transformers_engine:TransformersEngine",
}


def greedy_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers makes of the exported weights, one token at a time without a cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_engine_equals_learner_after_every_publication(template: Path, tmp_path: Path, kind: str):
    model = str(template / "tiny")
    arguments = learner_arguments(model, master_port=free_port())

    async def publish_three_times() -> None:
        runtime = InlineRuntime()
        target = "rlx.core.engine.learner.learner:PolicyLearner"
        learner_worker = await runtime.start(
            WorkerSpec(name="learner", target=target, kwargs=arguments)
        )
        engine_worker = await runtime.start(
            WorkerSpec(
                name="engine",
                target=ENGINES[kind],
                kwargs={
                    "model": model,
                    "settings": settings(),
                    "context_length": 128,
                    "dtype": "float32",
                    "seed": 0,
                    "threads": 1,
                },
            )
        )
        learner = LearnerGroup([learner_worker], arguments["settings"], 0)
        engine, publisher = RolloutClient(engine_worker), Publisher()
        try:
            await learner.start()
            await engine_worker.call("start")
            seen = set()
            for version in range(1, 4):
                await learner.update(random_batch(version), step=version, kl_coef=0.0)
                await publisher.publish(
                    learner, RolloutEngines([engine]), version=version
                )  # compares checksums
                exported = tmp_path / f"export-{version}"
                await learner.export(str(exported))
                for prompt in PROMPTS:
                    answer = await engine.generate(prompt, GREEDY, 0)
                    expected = greedy_tokens(exported, prompt, len(answer.tokens))
                    assert answer.tokens.tolist() == expected
                    assert answer.version == version
                seen.add(str((await engine.generate(PROMPTS[0], SAMPLED, 1)).logprobs.tolist()))
            assert len(seen) == 3  # each publication changed something
        finally:
            publisher.close()
            await engine.stop()
            await learner.stop()
            await runtime.close()

    asyncio.run(publish_three_times())
