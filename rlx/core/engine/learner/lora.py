"""Low-rank adapters beside a model's frozen weights (peft), and what the two come to together.

    W' = W + s·B·A                        s = α/r; rsLoRA: α/√r
    W' = m · (W + s·B·A) / ‖W + s·B·A‖    norm of each output's weights (DoRA)

LoRA: https://arxiv.org/abs/2106.09685; rsLoRA: https://arxiv.org/abs/2312.03732;
DoRA: https://arxiv.org/abs/2402.09353; QLoRA, whose W is in 4 bits: https://arxiv.org/abs/2305.14314.
The model keeps its class and its modules' places: layers with adapters stand where the plain ones
stood. W itself never changes; W' is computed in float32 when it is wanted, and rounded once.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlx.core.config_lora import ALL_LINEAR, LoraConfig
from rlx.core.errors import EngineError, did_you_mean
from rlx.core.model_layers import ends_with

WEIGHTS_NAME = "adapter_model.safetensors"
_NAME = "default"
_PREFIX = "base_model.model."
"""Of a tensor's name in peft's files."""
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeWeight:
    """One tensor of the model as it would be without adapters."""

    name: str
    """In the model without adapters."""
    parameters: tuple[nn.Parameter, ...]
    """What it is computed from, which must be whole then."""
    base: nn.Parameter
    """One of them, of its shape and dtype."""
    compute: Callable[[], Tensor]
    frozen: bool
    """It is what the model started with."""


class Adapter:
    """The adapters of one model, in place.

    Args:
        model: a Hugging Face model; its weights are frozen.
        settings: with `rank` set.
        head: a module of it that is trained whole.
        seed: of the adapters' first weights, the same on every rank.

    Raises:
        EngineError: a name in the settings fits no module of the model.
    """

    def __init__(
        self, model: Any, settings: LoraConfig, *, head: str | None = None, seed: int = 0
    ) -> None:
        from peft import LoraConfig as PeftConfig
        from peft import PeftModel

        assert settings.rank is not None
        linear = linear_layers(model, head)
        whole = [*settings.modules_to_save, *([head] if head else [])]
        _require_untied(model, settings.modules_to_save)
        config = PeftConfig(
            r=settings.rank,
            lora_alpha=alpha_of(settings),  # type: ignore[arg-type]
            lora_dropout=settings.dropout,
            use_rslora=settings.rslora,
            use_dora=settings.dora,
            target_modules=_targets(model, linear, settings.target_modules),
            modules_to_save=_existing(model, whole) or None,
            task_type=_task(model),
            base_model_name_or_path=str(getattr(model, "name_or_path", "")),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._attach(PeftModel(model, config))

    def _attach(self, peft: Any) -> None:
        from peft.tuners.lora import LoraLayer

        self._peft = peft
        self._model = peft.get_base_model()
        self._layers: dict[str, Any] = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, LoraLayer)
        }
        self._dropout = [
            module
            for layer in self._layers.values()
            for module in layer.lora_dropout.values()
            if isinstance(module, nn.Dropout)
        ]
        for module in self._dropout:
            module.eval()
        weights = list(self.whole_weights())
        self._renewed = _renewed(weights) if _by_name(self._model, weights) else None

    @classmethod
    def load(cls, model: Any, folder: str) -> Adapter:
        """The adapters of a folder in peft's format on the model that they were trained beside.

        Raises:
            EngineError: some are of layers that are not linear.
        """
        from peft import PeftModel

        adapter = cls.__new__(cls)
        adapter._attach(PeftModel.from_pretrained(model, folder))
        others = [name for name, layer in adapter._layers.items() if _NAME not in layer.lora_A]
        if others:
            raise EngineError(f"{folder} has adapters of layers that are not linear: {others[0]}")
        return adapter

    def facts(self) -> dict[str, Any]:
        """For the run's manifest."""
        trained = sum(parameter.numel() for _, parameter in self.own_parameters())
        return {"trainable": trained, "adapters": len(self._layers)}

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Inside, the model is what it was before it had adapters."""
        with self._peft.disable_adapter():
            yield

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Inside, dropout is on."""
        for module in self._dropout:
            module.train()
        try:
            yield
        finally:
            for module in self._dropout:
                module.eval()

    @property
    def renews_some(self) -> bool:
        """Whether some of the model's tensors can be given to an engine that has the others."""
        return self._renewed is not None

    def renewed_weights(self) -> Iterator[WholeWeight]:
        """The tensors that are not as the model started, and those that engines keep in one with
        them (queries, keys and values); all of them where those can't be told."""
        return (
            weight
            for weight in self.whole_weights()
            if self._renewed is None or weight.name in self._renewed
        )

    def whole_weights(self) -> Iterator[WholeWeight]:
        """The model's tensors with the adapters in them, tied ones once."""
        for name, parameter in self._model.named_parameters():
            if ".lora_" in name or ".original_module." in name:
                continue
            saved = f".modules_to_save.{_NAME}." in name
            plain = name.replace(f".modules_to_save.{_NAME}.", ".").replace(".base_layer.", ".")
            layer = self._layers.get(name.removesuffix(".base_layer.weight"))
            if layer is not None:
                yield WholeWeight(
                    name=plain,
                    parameters=tuple(layer.parameters()),
                    base=parameter,
                    compute=functools.partial(merged, layer),
                    frozen=False,
                )
                continue
            yield WholeWeight(
                name=plain,
                parameters=(parameter,),
                base=parameter,
                compute=functools.partial(dequantized, parameter),
                frozen=not saved,
            )

    def own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names in the model and parameters of what is trained, without the base."""
        for name, parameter in self._model.named_parameters():
            if ".lora_" in name or f".modules_to_save.{_NAME}." in name:
                yield name, parameter

    def save(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write a folder in peft's format, with the whole model's configuration beside it.

        Args:
            weights: `own_parameters`, whole.
        """
        from peft.utils import get_peft_model_state_dict
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        named = {_PREFIX + name: tensor for name, tensor in weights.items()}
        state = get_peft_model_state_dict(self._peft, named, _NAME, save_embedding_layers=False)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        config = copy.copy(self._peft.peft_config[_NAME])
        config.inference_mode = True
        config.save_pretrained(str(folder))
        whole = copy.deepcopy(self._model.config)
        whole.architectures = [type(self._model).__name__]
        whole.save_pretrained(folder)


