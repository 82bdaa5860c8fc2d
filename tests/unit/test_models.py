"""Facts of models from their files; nothing heavy is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_folder import LLAMA, make_model

from rlx.core.errors import UsageError
from rlx.core.models import (
    check_head,
    llama_parameters,
    model_info,
    policy_info,
    resolve_model,
)


def error(name: str | Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        model_info(str(name))
    return caught.value


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({}, 134_515_008),  # SmolLM2-135M
        (  # Qwen2.5-0.5B
            {
                "model_type": "qwen2",
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "vocab_size": 151936,
            },
            494_032_768,
        ),
        (  # Qwen3-0.6B
            {
                "model_type": "qwen3",
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 151936,
            },
            596_049_920,
        ),
    ],
)
def test_parameter_counts_equal_the_published_ones(change: dict[str, Any], count: int) -> None:
    assert llama_parameters({**LLAMA, **change}, tied=True) == count


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_parameter_counts_equal_those_of_transformers(
    model_type: str, tied: bool, bias: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        model_type,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        tie_word_embeddings=tied,
        **({"attention_bias": bias, "mlp_bias": bias} if model_type == "llama" else {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert llama_parameters(config.to_dict(), tied=tied) == expected


@pytest.mark.parametrize(
    "change",
    [{"model_type": "gpt2"}, {"num_experts": 8}, {"intermediate_size": None}],
)
def test_other_architectures_are_not_guessed(change: dict[str, Any]) -> None:
    assert llama_parameters({**LLAMA, **change}, tied=True) is None


def test_local_weights_are_counted_exactly(tmp_path: Path) -> None:
    tensors = {"a": ("BF16", [10, 3], 60), "b": ("BF16", [7], 14), "c": ("F32", [2], 8)}
    info = model_info(str(make_model(tmp_path / "m", tensors=tensors)))
    assert (info.parameters, info.exact) == (39, True)
    assert info.dtype == "bfloat16"
    assert (info.context_length, info.vocab_size, info.tied) == (8192, 49152, True)
    assert info.kv_width == 3 * 64


def test_a_text_model_inside_a_larger_one_is_read(tmp_path: Path) -> None:
    config = {"architectures": ["X"], "text_config": {**LLAMA, "max_position_embeddings": 99}}
    assert model_info(str(make_model(tmp_path / "m", config))).context_length == 99


def test_the_embedded_model_is_there() -> None:
    info = model_info("embedded")
    assert Path(resolve_model("embedded")).is_dir()
    assert info.exact
    assert info.parameters is not None
    assert 0 < info.parameters < 5_000_000


def test_hub_names_are_passed_on() -> None:
    assert resolve_model("org/name-1.5B") == "org/name-1.5B"


def test_relative_folder_is_known_to_workers_elsewhere(tmp_path: Path, monkeypatch) -> None:
    from rlx.embedded import MODEL_FOLDER

    (tmp_path / "mine").symlink_to(MODEL_FOLDER)
    monkeypatch.chdir(tmp_path)
    assert Path(resolve_model("mine")).is_absolute()


def test_a_folder_without_config_points_at_the_one_below(tmp_path: Path) -> None:
    make_model(tmp_path / "export")
    assert str(tmp_path / "export") in str(error(tmp_path).fix)


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    (make_model(tmp_path / "m") / "model.safetensors").unlink()
    assert "no weights" in error(tmp_path / "m").what


def test_a_misspelt_folder_gets_a_suggestion(tmp_path: Path) -> None:
    make_model(tmp_path / "smollm")
    assert error(tmp_path / "smolm").fix == "did you mean 'smollm'?"


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert "is a file" in error(tmp_path / "m.gguf").what


def test_a_cut_off_download_is_found(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    assert "cut off" in error(tmp_path / "m").what


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs", bytes([255] * 8)])
def test_what_is_no_safetensors_file_is_found(tmp_path: Path, content: bytes) -> None:
    (make_model(tmp_path / "m") / "model.safetensors").write_bytes(content)
    assert "not a whole safetensors file" in error(tmp_path / "m").what


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_a_broken_config_is_an_error(tmp_path: Path, text: str) -> None:
    (make_model(tmp_path / "m") / "config.json").write_text(text)
    assert "config.json" in error(tmp_path / "m").what


def test_a_model_without_context_length_is_an_error(tmp_path: Path) -> None:
    config = {**LLAMA, "max_position_embeddings": None}
    assert "context length" in error(make_model(tmp_path / "m", config)).what


def test_a_hub_name_without_the_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    caught = error("no-such-org/no-such-model")
    assert "no folder" in caught.what
    assert caught.fix


@pytest.mark.parametrize(
    ("architecture", "fits"),
    [
        ("LlamaForCausalLM", ["score", "token", None]),
        ("LlamaForSequenceClassification", ["score"]),
        ("LlamaForTokenClassification", ["token"]),
    ],
)
def test_a_head_of_another_kind_is_refused(
    tmp_path: Path, architecture: str, fits: list[str | None]
) -> None:
    make_model(tmp_path / "m", {**LLAMA, "architectures": [architecture]})
    info = model_info(str(tmp_path / "m"))
    for head in ("score", "token", None):
        if head in fits:
            check_head(info, head)
        else:
            with pytest.raises(UsageError, match=f"m is .*{architecture}"):
                check_head(info, head)
    if None not in fits:
        with pytest.raises(UsageError, match="reward model") as caught:
            policy_info(str(tmp_path / "m"), where="kl.reference")
        assert caught.value.where == "kl.reference"
