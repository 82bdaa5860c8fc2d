"""TRL's SFTTrainer or DPOTrainer on a file of rows; runs in TRL's environment.

    python benchmarks/trl_side/offline.py '{"objective": "sft", "model": …, "data": …, …}'

Prints JSON: seconds of training (with the reference's log-probs), tokens without padding, steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

PADDED = {"gradient_checkpointing": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults (float32 weights, bfloat16 autocast, checkpointing)": {},
    "autocast": {"bf16": True, **PADDED},
    "bfloat16": {"bf16": False, "weights": "bfloat16", **PADDED},
    "bfloat16, by length": {
        "bf16": False,
        "weights": "bfloat16",
        "train_sampling_strategy": "group_by_length",
        **PADDED,
    },
    "bfloat16, padding-free": {
        "bf16": False,
        "weights": "bfloat16",
        "padding_free": True,
        "max_length": None,
        **PADDED,
    },
    "bfloat16, batches of 4": {"bf16": False, "weights": "bfloat16", "micro": 4, **PADDED},
    "bfloat16, batches of 4, padding-free": {
        "bf16": False,
        "weights": "bfloat16",
        "micro": 4,
        "padding_free": True,
        "max_length": None,
        **PADDED,
    },
}
TRAINERS = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    options = dict(SETTINGS[job["settings"]])
    micro = options.pop("micro", job["batch_size"])
    weights = options.pop("weights", "float32")
    config_class, trainer_class = TRAINERS[job["objective"]]
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            output_dir=folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=job["batch_size"] // micro,
            num_train_epochs=1,
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            use_cpu=not torch.cuda.is_available(),
            model_init_kwargs={"dtype": weights},
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
            **options,
        )
        rows = load_dataset("json", data_files=job["data"], split="train", cache_dir=folder)
        started = time.perf_counter()
        trainer = trainer_class(
            job["model"], args=config, train_dataset=rows, processing_class=tokenizer
        )
        ready = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - ready
        history = [line for line in trainer.state.log_history if "num_tokens" in line]
    answer = {
        "seconds": seconds,
        "start": ready - started,
        "tokens": history[-1]["num_tokens"],
        "steps": trainer.state.global_step,
        "losses": [line["loss"] for line in history if "loss" in line],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
