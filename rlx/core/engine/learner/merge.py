"""An adapter and the model that it was trained beside, made into one model folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rlx.core.engine.learner.distributed import local_device
from rlx.core.engine.learner.lora import WEIGHTS_NAME, Adapter
from rlx.core.engine.learner.weights_file import copy_tokenizer, plain
from rlx.core.errors import EngineError, UsageError
from rlx.core.models import ADAPTER_CONFIG, resolve_model

_CLASSES = {"CAUSAL_LM": "AutoModelForCausalLM"}
"""Of adapters that others made, which don't say the model's class."""


def merge_adapter(folder: Path, destination: Path) -> None:
    """Write the whole model, in the dtype that it was trained in, with the tokenizer.

    The base may be in 4 bits; it is then read as the adapter's training read it.

    Args:
        folder: of an adapter in peft's format, from rlx or from others.

    Raises:
        UsageError: the folder or its base can't be read, or it holds no LoRA adapter.
    """
    if local_device().type == "cpu":  # peft looks for DeepSpeed, which warns when it has to guess
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    facts = _facts(folder)
    base = resolve_model(str(facts.get("base_model_name_or_path")), where=ADAPTER_CONFIG)
    model = _base(folder, base, facts)
    try:
        adapter = Adapter.load(model, str(folder))
    except (EngineError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"the adapter does not fit its base model {base}: {error}",
            where=str(folder),
            fix="the base that it was trained beside, as adapter_config.json names it",
        ) from None
    weights = {weight.name: weight.compute() for weight in adapter.whole_weights()}
    destination.mkdir(parents=True, exist_ok=True)
    plain(model).save_pretrained(destination, state_dict=weights)
    has_tokenizer = any(folder.glob("tokenizer*"))
    copy_tokenizer(str(folder) if has_tokenizer else base, destination)
    for name in (ADAPTER_CONFIG, WEIGHTS_NAME):
        (destination / name).unlink(missing_ok=True)


def _plain_dict(quantized: Any) -> dict[str, Any]:
    facts = quantized if isinstance(quantized, dict) else quantized.to_dict()
    return {name: value for name, value in facts.items() if name != "quant_method"}


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        kind = facts["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} can't be read: {error}", where=str(folder)) from None
    if kind != "LORA":
        raise UsageError(
            f"{folder} holds an adapter of the kind {kind}",
            where=str(path),
            fix="peft's own `merge_and_unload`; rlx knows LoRA adapters",
        )
    return dict(facts)


def _base(folder: Path, base: str, facts: dict[str, Any]) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    own = (folder / "config.json").is_file()
    config = transformers.AutoConfig.from_pretrained(folder if own else base)
    named = (config.architectures or [""])[0] if own else _CLASSES.get(str(facts["task_type"]), "")
    if not hasattr(transformers, named or "-"):
        raise UsageError(
            f"{folder} does not say what kind of model it belongs to",
            where=str(folder),
            fix="peft's own `merge_and_unload`",
        )
    options = {}
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        # The base's files are whole: it was quantised when it was loaded, and is so again.
        del config.quantization_config
        options["quantization_config"] = transformers.BitsAndBytesConfig(**_plain_dict(quantized))
    try:
        return getattr(transformers, named).from_pretrained(
            base, config=config, dtype=config.dtype, **options
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UsageError(
            f"the base model {base} of the adapter can't be loaded: {error}", where=str(folder)
        ) from None
