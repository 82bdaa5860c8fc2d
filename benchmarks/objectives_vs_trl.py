"""rlx's objectives beside the losses of TRL's trainers, on the same model and the same batch.

    python -m benchmarks.objectives_vs_trl [names …] [--trl-python PATH]

A small random model in float32, and another one as reference and teacher. TRL's trainer makes a
batch of the rows, computes its loss and differentiates it. rlx is given the tokens of that very
batch, packs them, and does the same with its own learner's model and its objective. Prints both
losses and how far apart values and gradients are, as a Markdown table (docs/performance.md).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

import rlx
from benchmarks import DATA
from benchmarks.trl_environment import add_option, trl_python
from benchmarks.vs_trl_offline import pair, solution
from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.model import load_policy
from rlx.core.engine.learner.packing import MicroBatch, make_micro_batches
from rlx.core.engine.learner.scored_model import load_scores
from rlx.core.objective import Denominators
from rlx.core.offline.inputs import ObjectiveInputs
from rlx.core.offline.rows import RowBatch
from rlx.core.offline.share import objective_share

SIDE = Path(__file__).parent / "trl_side" / "objectives.py"
SETTINGS = LearnerConfig(dtype="float32", attention="sdpa")
CPU = torch.device("cpu")
ROWS = 4
LONGEST = 900
"""Characters of a row."""

Result: TypeAlias = tuple[float, dict[str, Tensor]]
"""Loss, and its gradient by parameter."""

# Name: rlx's objective with its parameters, and what differs by convention.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "sft": ("sft", {}, ""),
    "rm": ("rm", {}, ""),
    "dpo": ("dpo", {"beta": 0.1}, ""),
    "dpo+nll": (
        "dpo",
        {"beta": 0.1, "nll_coef": 1.0},
        "likelihood: rlx averages over a row's tokens, then over rows; TRL over all tokens",
    ),
    "dpo+nll, one pair": ("dpo", {"beta": 0.1, "nll_coef": 1.0}, "of one row both are the same"),
    "ipo": ("ipo", {"beta": 0.1, "length_normalized": True}, "TRL's is `length_normalized`"),
    "simpo": ("simpo", {"beta": 2.0, "gamma": 1.0}, ""),
    "orpo": (
        "orpo",
        {"beta": 0.1},
        "likelihood: rlx of the answer, row by row; TRL of prompt and answer, over all tokens",
    ),
    "orpo, 1.1": (
        "orpo",
        {"beta": 1.1},
        "the odds ratio alone: what β = 1.1 adds to β = 0.1",
    ),
    "kto": ("kto", {"beta": 0.1}, ""),
    "forward_kl": ("distill", {"divergence": "forward_kl"}, ""),
    "reverse_kl": ("distill", {"divergence": "reverse_kl"}, ""),
    "js": ("distill", {"divergence": "js", "beta": 0.5}, ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="objective")
    add_option(parser)
    arguments = parser.parse_args()
    python = trl_python(arguments.trl_python)
    print("| objective | rlx | TRL | value | gradient | convention |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder)
        for case in arguments.names:
            found = trl_result(python, case, folder)
            theirs = found["loss"], found["gradient"]
            ours = rlx_result(case, found["inputs"], folder)
            if case == "orpo, 1.1":
                base = trl_result(python, "orpo", folder)
                theirs = minus(theirs, (base["loss"], base["gradient"]))
                ours = minus(ours, rlx_result("orpo", base["inputs"], folder))
            value = abs(ours[0] - theirs[0]) / abs(theirs[0])
            print(
                f"| {case} | {ours[0]:.7f} | {theirs[0]:.7f} | {value:.1e} "
                f"| {distance(ours[1], theirs[1]):.1e} | {CASES[case][2]} |",
                flush=True,
            )


def minus(whole: Result, part: Result) -> Result:
    """The loss and gradient of what one loss has and the other has not."""
    return whole[0] - part[0], {name: g - part[1][name] for name, g in whole[1].items()}


def make_models(folder: Path) -> None:
    """Random models over the embedded tokenizer: policy, reference, and one with a score head."""
    from transformers import (
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
    )

    from rlx.embedded import MODEL_FOLDER

    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1,
        num_labels=1,
    )
    torch.manual_seed(0)
    for name, kind in (
        ("policy", LlamaForCausalLM),
        ("reference", LlamaForCausalLM),
        ("scorer", LlamaForSequenceClassification),
    ):
        kind(shape).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def rows_of(case: str) -> list[dict[str, Any]]:
    """A few short rows of real data, in the columns that TRL reads."""
    if case in ("sft", "kto", "forward_kl", "reverse_kl", "js"):
        lines = (DATA / "gsm8k-train.jsonl").open()
        rows: list[dict[str, Any]] = [dict(solution(json.loads(line))) for line in lines]
    else:
        lines = (DATA / "hh-harmless-pairs.jsonl").open()
        rows = [dict(row) for line in lines if (row := pair(json.loads(line)))]
    rows = [row for row in rows if sum(map(len, row.values())) < LONGEST][:ROWS]
    if case == "dpo+nll, one pair":
        rows = rows[:1]
    if case == "kto":
        rows = [{**row, "label": index % 2 == 0} for index, row in enumerate(rows)]
    return rows


def trl_result(python: str, case: str, folder: Path) -> Any:
    job = {
        "objective": case,
        "rows": rows_of(case),
        "output": str(folder / f"{case}.pt"),
        **{name: str(folder / name) for name in ("policy", "reference", "scorer")},
    }
    done = subprocess.run([python, str(SIDE), json.dumps(job)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"TRL failed on {case}:\n{done.stderr[-3000:]}")
    return torch.load(folder / f"{case}.pt")


# ---------------------------------------------------------------------------------- the rlx side


def rlx_result(case: str, inputs: Mapping[str, Tensor], folder: Path) -> Result:
    """Loss and gradient of rlx's objective on the sequences of TRL's batch."""
    name, params, _ = CASES[case]
    objective = rlx.resolve("objectives", name, **params)
    pairs = name in ("rm", "dpo", "ipo", "simpo", "orpo")
    batch = batch_of(inputs, scores=name == "rm", pairs=pairs)
    if name == "rm":
        loaded: Any = load_scores(
            str(folder / "scorer"), SETTINGS, CPU, kind="score", seed=0, pad_token_id=None
        )
        model = loaded.module
    else:
        model = load_policy(str(folder / "policy"), SETTINGS, 1.0, CPU).module
    reference = load_policy(str(folder / "reference"), SETTINGS, 1.0, CPU).module
    extra: dict[str, Any] = {}
    if name == "kto":
        extra["desirable"] = inputs["label"].bool()
        extra["kl_baseline"] = kl_baseline(inputs, model, reference)
    counts = Denominators(tokens=batch.action_count, sequences=batch.rollout_count)
    total = 0.0
    for micro in make_micro_batches(batch, row_tokens=512, token_budget=2048):
        x = ObjectiveInputs(**fields(name, batch, micro, model, reference, extra))
        per = objective.tags.extra["per"]
        share = objective_share(x, objective=objective, per=per, denominators=counts)
        share.loss.backward()  # type: ignore[no-untyped-call]
        total += share.loss.item()
    named = model.model.named_parameters()
    return total, {key: value.grad for key, value in named if value.grad is not None}


def batch_of(inputs: Mapping[str, Tensor], *, scores: bool, pairs: bool) -> RowBatch:
    """TRL's padded batch as sequences, chosen and rejected ones of a pair next to each other."""
    if "chosen_input_ids" in inputs:
        sides = [
            sequences(
                inputs[f"{side}_input_ids"],
                inputs[f"{side}_attention_mask"],
                inputs[f"{side}_labels"] != -100,
            )
            for side in ("chosen", "rejected")
        ]
        found = [one for both in zip(*sides, strict=True) for one in both]
    else:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        trained = inputs.get("completion_mask")
        if trained is None:
            trained = inputs["labels"] != -100 if "labels" in inputs else mask
        found = sequences(ids, mask, trained)
        if pairs:  # all chosen ones, then all rejected ones
            half = len(found) // 2
            found = [one for both in zip(found[:half], found[half:], strict=True) for one in both]
    if scores:
        found = [(tokens, np.array([len(tokens) - 1])) for tokens, _ in found]
    positions = [where for _, where in found]
    rows = len(found) // (2 if pairs else 1)
    return RowBatch(
        tokens=np.concatenate([tokens for tokens, _ in found]),
        lengths=np.array([len(tokens) for tokens, _ in found]),
        action_lengths=np.array([len(where) for where in positions]),
        action_positions=np.concatenate(positions),
        turn=np.zeros(sum(map(len, positions)), np.int64),
        number=np.arange(rows),
        source=np.zeros(rows, np.int64),
        sources=("trl",),
        per_row=2 if pairs else 1,
    )


