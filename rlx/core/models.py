"""What can be known of a model before anything heavy is imported: where it is, how big it is.

Reads `config.json` and the headers of safetensors files; never torch, never transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.core.errors import UsageError, did_you_mean
from rlx.core.hub import hub_or_cache

EMBEDDED = "embedded"
ADAPTER_CONFIG = "adapter_config.json"
"""What makes a folder an adapter's, in peft's format."""
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_HEADS = {
    "ForSequenceClassification": ("score", "a reward model, or another classifier of texts"),
    "ForTokenClassification": ("token", "a process reward model, or another classifier of tokens"),
}
"""End of an architecture's name → head, and what the model is."""
_MAX_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a causal language model, from its `config.json`."""

    name: str
    """Folder or hub name."""
    folder: Path | None
    """Where its files lie on this machine; None for a hub model that isn't downloaded yet."""
    architecture: str
    vocab_size: int | None
    context_length: int
    dtype: str
    """Of the weights on disk: `float32`, `bfloat16`, …"""
    tied: bool
    """The output projection is the embedding matrix."""
    hidden_size: int | None
    layers: int | None
    kv_width: int | None
    """Elements of one token's keys in one layer: key-value heads × head size."""
    parameters: int | None
    """Exact for local safetensors, else computed for llama-like architectures, else None."""
    exact: bool


def resolve_model(name: str, *, where: str = "model") -> str:
    """Return the folder or hub name that transformers and vLLM are given.

    Raises:
        UsageError: a local folder without config or weights, or a name that can't be a hub name.
    """
    if name == EMBEDDED:
        from rlx.embedded import MODEL_FOLDER

        if not MODEL_FOLDER.is_dir():
            raise UsageError(
                f"the embedded model is missing from this installation ({MODEL_FOLDER})",
                where=where,
                fix="install rlx again, or name another model with --model",
            )
        return str(MODEL_FOLDER)
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(path, where)
        return str(path.resolve())  # workers may have another working directory
    if path.exists():
        raise UsageError(
            f"the model {name} is a file",
            where=where,
            fix="name the folder that holds config.json, the weights and the tokenizer",
        )
    if name.startswith(("/", "./", "../", "~")) or not _HUB_NAME.match(name):
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UsageError(
            f"there is no model folder {name}",
            where=where,
            fix=did_you_mean(path.name, siblings)
            or "an existing folder, a hub name (org/name), or `embedded`",
        )
    return name


def model_info(name: str, *, where: str = "model") -> ModelInfo:
    """Read what is known of a model; of a hub model the `config.json` is fetched (and cached).

    Args:
        name: as a user writes it (`embedded`, folder, hub name).

    Raises:
        UsageError: no such model, or no readable config.
    """
    resolved = resolve_model(name, where=where)
    path = Path(resolved)
    config_path = path / "config.json" if path.is_dir() else _hub_config(resolved, where)
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"config.json of the model {name} can't be read: {error}", where=where
        ) from None
    return _info(resolved, config_path.parent, config)


def policy_info(name: str, *, where: str = "model") -> ModelInfo:
    """What is known of a model that writes text.

    Raises:
        UsageError: as `model_info`, and for a reward model, which has no output projection: it
            would be given a random one.
    """
    info = model_info(name, where=where)
    check_head(info, None, where=where)
    return info


def check_head(info: ModelInfo, head: str | None, *, where: str = "model") -> None:
    """Raise UsageError for a model with a trained head of another kind than is wanted.

    Args:
        head: `score`: one number a sequence; `token`: one a token; None: a language model's.
    """
    kind = next((kind for kind in _HEADS if info.architecture.endswith(kind)), None)
    if kind is None or _HEADS[kind][0] == head:
        return
    raise UsageError(
        f"{info.name} is {_HEADS[kind][1]} ({info.architecture})",
        where=where,
        fix="the model that it was trained from, or another language model",
    )


def stored_weights(name: str, *, where: str) -> tuple[int | None, str | None]:
    """Parameters and dtype of any Hugging Face model; None where its files are not here.

    Raises UsageError when there is no such model.
    """
    resolved = resolve_model(name, where=where)
    if Path(resolved).is_dir():
        return _stored(Path(resolved))
    return _stored(_hub_config(resolved, where).parent)


def is_adapter(path: Path) -> bool:
    """Whether a folder holds adapters, and not the model that they belong to."""
    weights = [found.name for pattern in _WEIGHTS for found in path.glob(pattern)]
    return (path / ADAPTER_CONFIG).is_file() and all("adapter" in name for name in weights)


def _check_folder(path: Path, where: str) -> None:
    if is_adapter(path):
        raise UsageError(
            f"{path} holds an adapter, not a whole model",
            where=where,
            fix=f"`rlx export --merge {path} MODEL`, then name MODEL",
        )
    if not (path / "config.json").is_file():
        nested = next(iter(sorted(path.glob("*/config.json"))), None)
        raise UsageError(
            f"the model folder {path} has no config.json",
            where=where,
            fix=f"did you mean {nested.parent}?"
            if nested
            else "name a folder in Hugging Face format (`rlx export` writes one)",
        )
    if not any(True for pattern in _WEIGHTS for _ in path.glob(pattern)):
        raise UsageError(
            f"the model folder {path} has a config.json but no weights",
            where=where,
            fix="copy the model's *.safetensors files into it",
        )


