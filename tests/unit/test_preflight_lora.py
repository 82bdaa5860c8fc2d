"""Mistakes about adapters are found before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_folder import LLAMA, make_model

from rlx.core import preflight_lora, sizes
from rlx.core.config import LoraConfig, RunConfig
from rlx.core.engine import workers
from rlx.core.errors import UsageError
from rlx.core.model_layers import linear_layers, module_names
from rlx.core.models import ModelInfo, is_adapter, model_info, resolve_model
from rlx.core.preflight_case import Finding
from rlx.core.preflight_lora import lora_complaints, resumed_complaints
from rlx.core.settings import dump_yaml

LAYER = {"q_proj": [8, 8], "k_proj": [4, 8], "gate_proj": [16, 8], "down_proj": [8, 16]}


@pytest.fixture
def info(tmp_path: Path) -> ModelInfo:
    tensors = {
        "model.embed_tokens.weight": ("F32", [32, 8], 1024),
        "model.norm.weight": ("F32", [8], 32),
        **{
            f"model.layers.{number}.{'self_attn' if name[0] in 'qk' else 'mlp'}.{name}.weight": (
                "F32",
                shape,
                4 * shape[0] * shape[1],
            )
            for number in range(2)
            for name, shape in LAYER.items()
        },
    }
    return model_info(str(make_model(tmp_path / "m", LLAMA, tensors)))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    found = {"peft", "bitsandbytes"}
    monkeypatch.setattr(
        preflight_lora.importlib.util, "find_spec", lambda name: name if name in found else None
    )
    monkeypatch.setattr(preflight_lora, "find_gpus", lambda: ())
    monkeypatch.setattr(preflight_lora, "_bitsandbytes", lambda: (0, 50))
    return found


def complaints(
    info: ModelInfo, learner: dict[str, Any] | None = None, **lora: Any
) -> list[Finding]:
    settings = {"lr": 1e-3, **(learner or {}), "lora": {"rank": 4, **lora}}
    return list(lora_complaints(RunConfig.model_validate({"learner": settings}), info))


def test_linear_layers_are_the_matrices_but_embedding_and_head(info: ModelInfo) -> None:
    layers = linear_layers(info)
    assert {name.rpartition(".")[2] for name in layers} == set(LAYER)
    assert len(layers) == 2 * len(LAYER)
    assert "model.layers.0" in module_names(info)


def test_right_settings_are_left_alone(info: ModelInfo) -> None:
    assert complaints(info) == []
    assert complaints(info, target_modules=["q_proj", "mlp.down_proj"], dora=True) == []
    assert complaints(info, quantization="nf4") == []


@pytest.mark.parametrize(
    ("lora", "learner", "key", "words"),
    [
        ({"target_modules": ["q_prj"]}, {}, "target_modules", "did you mean 'q_proj'?"),
        ({"target_modules": ["norm"]}, {}, "target_modules", "there are: down_proj"),
        ({"modules_to_save": ["embed_tokens"]}, {}, "modules_to_save", "is tied"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save", "is tied"),
        ({"modules_to_save": ["normm"]}, {}, "modules_to_save", "did you mean 'norm'?"),
        ({"dora": True}, {"zero_stage": 3}, "dora", "ZeRO 3"),
        ({"quantization": "nf4"}, {"zero_stage": 3}, "quantization", "ZeRO 3"),
        ({"quantization": "nf4", "rank": None}, {}, "quantization", "--lora-rank 16"),
    ],
)
def test_mistake_is_an_error_that_says_what_to_write(
    info: ModelInfo, lora: dict[str, Any], learner: dict[str, Any], key: str, words: str
) -> None:
    (found,) = complaints(info, learner, **lora)
    assert found.level == "error"
    assert found.key == f"learner.lora.{key}"
    assert words in f"{found.what} {found.fix}"


def test_settings_without_effect_are_warnings(info: ModelInfo) -> None:
    (found,) = complaints(info, rank=None, alpha=8.0)
    assert (found.level, found.key) == ("warning", "learner.lora.alpha")
    (found,) = complaints(info, {"lr": 1e-6})
    assert (found.level, found.key) == ("warning", "learner.lr")


def test_missing_libraries_are_named_with_what_installs_them(
    info: ModelInfo, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_lora, "_bitsandbytes", lambda: (0, 43))
    (found,) = complaints(info, quantization="nf4")
    assert "on GPUs only" in found.what
    installed.clear()
    peft, bitsandbytes = complaints(info, quantization="nf4")
    assert "pip install peft" in peft.fix
    assert "rlx[qlora]" in bitsandbytes.fix


def test_resumed_run_keeps_its_adapters_but_for_their_dropout(tmp_path: Path) -> None:
    def config(**lora: Any) -> RunConfig:
        return RunConfig.model_validate({"output": tmp_path, "learner": {"lora": lora}})

    assert list(resumed_complaints(config(rank=4))) == []  # no run yet
    (tmp_path / "config.yaml").write_text(dump_yaml(config(rank=4)))
    assert list(resumed_complaints(config(rank=4, dropout=0.1))) == []
    (found,) = resumed_complaints(config(rank=8))
    assert "started with learner.lora.rank 4, not 8" in found.what
    found, *_ = resumed_complaints(config())
    assert "rank 4, not null" in found.what
    (found,) = resumed_complaints(config(rank=4, target_modules=["q_proj"]))
    assert "learner.lora.target_modules=[all-linear]" in found.fix
    (tmp_path / "config.yaml").write_text("learner: {lr: 1.0e-3}\n")  # of a release without LoRA
    assert list(resumed_complaints(config())) == []


def test_adapter_folder_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert is_adapter(tmp_path)
    with pytest.raises(UsageError, match="holds an adapter") as caught:
        resolve_model(str(tmp_path))
    assert f"rlx export --merge {tmp_path}" in str(caught.value.fix)


def test_sizes_count_what_is_trained(info: ModelInfo) -> None:
    lora = LoraConfig(rank=2)
    adapters = 2 * 2 * sum(sum(shape) for shape in LAYER.values())
    assert sizes.trained_parameters(lora, info, 10_000) == adapters
    some = LoraConfig(rank=2, target_modules=["q_proj"])
    assert sizes.trained_parameters(some, info, 10_000) == 2 * 2 * 16
    assert sizes.trained_parameters(LoraConfig(), info, 10_000) == 10_000
    whole, adapted = RunConfig(), RunConfig.model_validate({"learner": {"lora": {"rank": 2}}})
    assert info.parameters is not None
    needed = sizes.training_bytes(adapted, info, info.parameters)
    assert needed == 4 * info.parameters + adapters * (4 + 4 + 8)
    assert needed < sizes.training_bytes(whole, info, info.parameters)
    assert sizes.checkpoint_bytes(adapted, info, info.parameters) == adapters * (4 + 4 + 8)


@pytest.mark.parametrize(
    ("settings", "own_model"),
    [
        ({"learner": {"lora": {"rank": 4}}}, False),
        ({"learner": {"lora": {"rank": 4}}, "kl": {"coef": 0.1, "reference": "m"}}, False),
        ({"learner": {"lora": {"rank": 4}}, "kl": {"coef": 0.1, "reference": "other"}}, True),
        ({}, True),
    ],
)
def test_reference_is_a_model_of_its_own_unless_it_is_the_policy_without_adapters(
    settings: dict[str, Any], own_model: bool
) -> None:
    config = RunConfig.model_validate({"model": "m", "kl": {"coef": 0.1}, **settings})
    assert workers.needs_reference_model(config, frozenset()) is own_model
