"""What TRL's trainers make of one batch: loss and gradient; runs in TRL's environment.

    python benchmarks/trl_side/objectives.py '{"objective": "dpo", "policy": …, "output": …, …}'

Writes a file for torch.load: the batch as the trainer has it, the loss, the gradient by name.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

Trainer = Any
Made = tuple[Trainer, Any]


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(job["policy"], dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        trainer, loss_of = _MAKERS[job["objective"]](job, policy, folder)
        inputs = next(iter(trainer.get_train_dataloader()))
        kept = {
            name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)
        }
        model = trainer.model.train()
        loss = loss_of(model, inputs)
        loss.backward()
    gradient = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    torch.save({"inputs": kept, "loss": loss.item(), "gradient": gradient}, job["output"])


def _common(job: dict[str, Any], folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": len(job["rows"]),
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "gradient_checkpointing": False,
    }


def _parts(job: dict[str, Any], model: Any) -> dict[str, Any]:
    return {
        "model": model,
        "train_dataset": Dataset.from_list(job["rows"]),
        "processing_class": AutoTokenizer.from_pretrained(job["policy"]),
    }


def _reference(job: dict[str, Any]) -> Any:
    return AutoModelForCausalLM.from_pretrained(job["reference"], dtype=torch.float32)


def _sft(job: dict[str, Any], policy: Any, folder: str) -> Made:
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(args=SFTConfig(**_common(job, folder)), **_parts(job, policy))
    return trainer, trainer.compute_loss


def _rm(job: dict[str, Any], policy: Any, folder: str) -> Made:
    from trl import RewardConfig, RewardTrainer

    del policy
    scorer = AutoModelForSequenceClassification.from_pretrained(job["scorer"], dtype=torch.float32)
    trainer = RewardTrainer(args=RewardConfig(**_common(job, folder)), **_parts(job, scorer))
    return trainer, trainer.compute_loss


def _dpo(**options: Any) -> Callable[..., Made]:
    def make(job: dict[str, Any], policy: Any, folder: str) -> Made:
        from trl import DPOConfig, DPOTrainer

        config = DPOConfig(beta=0.1, **options, **_common(job, folder))
        trainer = DPOTrainer(args=config, ref_model=_reference(job), **_parts(job, policy))
        return trainer, trainer.compute_loss

    return make


def _kto(job: dict[str, Any], policy: Any, folder: str) -> Made:
    from trl import KTOConfig, KTOTrainer

    config = KTOConfig(beta=0.1, **_common(job, folder))
    trainer = KTOTrainer(args=config, ref_model=_reference(job), **_parts(job, policy))
    return trainer, trainer.compute_loss


def _simpo(job: dict[str, Any], policy: Any, folder: str) -> Made:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    config = CPOConfig(
        loss_type="simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0, **_common(job, folder)
    )
    trainer = CPOTrainer(args=config, **_parts(job, policy))
    return trainer, trainer.compute_loss


def _orpo(beta: float) -> Callable[..., Made]:
    def make(job: dict[str, Any], policy: Any, folder: str) -> Made:
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        config = ORPOConfig(beta=beta, **_common(job, folder))
        trainer = ORPOTrainer(args=config, **_parts(job, policy))
        return trainer, trainer.compute_loss

    return make


def _gkd(beta: float) -> Callable[..., Made]:
    """The divergence of GKDTrainer on the batch of SFTTrainer."""

    def make(job: dict[str, Any], policy: Any, folder: str) -> Made:
        from trl.experimental.gkd import GKDTrainer

        trainer, _ = _sft(job, policy, folder)
        teacher = _reference(job)

        def loss_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            labels = inputs["labels"][:, 1:]
            with torch.no_grad():
                teachers = teacher(**batch).logits[:, :-1]
            loss: torch.Tensor = GKDTrainer.generalized_jsd_loss(
                model(**batch).logits[:, :-1], teachers, labels=labels, beta=beta
            )
            return loss

        return trainer, loss_of

    return make


_MAKERS: dict[str, Callable[..., Made]] = {
    "sft": _sft,
    "rm": _rm,
    "dpo": _dpo(),
    "dpo+nll": _dpo(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 1.0]),
    "dpo+nll, one pair": _dpo(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 1.0]),
    "ipo": _dpo(loss_type="ipo"),
    "simpo": _simpo,
    "orpo": _orpo(0.1),
    "orpo, 1.1": _orpo(1.1),
    "kto": _kto,
    "forward_kl": _gkd(0.0),
    "reverse_kl": _gkd(1.0),
    "js": _gkd(0.5),
}

if __name__ == "__main__":
    main()
