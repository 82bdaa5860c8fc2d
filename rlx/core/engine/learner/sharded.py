"""A model under DeepSpeed: forward, accumulate gradients, step, and its whole weights.

Everything that differs between the ZeRO stages is in this file. With S ranks DeepSpeed averages
gradients, so `backward` scales by S, and shares of the loss add up over ranks.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.adam_state import make_states
from rlx.core.engine.learner.lora import Adapter, WholeWeight
from rlx.core.engine.learner.packing import MicroBatch
from rlx.core.errors import NonFiniteError, UsageError


def zero_stage(wanted: int | None, dtype: torch.dtype, world: int) -> int:
    """The ZeRO stage: as wanted, else 0 for one float32 rank and 1 otherwise.

    Raises:
        UsageError: stage 0 with bfloat16, which would keep no float32 master copy.
    """
    if wanted == 0 and dtype == torch.bfloat16:
        raise UsageError(
            "ZeRO stage 0 keeps no float32 copy of bfloat16 weights: small updates would be lost.",
            where="learner.zero_stage",
            fix="learner.zero_stage: 1 (or learner.dtype: float32)",
        )
    if wanted is not None:
        return wanted
    return 0 if world == 1 and dtype == torch.float32 else 1


class ShardedModel:
    """One rank's part of a policy or critic in training."""

    def __init__(
        self,
        module: Any,
        settings: LearnerConfig,
        *,
        dtype: torch.dtype,
        world: int,
        adapter: Adapter | None = None,
    ) -> None:
        """`module` wraps a Hugging Face model, its attribute `model`, which has the `adapter`."""
        deepspeed = _import_deepspeed()
        self.module = module
        self.adapter = adapter
        self.stage = zero_stage(settings.zero_stage, dtype, world)
        self._world = world
        self._max_norm = settings.max_grad_norm
        self._device = next(module.parameters()).device
        self._engine, _, _, _ = deepspeed.initialize(
            model=module,
            model_parameters=_parameter_groups(module, settings.weight_decay),
            config=_deepspeed_config(module, settings, stage=self.stage, dtype=dtype),
        )
        if self.stage < 3:  # there the optimizer is given its tensors in the step
            optimizer = self._engine.optimizer
            make_states(getattr(optimizer, "optimizer", optimizer))

    def forward(self, micro: MicroBatch, **options: Any) -> tuple[Tensor, ...]:
        """What the module says of the action tokens [n] of a micro-batch."""
        return self._engine(*on_device(micro, self._device), layout=micro.layout, **options)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro-batch's gradient; gradients cross ranks with the `last` one."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._world)

    def step(self, rate: float) -> float:
        """Clip, update the weights at learning rate `rate`, and return the norm before clipping.

        Raises:
            NonFiniteError: the gradient is not finite; weights and optimizer are unchanged.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        if self.stage == 0:
            norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), self._max_norm))
            applied = norm < float("inf")
            if applied:
                self._engine.step()
        else:
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
            applied = self._engine.was_step_applied()
        if not applied:
            self.discard()
            raise NonFiniteError(f"the gradient's norm is {norm}")
        return norm

    def discard(self) -> None:
        """Forget accumulated gradients."""
        optimizer = self._engine.optimizer
        self._engine.zero_grad() if self.stage == 0 else optimizer.zero_grad()
        if self.stage in (1, 2) and hasattr(optimizer, "averaged_gradients"):
            optimizer.micro_step_id = -1
            for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
                gradients.update(dict.fromkeys(gradients))

    def sleep(self) -> None:
        """Move gradients and the optimizer's state to the host's memory."""
        self._engine.offload_states(include=_slept_states())

    def wake(self) -> None:
        """Bring back what `sleep` moved."""
        self._engine.reload_states()

    @property
    def gathers(self) -> bool:
        """Whether `whole_parameters` puts tensors together from the ranks' parts, one at a time."""
        return self.stage == 3

    @property
    def renews_some(self) -> bool:
        """Whether training leaves tensors alone that an engine may have and keep."""
        return self.adapter is not None and self.adapter.renews_some

    def whole_parameters(self, *, renewed: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors of the model's parameters, tied ones once. All ranks iterate.

        A tensor of ZeRO-3 is valid until the next one is asked for.

        Args:
            renewed: leave out what is known to be as the model started.
        """
        if self.adapter is not None:
            for weight in self._adapted(self.adapter, renewed=renewed):
                with self._gathered(weight.parameters):
                    yield weight.name, weight.compute()
            return
        yield from self._each(self.module.model.named_parameters())

    def described_parameters(self, *, renewed: bool = False) -> Iterator[tuple[str, Tensor]]:
        """What `whole_parameters` yields, as tensors without data (on torch's meta device)."""
        if self.adapter is not None:
            for weight in self._adapted(self.adapter, renewed=renewed):
                yield weight.name, _described(weight.base)
            return
        for name, parameter in self.module.model.named_parameters():
            yield name, _described(parameter)

    @staticmethod
    def _adapted(adapter: Adapter, *, renewed: bool) -> Iterator[WholeWeight]:
        return adapter.renewed_weights() if renewed else adapter.whole_weights()

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors of what is trained beside frozen weights; as above."""
        assert self.adapter is not None
        yield from self._each(self.adapter.own_parameters())

    def _each(self, named: Iterator[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in named:
            with self._gathered([parameter]):
                yield name, parameter.detach()

    def _gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        if self.stage != 3:
            return nullcontext()
        return _import_deepspeed().zero.GatheredParameters(list(parameters))

    @contextmanager
    def as_it_started(self) -> Iterator[None]:
        """Inside, answers are those of the weights that an adapter was put beside."""
        assert self.adapter is not None, "weights that are trained are not there any more"
        with self.adapter.switched_off():
            yield

    def learning(self) -> AbstractContextManager[None]:
        """Inside, the adapter's dropout is on."""
        return nullcontext() if self.adapter is None else self.adapter.learning()

    @property
    def engine(self) -> Any:
        """DeepSpeed's own object, for checkpoints."""
        return self._engine


def _described(parameter: nn.Parameter) -> Tensor:
    """Shape and dtype of the whole of it; a rank may hold a part, or 4 bits a value."""
    quantised = getattr(parameter, "quant_state", None) or parameter
    shape = getattr(parameter, "ds_shape", quantised.shape)
    return torch.empty(shape, dtype=quantised.dtype, device="meta")


def _import_deepspeed() -> Any:
    """DeepSpeed, quiet, and without compiling anything."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*deprecated", FutureWarning)
    import deepspeed

    # Its shared-memory all-reduce serves inference only, and costs 100 s of g++ at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _without_memory_reports()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _without_memory_reports() -> None:
    """Its optimizers print what memory the machine has left, to the user's terminal."""
    for name, module in list(sys.modules.items()):
        if name.startswith("deepspeed.") and "see_memory_usage" in vars(module):
            module.see_memory_usage = lambda *_, **__: None  # type: ignore[attr-defined]


def _slept_states() -> list[Any]:
    """All but the weights, which are published from where they are."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States

    return [States.optim_states, States.hp_params, States.lp_grads]


def on_device(micro: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`tokens, positions, source, targets` as tensors."""
    arrays = (micro.tokens, micro.positions, micro.source, micro.targets)
    first, second, third, fourth = (torch.from_numpy(array).to(device) for array in arrays)
    return first, second, third, fourth


def _parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices only; without decay one group, for ZeRO one flat buffer."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if weight_decay == 0:
        return [{"params": parameters}]
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _deepspeed_config(
    module: Any, settings: LearnerConfig, *, stage: int, dtype: torch.dtype
) -> dict[str, Any]:
    # Below stage 3, frozen weights are never sent.
    sizes = [p.numel() for p in module.parameters() if p.requires_grad or stage == 3]
    bucket = max(max(sizes), min(sum(sizes), 50_000_000))
    hidden = module.model.get_input_embeddings().weight.shape[-1]
    bf16 = dtype == torch.bfloat16
    return {
        # Never used to split batches: rlx packs micro-batches and marks the last one itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if stage == 0 else settings.max_grad_norm,
        "steps_per_print": None,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": settings.lr,
                "betas": list(settings.betas),
                "weight_decay": settings.weight_decay,
                # DeepSpeed's own Adam is compiled on first use, which needs g++ and half a minute.
                "torch_adam": True,
                # One pass over the memory in place of a dozen: an eighth of the time on a CPU.
                "fused": True,
            },
        },
        # The optimizer that is offloaded is PyTorch's too.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {
            "enabled": bf16,
            "check_grad_overflow": bf16,
            # A gradient goes into the float32 sum as soon as it is there, and is not kept.
            "immediate_grad_update": bf16,
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        # Else the float32 sums are rounded to bfloat16 once more, even on one rank.
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": stage,
            **(
                {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
                if settings.offload_optimizer
                else {}
            ),
            "overlap_comm": False,
            # The defaults allocate gigabytes, whatever the model's size.
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": 10 * hidden,
        },
    }
