"""The embedded model, task and recipe: what `rlx train` stands on when it is given nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlx
from rlx.core.config import RunConfig
from rlx.embedded import MODEL_FOLDER, RECIPE, make, task
from rlx.testing import reward_inputs


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_FOLDER).eval()


def answers(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], **sampling: Any
) -> list[str]:
    """One response per row, as text without special tokens."""
    batch = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**batch, max_new_tokens=10, **sampling)
    return tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)


def share_right(responses: Sequence[str], rows: Sequence[dict[str, Any]]) -> float:
    return sum(r == row["label"] for r, row in zip(responses, rows, strict=True)) / len(rows)


def test_the_shipped_files_are_small() -> None:
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) < 1.5 * 2**20


def test_importing_the_folder_loads_no_torch() -> None:
    code = "import sys, rlx.embedded, rlx.embedded.task; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("text", ["next kfbao=", "  two\n lines\t", "naïve 漢字 🙂", "<eos>x", ""])
def test_any_text_survives_encode_and_decode(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


def test_a_prompt_starts_with_bos_and_has_a_token_per_byte(tokenizer: Any) -> None:
    ids = tokenizer("next kfbao=").input_ids
    assert (ids[0], len(ids)) == (tokenizer.bos_token_id, 12)


def test_the_script_makes_the_shipped_tokenizer(tokenizer: Any) -> None:
    assert make.make_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_the_script_makes_the_shipped_architecture(model: Any, tokenizer: Any) -> None:
    fresh = make.make_model(make.make_tokenizer())
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in fresh.state_dict().items()} == shapes
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.dtype == torch.float32


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_are_deterministic_and_solved_by_their_label(split: str) -> None:
    rows = task.load(split=split)
    assert rows == task.load(split=split)
    assert rows[:10] == task.load(split=split, rows=10)
    assert {row["kind"] for row in rows} == set(task.KINDS)
    reward = rlx.resolve("rewards", "exact_match")
    for row in rows[:20]:
        right = reward_inputs(prompt=row["prompt"], response=row["label"], label=row["label"])
        wrong = reward_inputs(prompt=row["prompt"], response=row["label"][:-1], label=row["label"])
        assert (float(reward(right)), float(reward(wrong))) == (1.0, 0.0)


def test_no_string_is_both_trained_on_and_held_out() -> None:
    train = {row["letters"] for row in task.load()}
    assert len(task.load()) == task.ROWS["train"]
    assert not train & {row["letters"] for row in task.load(split="test")}


def test_an_unknown_split_is_an_error() -> None:
    with pytest.raises(KeyError):
        task.load(split="validation")


def test_the_longest_answer_fits_the_recipe(tokenizer: Any) -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    longest = max(len(row["label"]) for row in task.load())
    assert longest + 1 <= recipe["rollout"]["max_new_tokens"]


def test_the_model_knows_the_task_and_rarely_shows_it(model: Any, tokenizer: Any) -> None:
    rows = task.load(split="test", rows=400)
    torch.manual_seed(0)
    sampled = share_right(answers(model, tokenizer, rows, top_k=0), rows)
    greedy = share_right(answers(model, tokenizer, rows, do_sample=False), rows)
    assert 0.25 <= sampled <= 0.45  # standard error 0.024
    assert greedy >= 0.9


def test_the_recipe_is_a_run_config() -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    config = RunConfig.model_validate(recipe)
    assert (config.model, config.data.path) == ("embedded", "embedded")
    assert config.batch_size == 256
    assert config.updates_per_step == 1
