"""TRL's GRPOTrainer on a file of prompts; runs in TRL's environment.

    python benchmarks/trl_side/grpo.py '{"model": …, "data": …, "groups": 8, …}'

Prints JSON: seconds of each step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import load_dataset
from rewards import vowels
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PLAIN = {"gradient_checkpointing": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "float32": {"bf16": False, **PLAIN},
    "autocast": {"bf16": True, **PLAIN},
    "bfloat16": {"bf16": False, "weights": "bfloat16", **PLAIN},
    "bfloat16, batches of 16": {"bf16": False, "weights": "bfloat16", "micro": 16, **PLAIN},
    "bfloat16, batches of 32": {"bf16": False, "weights": "bfloat16", "micro": 32, **PLAIN},
}


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *arguments: Any, **others: Any) -> None:
        self.times.append(time.perf_counter())

    def on_step_end(self, *arguments: Any, **others: Any) -> None:
        self.times.append(time.perf_counter())


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    options = dict(SETTINGS[job["settings"]])
    batch = job["groups"] * job["group_size"]
    micro = options.pop("micro", batch)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=batch // micro,
            num_generations=job["group_size"],
            max_completion_length=job["new_tokens"],
            max_steps=job["steps"],
            # Every rollout has all of its tokens, on both sides.
            generation_kwargs={"eos_token_id": None},
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta2=0.95,
            beta=0.0,
            use_cpu=not torch.cuda.is_available(),
            model_init_kwargs={"dtype": options.pop("weights", "float32")},
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
            **options,
        )
        trainer = GRPOTrainer(
            job["model"],
            reward_funcs=vowels,
            args=config,
            train_dataset=load_dataset(
                "json", data_files=job["data"], split="train", cache_dir=folder
            ),
            processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
            callbacks=[clock],
        )
        trainer.train()
    steps = [end - start for start, end in zip(clock.times, clock.times[1:], strict=False)]
    lengths = [line["completions/mean_length"] for line in trainer.state.log_history[:-1]]
    print(json.dumps({"steps": steps, "mean_length": lengths[-1]}))


if __name__ == "__main__":
    main()