def _hub_config(name: str, where: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    try:
        with hub_or_cache():
            return Path(hf_hub_download(name, "config.json"))
    except GatedRepoError:
        what, fix = f"access to the model {name} must be granted", "`hf auth login`"
    except RepositoryNotFoundError:
        what = f"there is no folder {name}, and no model of that name on the hub"
        fix = "check the spelling; a private model needs `hf auth login`"
    except LocalEntryNotFoundError:
        what = f"there is no folder {name}, and the hub can't be reached to look for the model"
        fix = "name a local folder, or `embedded`"
    except EntryNotFoundError:
        what, fix = f"the model {name} has no config.json", "choose one in transformers' format"
    except (HfHubHTTPError, OSError) as error:
        what = f"there is no folder {name}, and asking the hub for it failed: {error}"
        fix = "name a local folder, or `embedded`"
    raise UsageError(what, where=where, fix=fix) from None


def _info(name: str, folder: Path, config: Mapping[str, Any]) -> ModelInfo:
    text = config.get("text_config") or config

    def first(*keys: str) -> Any:
        return next((text[key] for key in keys if text.get(key) is not None), None)

    heads = first("num_attention_heads", "n_head")
    hidden = first("hidden_size", "n_embd", "d_model")
    head_size = first("head_dim") or (hidden // heads if heads and hidden else None)
    kv_heads = first("num_key_value_heads") or heads
    context = first("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
    if not isinstance(context, int):
        raise UsageError(
            f"config.json of the model {name} names no context length",
            where=str(folder / "config.json"),
            fix='add `"max_position_embeddings": …` to it',
        )
    exact, stored = _stored(folder)
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", True)))
    declared = first("dtype", "torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return ModelInfo(
        name=name,
        folder=folder if Path(name).is_dir() else None,
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
        vocab_size=first("vocab_size"),
        context_length=context,
        dtype=str(stored or declared or "float32").removeprefix("torch."),
        tied=tied,
        hidden_size=hidden,
        layers=first("num_hidden_layers", "n_layer"),
        kv_width=kv_heads * head_size if kv_heads and head_size else None,
        parameters=exact or llama_parameters(text, tied=tied),
        exact=exact is not None,
    )


def llama_parameters(config: Mapping[str, Any], *, tied: bool) -> int | None:
    """Parameters of a dense llama-like decoder (llama, mistral, qwen2, qwen3, smollm); None for
    others.

    V·h (twice when not tied) + L·(2·h·q + 2·h·kv + 3·h·f + norms + biases) + h
    """
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = config.get("num_attention_heads")
    if any(not isinstance(config.get(key), int) for key in needed) or not heads:
        return None
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    kind = str(config.get("model_type", ""))
    if not re.match(r"llama|mistral$|qwen2$|qwen3$|smollm", kind):
        return None
    vocab, hidden, inner, layers = (int(config[key]) for key in needed)
    head = config.get("head_dim") or hidden // heads
    q, kv = heads * head, (config.get("num_key_value_heads") or heads) * head
    layer = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    if config.get("attention_bias") or kind == "qwen2":
        layer += q + 2 * kv + (hidden if kind != "qwen2" else 0)
    if config.get("mlp_bias"):
        layer += 2 * inner + hidden
    if kind == "qwen3":
        layer += 2 * head
    return vocab * hidden * (1 if tied else 2) + layers * layer + hidden


def _stored(folder: Path) -> tuple[int | None, str | None]:
    """Number of parameters and commonest dtype in a folder's safetensors; None without any."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
    count, by_dtype = 0, dict[str, int]()
    for path in sorted(folder.glob("*.safetensors")):
        for entry in _header(path).values():
            size = 1
            for length in entry["shape"]:
                size *= length
            count += size
            by_dtype[entry["dtype"]] = by_dtype.get(entry["dtype"], 0) + size
    if not count:
        return None, None
    dtype = max(by_dtype, key=lambda key: by_dtype[key])
    return count, names.get(dtype)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a folder's safetensors; empty without any."""
    return {
        name: tuple(entry["shape"])
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in _header(path).items()
    }


def _header(path: Path) -> dict[str, Any]:
    """Entries of a safetensors file: `{tensor: {dtype, shape, data_offsets}}`."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length))
            end = (
                8
                + length
                + max(
                    (e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"),
                    default=0,
                )
            )
            if end > path.stat().st_size:
                raise ValueError(f"it is cut off: {path.stat().st_size} of {end} bytes")
    except (OSError, ValueError, struct.error) as error:
        raise UsageError(
            f"the weights {path} are not a whole safetensors file: {error}",
            where="model",
            fix="fetch the file again (one of some hundred bytes is a git-lfs pointer)",
        ) from None
    header.pop("__metadata__", None)
    return dict(header)


def vocabulary_hash(tokenizer: Any) -> str:
    """Equal for tokenizers that give every token the same id."""
    items = sorted((int(number), str(text)) for text, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(items).encode()).hexdigest()[:16]
