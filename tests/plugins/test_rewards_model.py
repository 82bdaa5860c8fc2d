"""`model`: the numbers are those of transformers, however they are batched."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from reward_models import alone, bert, llama
from tiny_tokenizer import CHATML

import rlx
from rlx.core.errors import UsageError
from rlx.core.rewards import Reward, RewardInputs
from rlx.plugins.rewards._scorer import batches
from rlx.testing import check_reward

END = "<|im_end|>"
TEXTS = ("a", "a longer response, with words", "", "b" * 100, "12345")
CLOSE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("reward"))


def samples(*responses: str, prompt: Any = "Question: ") -> list[RewardInputs]:
    return [RewardInputs(prompt=prompt, response=text) for text in responses]


def model(folder: Path | list[Path], **params: Any) -> Any:
    paths = [str(one) for one in folder] if isinstance(folder, list) else str(folder)
    return rlx.resolve("rewards", "model", model=paths, **params)


def scores(component: Any, given: list[RewardInputs]) -> list[float]:
    return [reward.score for reward in component(given)]


def test_scores_are_those_of_transformers_on_each_text_alone(folder: Path) -> None:
    got = scores(model(folder), samples(*TEXTS))
    assert got == pytest.approx([alone(folder, f"Question: {t}{END}") for t in TEXTS], abs=CLOSE)
    assert max(got) - min(got) > 0.1


@pytest.mark.parametrize("tokens", [1, 130, 260, 100_000])
def test_scores_do_not_depend_on_the_size_of_a_batch(folder: Path, tokens: int) -> None:
    got = scores(model(folder, batch_tokens=tokens), samples(*TEXTS))
    assert got == pytest.approx(scores(model(folder), samples(*TEXTS)), abs=CLOSE)


def test_a_batch_is_alike_in_length_and_within_the_budget() -> None:
    lengths = [7, 100, 3, 3, 50, 49, 200, 1]
    found = list(batches(lengths, 100))
    assert sorted(row for rows in found for row in rows) == list(range(8))
    assert found[0] == [6]  # longer than the budget: alone
    for rows in found[1:]:
        assert len(rows) * max(lengths[row] for row in rows) <= 100
    assert list(batches([], 10)) == []


def test_a_chat_template_writes_the_conversation(tmp_path: Path) -> None:
    folder = llama(tmp_path / "chat", template=CHATML)
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    (got,) = scores(model(folder), samples("hello", prompt=chat))
    text = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n"
    )
    assert got == pytest.approx(alone(folder, text, special=False), abs=CLOSE)
    (plain,) = scores(model(folder, chat_template=False), samples("hello", prompt=chat))
    text = f"system: be brief\nuser: hi\nhello{END}"
    assert plain == pytest.approx(alone(folder, text), abs=CLOSE)


def test_a_padding_token_at_the_end_is_not_read_as_transformers_does_not(tmp_path: Path) -> None:
    folder = llama(tmp_path / "padded")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "pad_token_id": config["eos_token_id"]}))
    got = scores(model(folder), samples(*TEXTS))
    assert got == pytest.approx([alone(folder, f"Question: {t}{END}") for t in TEXTS], abs=CLOSE)


def test_scores_are_normalised_as_the_model_says(tmp_path: Path, folder: Path) -> None:
    scaled = llama(tmp_path / "scaled", rlx_reward_mean=0.5, rlx_reward_std=4.0)
    raw = scores(model(folder), samples(*TEXTS))
    answer = model(scaled)(samples(*TEXTS))
    assert [one.score for one in answer] == pytest.approx([(r - 0.5) / 4.0 for r in raw])
    assert [one.metrics["raw"] for one in answer] == pytest.approx(raw)
    assert scores(model(scaled, normalize=False), samples(*TEXTS)) == pytest.approx(raw)


@pytest.mark.parametrize("std", [0.0, -1.0, "wide", float("nan")])
def test_a_normalisation_that_can_not_be_is_refused(tmp_path: Path, std: Any) -> None:
    bad = llama(tmp_path / "bad", rlx_reward_std=std)
    with pytest.raises(UsageError, match="rlx_reward_std"):
        model(bad)


@pytest.mark.parametrize(("combine", "of"), [("mean", lambda a, b: (a + b) / 2), ("min", min)])
def test_several_models_are_combined_and_shown(
    tmp_path: Path, folder: Path, combine: Any, of: Any
) -> None:
    other = llama(tmp_path / "other", seed=1, rlx_reward_mean=1.0)
    first, second = (scores(model(one), samples(*TEXTS)) for one in (folder, other))
    answer = model([folder, other], combine=combine)(samples(*TEXTS))
    assert [one.score for one in answer] == pytest.approx(list(map(of, first, second)))
    assert [one.parts["other"] for one in answer] == pytest.approx(second)
    twice = model([folder, folder])(samples("a"))
    assert list(twice[0].parts) == [folder.name, f"{folder.name}_2"]


def test_a_long_conversation_loses_its_start(folder: Path) -> None:
    (answer,) = model(folder, max_length=16)(samples("x" * 50))
    assert answer.score == pytest.approx(alone(folder, "x" * 15 + END), abs=CLOSE)
    assert answer.metrics["truncated"] == 1.0
    (answer,) = model(folder)(samples("x" * 400))  # the model was made for 256
    assert answer.score == pytest.approx(alone(folder, "x" * 255 + END), abs=CLOSE)


def test_an_encoder_is_run_as_it_is(tmp_path: Path) -> None:
    folder = bert(tmp_path / "bert")
    got = scores(model(folder), samples("a", "bbb", prompt="P"))
    assert got == pytest.approx([alone(folder, f"P{t}{END}") for t in ("a", "bbb")], abs=CLOSE)


def test_bfloat16_keeps_a_float32_head(folder: Path) -> None:
    import torch

    full = scores(model(folder), samples(*TEXTS))
    half = model(folder, dtype="bfloat16")
    got = scores(half, samples(*TEXTS))
    assert got == pytest.approx(full, abs=0.5)
    assert any(float(torch.tensor(x).bfloat16()) != x for x in got)  # not rounded at the end


def head_lost(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = {name: w for name, w in load_file(path).items() if not name.startswith("score")}
    save_file(weights, path, metadata={"format": "pt"})


def test_what_holds_no_reward_model_is_refused(tmp_path: Path, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    language = LlamaForCausalLM(LlamaForCausalLM.config_class.from_pretrained(folder))
    language.save_pretrained(tmp_path / "lm")
    with pytest.raises(UsageError, match="LlamaForCausalLM, not a reward model"):
        model(tmp_path / "lm")
    three = llama(tmp_path / "three", id2label={"0": "a", "1": "b", "2": "c"})
    with pytest.raises(UsageError, match="can't be loaded"):  # its head has one row, not three
        model(three)
    head_lost(three)
    with pytest.raises(UsageError, match=r"no reward head: its weights lack score\.weight"):
        model(three)
    with pytest.raises(UsageError, match="nowhere"):
        model(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no chat template"):
        model(folder, chat_template=True)
    with pytest.raises(UsageError, match="no device 'gpu'"):
        model(folder, device="gpu")


def test_it_takes_the_threads_of_its_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        for given, expected in (("1", 1), ("2", 2), ("", len(os.sched_getaffinity(0)))):
            monkeypatch.setenv("OMP_NUM_THREADS", given)
            model(folder)(samples("a"))
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_scope_follows_the_parameter_and_the_need_stays(folder: Path) -> None:
    assert model(folder).tags.scope == "group"
    batch = model(folder, scope="batch")
    assert batch.tags.scope == "batch"
    assert batch.requires == {"reward_model"}


def test_model_conforms(folder: Path) -> None:
    given = [
        RewardInputs(prompt="What is 2 + 2?", response=text, label="4") for text in ("4", "four")
    ]
    check_reward("model", model=str(folder), samples=given, examples=2)


def test_rewards_are_plain_numbers(folder: Path) -> None:
    (answer,) = model(folder)(samples("a"))
    assert isinstance(answer, Reward)
    assert type(answer.score) is float


def test_model_is_named_by_its_folder_alone(tmp_path: Path, monkeypatch: Any) -> None:
    """`model:PATH`; a module of that name is still a module."""
    from rlx.core.plugins import PluginSystem

    (tmp_path / "rm" / "export").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    # Another test may have left a folder or a module of that name to be imported.
    monkeypatch.delitem(sys.modules, "model", raising=False)
    paths = [path for path in sys.path if not (Path(path) / "model").exists()]
    monkeypatch.setattr(sys, "path", paths)
    system = PluginSystem.load(rlxfile=False)
    ref = system.ref("rewards", "model:rm/export", {"combine": "min"})
    assert ref.target.endswith("model:Model")
    assert ref.params == {"model": str(tmp_path / "rm" / "export"), "combine": "min"}
    with pytest.raises(UsageError, match="no module 'model'"):
        system.ref("rewards", "model:somewhere/else")