def alpha_of(settings: LoraConfig) -> float:
    """α, 2 r where it is not said."""
    assert settings.rank is not None
    return 2 * settings.rank if settings.alpha is None else settings.alpha


@torch.no_grad()
def merged(layer: Any) -> Tensor:
    """Weight of a linear layer with its adapter in it, in the dtype that it computes in."""
    base = layer.get_base_layer().weight
    weight = dequantized(base).float()
    a, b = layer.lora_A[_NAME].weight.float(), layer.lora_B[_NAME].weight.float()
    inputs_first = layer.fan_in_fan_out  # GPT-2 keeps its weights as [inputs, outputs]
    change = layer.scaling[_NAME] * (b @ a)
    whole = weight + (change.T if inputs_first else change)
    if _NAME in layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector[_NAME].weight.float()
        inputs = 0 if inputs_first else 1
        whole = whole * (magnitude / whole.norm(dim=inputs)).unsqueeze(inputs)
    return whole.to(dequantized_dtype(base))


def dequantized(parameter: Tensor) -> Tensor:
    """The parameter itself, or what bitsandbytes keeps in 4 bits of it."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state)


def dequantized_dtype(parameter: Tensor) -> torch.dtype:
    state = getattr(parameter, "quant_state", None)
    return parameter.dtype if state is None else state.dtype


def linear_layers(model: Any, head: str | None = None) -> list[str]:
    """Names of the linear layers, the head's excepted."""
    from transformers.pytorch_utils import Conv1D

    output = getattr(model, "get_output_embeddings", lambda: None)()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not output and name != head
    ]


def _renewed(weights: list[WholeWeight]) -> frozenset[str]:
    trained = {weight.name for weight in weights if not weight.frozen}
    places = {_place(name) for name in trained} - {""}
    beside = {weight.name for weight in weights if _place(weight.name) in places}
    return frozenset(trained | beside)


def _place(name: str) -> str:
    """Of `model.layers.0.self_attn.q_proj.weight` what is before `q_proj`."""
    return ".".join(name.split(".")[:-2])


def _by_name(model: Any, weights: list[WholeWeight]) -> bool:
    """Whether engines know the tensors by these names, as the model started with them: not where
    files have others (mixtures of experts), nor where the model rounded them to 4 bits."""
    from transformers.core_model_loading import revert_weight_conversion

    if any(hasattr(p, "quant_state") for p in model.parameters()):
        return False
    names = {weight.name for weight in weights}
    shapes = {weight.name: torch.empty(1, device="meta") for weight in weights}
    if any(".experts." in name for name in names):
        return False
    return set(revert_weight_conversion(model, shapes)) == names


def _targets(model: Any, linear: list[str], wanted: list[str]) -> list[str]:
    """Ends of names that mean the wanted linear layers and nothing else."""
    chosen = linear
    if wanted != [ALL_LINEAR]:
        chosen = [name for name in linear if any(ends_with(name, end) for end in wanted)]
        for end in wanted:
            if not any(ends_with(name, end) for name in linear):
                ends = {name.rpartition(".")[2] for name in linear}
                near = did_you_mean(end, ends) or f"one of {', '.join(sorted(ends))}"
                raise EngineError(
                    f"learner.lora.target_modules: {type(model).__name__} has no linear layer "
                    f"{end!r}; {near}"
                )
    if not chosen:
        raise EngineError(f"{type(model).__name__} has no linear layers for adapters")
    short = sorted({name.rpartition(".")[2] for name in chosen})
    meant = [
        name for name, _ in model.named_modules() if any(ends_with(name, end) for end in short)
    ]
    return short if set(meant) == set(chosen) else chosen


def _existing(model: Any, wanted: list[str]) -> list[str]:
    names = [
        name for name, module in model.named_modules() if any(True for _ in module.parameters())
    ]
    for end in wanted:
        if not any(ends_with(name, end) for name in names):
            ends = {name.rpartition(".")[2] for name in names if name}
            raise EngineError(
                f"learner.lora.modules_to_save: {type(model).__name__} has no module {end!r}; "
                f"{did_you_mean(end, ends) or ''}"
            )
    return wanted


def _require_untied(model: Any, wanted: list[str]) -> None:
    """A head that is the embedding can't be trained apart from it: files and engines have one."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embedding = model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    for name, module in model.named_modules():
        if module in (head, embedding) and any(ends_with(name, end) for end in wanted):
            raise EngineError(
                f"learner.lora.modules_to_save: {name} is tied (head and embedding are one "
                "tensor), so it can't be trained in one place alone"
            )


def _task(model: Any) -> str | None:
    return next((task for end, task in _TASKS.items() if type(model).__name__.endswith(end)), None)
