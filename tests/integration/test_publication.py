"""From a real learner to a real engine: after each publication the engine is the learner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import settings
from learner_cases import free_port, learner_arguments, random_batch

from rlx.core.config import PublicationConfig
from rlx.core.engine.client import RolloutClient
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.inline_runtime import InlineRuntime
from rlx.core.engine.interfaces import Sampling
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.engine.publication import Publisher
from rlx.core.engine.runtime import WorkerSpec

pytestmark = pytest.mark.engine
PROMPTS = [list(range(5, 5 + length)) for length in (3, 9, 40)]
SAMPLED = Sampling(max_new_tokens=16)
ENGINES = {
    "vllm": "rlx.core.engine.rollout.vllm_engine:VllmEngine",
    "transformers": "rlx.core.engine.rollout.transformers_engine:TransformersEngine",
}


def expected_logprobs(folder: Path, prompt: list[int], answer: Any) -> torch.Tensor:
    """[n], what plain transformers makes of the exported weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([[*prompt, *answer.tokens.tolist()]])
    with torch.no_grad():
        logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0]


@pytest.mark.parametrize(
    ("kinds", "transport"),
    [(["vllm", "transformers"], "gloo"), (["transformers", "vllm"], "auto")],
)
def test_engines_equal_learner_after_every_publication(
    template: Path, tmp_path: Path, kinds: list[str], transport: str
):
    model = str(template / "tiny")
    arguments = learner_arguments(model, master_port=free_port())

    async def publish_three_times() -> None:
        runtime = InlineRuntime()
        target = "rlx.core.engine.learner.learner:PolicyLearner"
        learner_worker = await runtime.start(
            WorkerSpec(name="learner", target=target, kwargs=arguments)
        )
        own = {"model": model, "settings": settings(), "context_length": 128, "dtype": "float32"}
        workers = [
            await runtime.start(
                WorkerSpec(name=f"engine-{number}", target=ENGINES[kind], kwargs=own)
            )
            for number, kind in enumerate(kinds)
        ]
        learner = LearnerGroup([learner_worker], arguments["settings"], 0)
        clients = [RolloutClient(worker) for worker in workers]
        engines = RolloutEngines(clients)
        publisher = Publisher(
            PublicationConfig(bucket_mib=1), transport=transport, receivers=len(kinds)
        )
        try:
            await learner.start()
            for worker in workers:
                await worker.call("start")
            seen = set()
            for version in range(1, 4):
                await learner.update(random_batch(version), step=version, kl_coef=0.0)
                await publisher.publish(learner, engines, version=version)  # compares checksums
                exported = tmp_path / f"export-{version}"
                await learner.export(str(exported))
                for client in clients:
                    for prompt in PROMPTS:
                        answer = await client.generate(prompt, SAMPLED, 1)
                        expected = expected_logprobs(exported, prompt, answer)
                        assert answer.version == version
                        torch.testing.assert_close(
                            torch.tensor(answer.logprobs), expected, rtol=0, atol=1e-4
                        )
                        seen.add(expected.sum().item())
            assert len(seen) >= 3 * len(PROMPTS)  # each publication changed something
            metrics = publisher.metrics()
            assert metrics["publish/gib"] > 0
            assert metrics["publish/gib_per_s"] == pytest.approx(
                metrics["publish/gib"] / metrics["publish/seconds"]
            )
        finally:
            await engines.stop()
            await learner.stop()
            await runtime.close()

    asyncio.run(publish_three_times())
