"""`rlx train` beside TRL's GRPOTrainer: the same work, side by side.

    python -m benchmarks.prepare_smollm2
    python -m benchmarks.vs_trl [tiny short long] [--settings …] [--trl-python PATH]

The same model, prompts, group size, lengths, optimizer and reward, one update a step, as many
threads. Every rollout has all of its tokens: the model of both sides has no end token. Seconds are
of a step, the mean of all but the first (which warms up); peak memory is that of all processes of
the command. The sides take turns.

| case | model | rollouts a step |
|---|---|---|
| tiny | 0.3 M random weights, 259 tokens | 256 = 32 prompts × 8, 8 + 32 tokens |
| short | SmolLM2-135M-Instruct | 64 = 8 prompts × 8, 8 + 32 tokens |
| long | SmolLM2-135M-Instruct | 64 = 8 prompts × 8, 256 + 32 tokens |

Prints a Markdown table (docs/performance.md holds one).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks import DATA
from benchmarks.measuring import measure, warn_if_busy
from benchmarks.trl_environment import add_side_options, in_turns, trl_python

MODEL = "models/smollm2-135m-instruct"
SIDES = Path(__file__).parent / "trl_side"
NEW_TOKENS = 32
GROUP_SIZE = 8
LR = 1e-6
PHASES = ("rollout", "reward", "score", "update", "publish", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and a shape of work."""

    groups: int
    prompt_tokens: int
    steps: int
    """With the first, which does not count."""
    trl: tuple[str, ...]
    """Settings of TRL: those that may be its best, and float32 as it is stored by default."""
    rlx: Mapping[str, tuple[str, ...]]
    """Words for `rlx train`, by name; a run's phases are those of the first."""


INLINE = ("--runtime", "inline", "--engine", "transformers")
VLLM = {
    "rlx": ("--engine", "vllm"),
    "rlx, one process, small micro-batches": (
        *("--runtime", "inline", "--engine", "vllm", "--set", "learner.token_budget=1200"),
    ),
}
CASES = {
    "tiny": Case(groups=32, prompt_tokens=8, steps=21, trl=("float32",), rlx={"rlx": INLINE}),
    "short": Case(
        groups=8,
        prompt_tokens=8,
        steps=4,
        trl=("bfloat16", "bfloat16, batches of 16", "float32"),
        rlx=VLLM,
    ),
    "long": Case(groups=8, prompt_tokens=256, steps=2, trl=("bfloat16, batches of 16",), rlx=VLLM),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One side's training."""

    seconds: float
    """Of a step."""
    peak_gib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="|".join(CASES))
    parser.add_argument("--steps", type=int, help="steps of a run, with the first")
    parser.add_argument("--words", nargs="+", default=[], help="further words for `rlx train`")
    add_side_options(parser)
    arguments = parser.parse_args()
    python = "" if arguments.only == "rlx" else trl_python(arguments.trl_python)
    warn_if_busy()
    print("| case | side | seconds a step | rollouts/s | tokens/s | peak GiB |")
    print("|---|---|---|---|---|---|")
    for name in arguments.cases:
        case = CASES[name]
        steps = arguments.steps or case.steps
        with tempfile.TemporaryDirectory() as folder:
            model, data = prepare(case, Path(folder), tiny=name == "tiny")
            sides: dict[str, Callable[[], Outcome]] = {}
            if arguments.only != "rlx":
                for settings in arguments.settings or case.trl:
                    sides[f"TRL, {settings}"] = trl_side(python, case, steps, model, data, settings)
            if arguments.only != "trl":
                for side, words in case.rlx.items():
                    sides[side] = rlx_side(case, steps, model, data, (*words, *arguments.words))
            compare(name, case, sides, arguments.rounds)


def compare(name: str, case: Case, sides: dict[str, Callable[[], Outcome]], rounds: int) -> None:
    """Run the sides in turns and print a line each, then the ratios of their speeds."""
    found = in_turns(sides, rounds)
    rollouts = case.groups * GROUP_SIZE
    seconds = {side: fmean(one.seconds for one in outcomes) for side, outcomes in found.items()}
    for side, outcomes in found.items():
        speed = rollouts / seconds[side]
        peak = max(one.peak_gib for one in outcomes)
        print(
            f"| {name} | {side} | {seconds[side]:.2f} | {speed:,.1f} | {speed * NEW_TOKENS:,.0f} "
            f"| {peak:.2f} |",
            flush=True,
        )
    trl = [side for side in seconds if side.startswith("TRL")]
    for ours, theirs in itertools.product([one for one in seconds if one not in trl], trl):
        ratio = seconds[theirs] / seconds[ours]
        print(f"| {name} | {ours} ÷ {theirs} | | **{ratio:.2f}** | | |", flush=True)


