"""Whole runs with adapters through the command line: engine, reference, checkpoints, exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import arguments, metrics, run, weights

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def interrupted(folder: Path, step: int) -> None:
    """Leave a finished run as a kill after `step` would have left it."""
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > step:
            path.rename(folder.parent / path.name)
    (folder / "export").rename(folder.parent / "export")
    (folder / "finished.json").unlink()


def test_engine_has_the_adapters_weights_and_the_reference_is_the_policy_without_them(
    workspace: Path,
) -> None:
    """Two kinds of layers of the real vLLM, which keeps q, k and v in one tensor (about 40 s)."""
    targets = "--lora-rank 4 --lora-targets q_proj --lora-targets down_proj".split()
    words = [*arguments("r", steps=3, runtime="inline", engine="vllm"), "--kl-coef", "0.01"]
    run(workspace, [*words, *targets, "--lr", "2e-2"])
    records, folder = metrics(workspace / "r"), workspace / "r"
    assert max(record["mismatch/logprob_abs_mean"] for record in records) < 1e-5
    assert records[0]["policy/kl_ref"] < 1e-6
    assert records[-1]["policy/kl_ref"] > 1e-5  # far above what a policy unmoved would give
    facts = json.loads((folder / "manifest.json").read_text())["facts"]
    assert "reference" not in facts
    assert facts["learner-0"]["trainable"] < facts["learner-0"]["parameters"] / 10

    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    assert {path.name for path in (checkpoint / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }
    assert not (checkpoint / "model").exists()
    run(workspace, ["export", "r", "adapter"])
    run(workspace, ["export", "--merge", "r", "from-run"])
    run(workspace, ["export", "--merge", "adapter", "from-adapter"])
    for name in ("from-run", "from-adapter"):
        assert (workspace / name / "model.safetensors").read_bytes() == weights(folder)
    said = run(workspace, ["sft", "--model", "adapter", "--data", "data.jsonl"], code=2)
    assert "rlx export --merge" in said


def test_adapters_on_fixed_data_resume_in_mid_epoch_bit_by_bit(workspace: Path) -> None:
    """A checkpoint of adapters becomes a model when one is asked for (about 40 s)."""
    rows = [
        {"prompt": f"{i % 7}+{i}=", "completion": str(i + (i % 7) * (i % 2)), "label": i % 2 == 1}
        for i in range(40)
    ]
    (workspace / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "kto --model tiny --data judged.jsonl --runtime inline --batch-size 8 --lora-rank 4 "
        "--lr 1e-2 --checkpoint-every 2 --set checkpoint.keep=5 --output r "
        "--set learner.lora.dropout=0.1"
    ).split()
    run(workspace, words)
    whole, final = metrics(workspace / "r"), weights(workspace / "r")
    assert len(whole) == 5
    assert len({record["train/loss"] for record in whole}) == 5
    interrupted(workspace / "r", 2)
    said = run(workspace, ["kto", "--resume", "--output", "r", "--lora-rank", "8"], code=2)
    assert "started with learner.lora.rank 4, not 8" in said
    run(workspace, ["kto", "--resume", "--output", "r"])
    assert metrics(workspace / "r") == whole
    assert weights(workspace / "r") == final
    run(
        workspace,
        "eval r/checkpoints/step-000004 --data data.jsonl --reward mypkg:digits --runtime inline "
        "--engine transformers --max-new-tokens 4 --max-tasks 4".split(),
    )
    assert (workspace / "r/merged/step-000004/model.safetensors").is_file()
