"""One optimizer step of the learner alone: seconds, tokens/s, FLOP/s against a matmul, peak memory.

Groups of rollouts with a prompt in common, advantages drawn, loss `ppo` on policy; nothing is
generated. Each row is measured in a process of its own; the first step (allocation, compilation) is
left out, the fastest of the others counts. Matrix products are those of the tokens that were
computed, forward and backward; `of matmul` compares their rate with that of bare products of the
model's shapes, measured in the same process.

    python -m benchmarks.learner_step                         SmolLM2 on this machine's cores
    python -m benchmarks.learner_step --random qwen-0.5b      a random model, on a GPU if any
    python -m benchmarks.learner_step --profile short         where the time goes
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / "models/smollm2-135m-instruct"
RANDOM: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "heads": 4},
    "qwen-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "heads": 14,
    },
    "qwen-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "heads": 12,
    },
}
VOCABULARY = {"tiny": 512}
PLAIN = {"attention": "sdpa", "shared_prefix": "off"}
SETTINGS: dict[str, dict[str, Any]] = {
    "rows, sdpa": PLAIN,
    "flat, ragged": {"attention": "ragged", "shared_prefix": "off"},
    "shared prefix": {"attention": "ragged", "shared_prefix": "on"},
    "flash_attention_2": {"attention": "flash_attention_2", "shared_prefix": "off"},
    "shared prefix, dense mask": {"attention": "sdpa", "shared_prefix": "on"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Rollouts of one step."""

    groups: int = 8
    group_size: int = 8
    prompt: int
    new: int = 32


CASES = {
    "short": Case(prompt=8),
    "long": Case(prompt=256),
    "gpu": Case(groups=16, group_size=8, prompt=512, new=512),
    "tiny": Case(groups=2, group_size=4, prompt=24, new=8),
}


def rollouts(case: Case, vocabulary: int) -> Any:
    """A `TrainBatch` with random tokens and advantages."""
    from rlx.core.rollouts import TrainBatch

    rng = np.random.default_rng(0)
    count, length = case.groups * case.group_size, case.prompt + case.new
    prompts = rng.integers(3, vocabulary, (case.groups, case.prompt))
    answers = rng.integers(3, vocabulary, (count, case.new))
    n = count * case.new
    return TrainBatch(
        tokens=np.concatenate([np.repeat(prompts, case.group_size, 0), answers], 1)
        .reshape(-1)
        .astype(np.int32),
        lengths=np.full(count, length),
        action_lengths=np.full(count, case.new),
        action_positions=np.tile(np.arange(case.prompt, length), count),
        turn=np.zeros(n, np.int64),
        group=np.repeat(np.arange(case.groups), case.group_size),
        rollout_logprobs=np.full(n, -5.0, np.float32),
        rewards=rng.normal(size=count),
        token_rewards=np.zeros(n),
        advantages=rng.normal(size=n).astype(np.float32),
    )