def prepare(case: Case, folder: Path, *, tiny: bool) -> tuple[Path, Path]:
    """The model without an end token, and prompts of the same number of tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from rlx.embedded import MODEL_FOLDER

    source = MODEL_FOLDER if tiny else MODEL
    tokenizer = AutoTokenizer.from_pretrained(source)
    if tiny:
        shape = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=3,
            max_position_embeddings=512,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = LlamaForCausalLM(shape)
    else:
        model = AutoModelForCausalLM.from_pretrained(source)
    for config in (model.config, model.generation_config):
        config.eos_token_id = None
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    prompts = prompts_of(tokenizer, case.prompt_tokens, case.groups)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return folder / "model", data


def prompts_of(tokenizer: object, length: int, count: int) -> list[str]:
    """Beginnings of GSM8K's problems that have exactly `length` tokens."""
    found: list[str] = []
    text = ""
    for line in (DATA / "gsm8k-train.jsonl").open():
        text += json.loads(line)["question"] + " "
        tokens = tokenizer(text)["input_ids"][:length]  # type: ignore[operator]
        if len(tokens) < length:
            continue
        prompt = tokenizer.decode(tokens, skip_special_tokens=True)  # type: ignore[attr-defined]
        if len(tokenizer(prompt)["input_ids"]) == length:  # type: ignore[operator]
            found.append(prompt)
        if len(found) == count:
            return found
        text = ""
    raise RuntimeError(f"the data has only {len(found)} prompts of {length} tokens")


def trl_side(
    python: str, case: Case, steps: int, model: Path, data: Path, settings: str
) -> Callable[[], Outcome]:
    job = {
        "model": str(model),
        "data": str(data),
        "groups": case.groups,
        "group_size": GROUP_SIZE,
        "new_tokens": NEW_TOKENS,
        "steps": steps,
        "lr": LR,
        "settings": settings,
        "threads": len(os.sched_getaffinity(0)),
    }

    def run() -> Outcome:
        done = measure([python, str(SIDES / "grpo.py"), json.dumps(job)])
        answer = json.loads(done.output.splitlines()[-1])
        if answer["mean_length"] < 0.98 * NEW_TOKENS:
            length = answer["mean_length"]
            print(f"note: TRL's answers have {length:.1f} tokens on average", file=sys.stderr)
        return Outcome(seconds=fmean(answer["steps"][1:]), peak_gib=done.peak_gib)

    return run


def rlx_side(
    case: Case, steps: int, model: Path, data: Path, words: tuple[str, ...]
) -> Callable[[], Outcome]:
    def run() -> Outcome:
        found = phases(case, steps, model, data, words)
        parts = ", ".join(f"{name} {found[name]:.2f}" for name in PHASES)
        print(f"rlx, seconds: {parts}", file=sys.stderr)
        return Outcome(seconds=found["step"], peak_gib=found["peak_gib"])

    return run


def phases(
    case: Case, steps: int, model: Path, data: Path, words: Sequence[str] | None = None
) -> dict[str, float]:
    """Seconds of a step of `rlx train` and of its phases, and the peak memory.

    Args:
        words: for `rlx train`; unset: the case's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "rlx", "train", "--model", str(model)]
        command += ["--data", str(data), "--reward", f"trl:{SIDES / 'rewards.py'}:vowels"]
        command += ["--groups", str(case.groups), "--group-size", str(GROUP_SIZE)]
        command += ["--max-new-tokens", str(NEW_TOKENS), "--steps", str(steps)]
        command += ["--lr", str(LR), "--output", str(output)]
        for setting in ("data.chat_template=false", "data.label=null", "checkpoint.export=false"):
            command += ["--set", setting]
        done = measure([*command, *(next(iter(case.rlx.values())) if words is None else words)])
        lines = (output / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][1:]
    found = {name: fmean(one[f"time/{name}"] for one in records) for name in PHASES}
    return {**found, "peak_gib": done.peak_gib}


if __name__ == "__main__":
    main()
