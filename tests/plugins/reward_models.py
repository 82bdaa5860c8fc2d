"""Tiny reward models with random weights, as folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))


def tokenizer(chat_template: str | None = None) -> Any:
    from tiny_tokenizer import tiny_tokenizer

    return tiny_tokenizer(chat_template)


def llama(folder: Path, *, seed: int = 0, template: str | None = None, **config: Any) -> Path:
    """A Llama with a head of one label; `config`: further keys of its `config.json`."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    words = tokenizer(template)
    torch.manual_seed(seed)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            num_labels=1,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
            bos_token_id=None,
            initializer_range=0.3,
        )
    )
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def bert(folder: Path) -> Path:
    """An encoder: its score is not a linear layer on the last token."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    words = tokenizer()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=words.pad_token_id,
        initializer_range=0.3,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def alone(folder: Path, text: str, *, special: bool = True) -> float:
    """What transformers itself says of one text."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)(
        text, return_tensors="pt", add_special_tokens=special
    )["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, 0])