def random_model(name: str, folder: str) -> str:
    """A random Qwen2 with two key heads."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = dict(RANDOM[name])
    config = Qwen2Config(
        num_attention_heads=sizes.pop("heads"),
        num_key_value_heads=2,
        vocab_size=VOCABULARY.get(name, 151_936),
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        **sizes,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def matmul_rate(shapes: list[tuple[int, int, int]], dtype: Any, device: Any) -> float:
    """FLOP/s of bare products of the given shapes, weighted by their work."""
    import torch

    spent = work = 0.0
    counts = collections.Counter(shapes)
    for (m, k, n), count in counts.items():
        a, b = (torch.randn(*size, dtype=dtype, device=device) for size in ((m, k), (k, n)))
        repeats = min(100, max(2, int(2e10 // (2 * m * k * n))))
        for timed in (False, True):
            _wait(device)
            start = time.perf_counter()
            for _ in range(repeats if timed else 1):
                a @ b
            _wait(device)
        spent += count * (time.perf_counter() - start) / repeats
        work += count * 2 * m * k * n
    return work / spent


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    model: str, case: Case, changes: dict[str, Any], steps: int, profiled: bool
) -> dict[str, Any]:
    """Figures of one row, in this process."""
    import torch

    from rlx.core.config import LearnerConfig
    from rlx.core.engine.learner.distributed import local_device
    from rlx.core.engine.learner.learner import PolicyLearner
    from rlx.core.engine.learner.planning import make_plan
    from rlx.core.objective import ObjectiveSettings
    from rlx.core.references import ComponentRef

    learner = PolicyLearner(
        model=model,
        settings=LearnerConfig(**changes),
        objective=ObjectiveSettings(
            aggregation="token-mean", kl_coef=0.0, entropy_coef=0.0, sequence_norm=case.new
        ),
        loss=ComponentRef(kind="losses", name="ppo", target="rlx.plugins.losses.ppo:ppo"),
        correction=ComponentRef(
            kind="corrections", name="none", target="rlx.plugins.corrections.none:none"
        ),
        temperature=1.0,
        total_updates=steps + 2,
        rank=0,
        world=1,
        master_port=0,
        threads=int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))),
        seed=0,
    )
    facts = learner.start()
    training = learner._training
    config = training.model.module.model.config
    batch = rollouts(case, config.vocab_size)
    plan = make_plan(batch, training.settings, packing=training._packing)
    computed = sum(micro.tokens.size for micro in plan.micro_batches)
    times = []
    for step in range(steps + 1):
        _wait(local_device())
        start = time.perf_counter()
        result = learner.update([batch], step=step)
        _wait(local_device())
        times.append(time.perf_counter() - start)
    assert result is not None
    peak = _peak_gib(local_device())
    if profiled:
        _profile(lambda: learner.update([batch], step=steps + 1))
    body, head = _products(config)
    flop = 6 * (computed * sum(k * n for k, n in body) + batch.action_count * head[0] * head[1])
    shapes = [(computed, *shape) for shape in body] + [(batch.action_count, *head)]
    device = local_device()
    rate = matmul_rate(shapes, getattr(torch, facts["dtype"]), device)
    return {
        "attention": facts["attention"],
        "dtype": facts["dtype"],
        "tokens": int(batch.lengths.sum()),
        "computed": int(computed),
        "seconds": min(times[1:]),
        "first": times[0],
        "tflop": flop / 1e12,
        "peak_tflops": rate / 1e12,
        "gib": peak,
    }


def _peak_gib(device: Any) -> float:
    """Most memory so far: of the accelerator, else of this process."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated() / 2**30)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _products(config: Any) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Inner and outer size of the products of all layers, and of the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = head * config.num_attention_heads, head * config.num_key_value_heads
    layer = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    layer += [(hidden, inner), (hidden, inner), (inner, hidden)]
    return layer * config.num_hidden_layers, (hidden, config.vocab_size)


def _profile(step: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30)
    print(table, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("cases", nargs="*", default=None, help=f"of {', '.join(CASES)}")
    parser.add_argument("--model", default=str(SMOLLM2))
    parser.add_argument("--random", choices=RANDOM, help="a random model of this size instead")
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, help="default: all that can run")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the learner")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        row = json.loads(options.row)
        found = measure(
            row["model"], Case(**row["case"]), row["changes"], row["steps"], row["profile"]
        )
        print("ROW " + json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(options.random, folder) if options.random else options.model
        _table(model, options)


def _table(model: str, options: argparse.Namespace) -> None:
    more = dict(pair.split("=", 1) for pair in options.set)
    print(
        "| case | settings | attention | computed of tokens | s/step | tokens/s "
        "| TFLOP | of matmul | GiB |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    for case in options.cases or ("short", "long"):
        for name in options.settings or SETTINGS:
            changes = {"lr": 1e-6, "token_budget": 8192, **SETTINGS[name], **more}
            row = {
                "model": model,
                "case": dataclasses.asdict(CASES[case]),
                "changes": changes,
                "steps": options.steps,
                "profile": options.profile,
            }
            found = _run(row)
            if isinstance(found, str):
                print(f"| {case} | {name} | not run: {found} | | | | | | |")
                continue
            part = found["tflop"] / found["seconds"] / found["peak_tflops"]
            print(
                f"| {case} | {name} | {found['attention']}, {found['dtype']} "
                f"| {found['computed']} of {found['tokens']} | {found['seconds']:.2f} "
                f"| {found['tokens'] / found['seconds']:.0f} | {found['tflop']:.2f} "
                f"| {part:.0%} of {1e3 * found['peak_tflops']:.0f} GFLOP/s | {found['gib']:.2f} |",
                flush=True,
            )


def _run(row: dict[str, Any]) -> dict[str, Any] | str:
    """The row's figures, or the last line of why there are none."""
    from rlx.core.engine.workers import KEPT_MEMORY

    command = [sys.executable, "-m", "benchmarks.learner_step", "--row", json.dumps(row)]
    env = {**os.environ, **KEPT_MEMORY}  # as in a run
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if row["profile"]:
        print(done.stderr[done.stderr.find("-----") :], file=sys.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    found: dict[str, Any] = json.loads(lines[-1][4:])
    return found


if __name__ == "__main__":
    main()
