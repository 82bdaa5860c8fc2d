"""The least that a step could take here, beside what it takes: SmolLM2-135M-Instruct, GRPO.

    python -m benchmarks.prepare_smollm2
    python -m benchmarks.floor [short long]

Each floor is measured alone, in a process of its own, with all cores:

  generation   vLLM on the prompts of the case, with the settings that a run has
  training     forward and backward of the batch in bfloat16, the fastest of several shapes of rows,
               plain transformers, with the log-probs of the sampled tokens
  matmul       the multiplications of that forward and backward, at the best rate of a matrix
               product at the model's shapes

Beside them the phases of `rlx train` on the same work (`benchmarks.vs_trl`). Prints Markdown tables
(docs/performance.md holds them).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measuring import warn_if_busy
from benchmarks.vs_trl import CASES, GROUP_SIZE, NEW_TOKENS, Case, phases, prepare

ROUNDS = 3
ROW_TOKENS = (0, 160, 320, 640)
"""Tokens in a row of the training floor; 0: each sequence has its own."""
BUDGET = 4096
"""Most tokens of a forward and backward."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("cases", nargs="*", default=["short", "long"], metavar="short|long")
    parser.add_argument("--without-run", action="store_true", help="the floors alone")
    parser.add_argument("--piece", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.piece:
        piece, name, folder = arguments.piece
        print(json.dumps(_PIECES[piece](CASES[name], Path(folder))))
        return
    warn_if_busy()
    for name in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            model, data = prepare(CASES[name], Path(folder), tiny=False)
            floors = {piece: alone(piece, name, folder) for piece in _PIECES}
            run = {} if arguments.without_run else phases(CASES[name], 4, model, data)
        table(name, floors, run)


def table(name: str, floors: dict[str, dict[str, float]], run: dict[str, float]) -> None:
    generation, training = floors["generation"]["seconds"], floors["training"]["seconds"]
    matmul = floors["matmul"]
    print(f"\n{name}: {matmul['tflop']:.2f} TFLOP at {matmul['gflops']:.0f} GFLOP/s\n")
    print("| phase | floor, s | run, s |\n|---|---|---|")
    lines = [
        ("generation: vLLM alone", generation, run.get("rollout")),
        (
            f"training: forward and backward alone, {floors['training']['shape']}",
            training,
            run.get("update"),
        ),
        ("matrix products of the training alone", matmul["seconds"], None),
        ("publication", None, run.get("publish")),
        ("step", generation + training, run.get("step")),
    ]
    for label, floor, found in lines:
        shown = ["" if value is None else f"{value:.2f}" for value in (floor, found)]
        print(f"| {label} | {shown[0]} | {shown[1]} |", flush=True)
    if run:
        print(f"\nstep ÷ floors: {run['step'] / (generation + training):.2f}")


def alone(piece: str, case: str, folder: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.floor", "--piece", piece, case, folder]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{piece} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def threads() -> int:
    return len(os.sched_getaffinity(0))


def prompts(case: Case, folder: Path) -> list[list[int]]:
    """Token ids of the prompts, each as often as its group is large."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    ids = [list(tokenizer(json.loads(line)["prompt"])["input_ids"]) for line in lines]
    return [tokens for tokens in ids for _ in range(GROUP_SIZE)]


def generation(case: Case, folder: Path) -> dict[str, float]:
    """vLLM on the prompts; each round without what the one before left in the cache."""
    from rlx.core.config import RolloutConfig
    from rlx.core.engine.interfaces import GenerateRequest, Sampling
    from rlx.core.engine.rollout.vllm_core import VllmCore

    core = VllmCore(
        model=str(folder / "model"),
        settings=RolloutConfig(),
        context_length=case.prompt_tokens + NEW_TOKENS,
        dtype="bfloat16",
        seed=0,
        threads=threads(),
    )
    core.start()
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    asked = prompts(case, folder)

    def once(number: int) -> None:
        core.forget()
        for index, prompt in enumerate(asked):
            key = number * len(asked) + index
            core.add(key, GenerateRequest(id=key, prompt=prompt, sampling=sampling, seed=key))
        while core.busy():
            core.step()

    seconds = fastest(once)
    core.stop()
    return {"seconds": seconds}


def training(case: Case, folder: Path) -> dict[str, float]:
    """Forward and backward of the batch, by the fastest of the shapes."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads())
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    vocabulary = model.config.vocab_size
    length = case.prompt_tokens + NEW_TOKENS
    count = case.groups * GROUP_SIZE
    found = {}
    for wanted in ROW_TOKENS:
        per_row = max(wanted // length, 1)
        rows = count // per_row
        if any(one[0] == per_row for one in found):
            continue
        tokens = torch.randint(0, vocabulary, (rows, per_row * length))
        positions = torch.arange(length).repeat(per_row)[None].expand(rows, -1)
        # Of each sequence the last NEW_TOKENS, predicted from one before.
        wanted_at = positions[0] >= case.prompt_tokens
        source = wanted_at.nonzero()[:, 0] - 1
        at_once = max(BUDGET // (per_row * length), 1)

        def once(
            number: int,
            *,
            tokens: torch.Tensor = tokens,
            positions: torch.Tensor = positions,
            source: torch.Tensor = source,
            at_once: int = at_once,
        ) -> None:
            for part in range(0, len(tokens), at_once):
                piece = tokens[part : part + at_once]
                hidden = model.model(
                    input_ids=piece, position_ids=positions[: len(piece)], use_cache=False
                ).last_hidden_state[:, source]
                logits = model.lm_head(hidden).float()
                targets = piece[:, source + 1]
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), targets.flatten()
                ).backward()
            model.zero_grad()

        found[per_row, rows] = fastest(once)
    (per_row, rows), seconds = min(found.items(), key=lambda item: item[1])
    return {"seconds": seconds, "shape": f"{rows} rows of {per_row * length}"}  # type: ignore[dict-item]


def matmul(case: Case, folder: Path) -> dict[str, float]:
    """Seconds of the multiplications alone: 6 operations a weight and token, the head's only on
    sampled tokens."""
    import torch
    from transformers import AutoConfig

    torch.set_num_threads(threads())
    config = AutoConfig.from_pretrained(folder / "model")
    hidden, inner = config.hidden_size, config.intermediate_size
    key_value = config.num_key_value_heads * config.head_dim
    layer = 2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * inner
    rollouts = case.groups * GROUP_SIZE
    tokens = rollouts * (case.prompt_tokens + NEW_TOKENS)
    head = rollouts * NEW_TOKENS * hidden * config.vocab_size
    flop = 6 * (tokens * layer * config.num_hidden_layers + head)
    rate = 0.0
    for width in (inner, config.vocab_size):
        a = torch.randn(2560, hidden, dtype=torch.bfloat16)
        b = torch.randn(hidden, width, dtype=torch.bfloat16)
        operations = 2 * 2560 * hidden * width
        repeat = max(int(4e10 // operations), 1)

        def once(number: int, *, a: torch.Tensor = a, b: torch.Tensor = b, n: int = repeat) -> None:
            for _ in range(n):
                torch.mm(a, b)

        rate = max(rate, operations * repeat / fastest(once))
    return {"seconds": flop / rate, "tflop": flop / 1e12, "gflops": rate / 1e9}


def fastest(once: Callable[[int], None]) -> float:
    """Seconds of the fastest round after one that warms up."""
    once(0)
    found = []
    for number in range(1, ROUNDS + 1):
        started = time.perf_counter()
        once(number)
        found.append(time.perf_counter() - started)
    return min(found)


_PIECES: dict[str, Callable[[Case, Path], dict[str, float]]] = {
    "generation": generation,
    "training": training,
    "matmul": matmul,
}

if __name__ == "__main__":
    main()
