"""The model, tokenizer, task and recipe that `rlx train` takes when it is given nothing.

`make.py` makes the model, `task.py` the rows; `recipe.yaml` is a partial `RunConfig` on top of the
defaults. docs/adr/0001-embedded-model.md says why the weights are shipped.
"""

from pathlib import Path

MODEL_FOLDER: Path = Path(__file__).parent / "model"
"""Hugging Face folder: config, generation config, tokenizer and float32 safetensors."""

RECIPE: Path = Path(__file__).parent / "recipe.yaml"
"""The keys of `RunConfig` in which a run on the embedded task differs from the defaults."""