def sequences(ids: Tensor, mask: Tensor, trained: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens of each row without padding, and the positions of the trained ones."""
    found = []
    for row in range(len(ids)):
        real = mask[row].bool()
        tokens = ids[row][real].numpy().astype(np.int32)
        where = np.flatnonzero(trained[row][real].numpy())
        found.append((tokens, where[where > 0]))
    return found


def fields(
    name: str, batch: RowBatch, micro: MicroBatch, model: Any, reference: Any, extra: dict[str, Any]
) -> dict[str, Any]:
    """What the learner gives an objective of a micro-batch."""
    rows = torch.from_numpy(batch.rollout_of[micro.sequences])
    given: dict[str, Any] = {
        "lengths": torch.from_numpy(micro.action_lengths),
        "group": rows,
        "turn": torch.from_numpy(batch.turn[micro.actions]),
        "targets": torch.from_numpy(micro.targets),
    }
    if batch.per_row == 2:
        given["side"] = torch.from_numpy(micro.sequences % 2 == 0)
    if name == "rm":
        given["scores"] = call(model, micro)[0]
    elif name == "distill":
        given["logits"] = logits(model, micro)
        given["teacher_logits"] = logits(reference, micro).detach()
    else:
        given["logprobs"] = call(model, micro, entropy=False)[0]
        given["ref_logprobs"] = call(reference, micro, entropy=False)[0].detach()
    if "kl_baseline" in extra:
        given["kl_baseline"] = extra["kl_baseline"]
        given["desirable"] = extra["desirable"][rows]
    return given


def call(model: Any, micro: MicroBatch, **options: Any) -> tuple[Tensor, ...]:
    arrays = (micro.tokens, micro.positions, micro.source, micro.targets)
    answers: tuple[Tensor, ...] = model(*map(torch.from_numpy, arrays), **options)
    return answers


def logits(model: Any, micro: MicroBatch) -> Tensor:
    hidden = model.hidden(torch.from_numpy(micro.tokens), torch.from_numpy(micro.positions))
    found: Tensor = model.head(hidden.flatten(0, 1)[torch.from_numpy(micro.source)])
    return found


@torch.no_grad()
def kl_baseline(inputs: Mapping[str, Tensor], model: Any, reference: Any) -> Tensor:
    """Mean over the mismatched rows, which are TRL's own, of Σ_t (log π − log π_ref)."""
    names = ("input_ids", "attention_mask", "completion_mask")
    others = batch_of({key: inputs[f"KL_{key}"] for key in names}, scores=False, pairs=False)
    total = torch.zeros(())
    for micro in make_micro_batches(others, row_tokens=512, token_budget=2048):
        gap = call(model, micro, entropy=False)[0] - call(reference, micro, entropy=False)[0]
        total += gap.sum()
    return total / others.rollout_count


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """‖ours − theirs‖ / ‖theirs‖ over all parameters."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"other parameters have gradients: {ours.keys() ^ theirs.keys()}")
    apart = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
    whole = sum(float(value.double().square().sum()) for value in theirs.values())
    return float((apart / whole) ** 0.5)


if __name__ == "__main__":
    main()
