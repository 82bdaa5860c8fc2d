"""The loss curve under ZeRO 0, 2 and 3 on one and two ranks: how far from stage 0 on one rank?

The embedded model in float32, all weights and LoRA, loss `ppo` with a KL term, the same ten batches
of 32 rollouts. Adam divides each gradient by its own size, so that rounding grows from step to
step; shown are the largest relative differences over ten steps.

Then whole runs of `rlx train` with one and two engines, same seed: a rollout's tokens depend on its
own seed alone, up to what the size of a batch does to rounding.

    python -m benchmarks.zero
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

STAGES = (0, 2, 3)
STEPS = 10
WEIGHTS: dict[str, dict[str, Any]] = {"all": {}, "LoRA": {"lora": {"rank": 8}}}
GROUPS, GROUP_SIZE, PROMPT, NEW = 4, 8, 12, 16


def batches(vocabulary: int) -> list[Any]:
    """One `TrainBatch` for each step; answers of 1 to 16 tokens."""
    from rlx.core.rollouts import TrainBatch

    found = []
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        count = GROUPS * GROUP_SIZE
        new = rng.integers(1, NEW + 1, count)
        prompts = np.repeat(rng.integers(3, vocabulary, (GROUPS, PROMPT)), GROUP_SIZE, 0)
        rows = [
            np.concatenate([prompt, rng.integers(3, vocabulary, length)])
            for prompt, length in zip(prompts, new, strict=True)
        ]
        n = int(new.sum())
        found.append(
            TrainBatch(
                tokens=np.concatenate(rows).astype(np.int32),
                lengths=new + PROMPT,
                action_lengths=new,
                action_positions=np.concatenate([PROMPT + np.arange(length) for length in new]),
                turn=np.zeros(n, np.int64),
                group=np.repeat(np.arange(GROUPS), GROUP_SIZE),
                rollout_logprobs=np.full(n, -3.0, np.float32),
                rewards=rng.normal(size=count),
                token_rewards=np.zeros(n),
                advantages=np.repeat(rng.normal(size=count), new).astype(np.float32),
                ref_logprobs=np.full(n, -3.0, np.float32),
            )
        )
    return found


def rank_main(rank: int, world: int, port: int, folder: str) -> None:
    """All stages on one rank; rank 0 writes `[weights, stage, [loss, …], [norm, …]]` for each."""
    import torch

    import rlx.embedded
    from rlx.core.config import LearnerConfig
    from rlx.core.engine.batches import take
    from rlx.core.engine.learner.learner import PolicyLearner
    from rlx.core.engine.shares import batch_shares
    from rlx.core.objective import ObjectiveSettings
    from rlx.core.references import ComponentRef

    model = str(Path(rlx.embedded.__file__).parent / "model")
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    curves = []
    for weights, stage in itertools.product(WEIGHTS, STAGES):
        learner = PolicyLearner(
            model=model,
            settings=LearnerConfig(
                lr=1e-3,
                dtype="float32",
                zero_stage=stage,  # type: ignore[arg-type]
                **WEIGHTS[weights],
            ),
            objective=ObjectiveSettings(
                aggregation="token-mean", kl_coef=0.05, entropy_coef=0.0, sequence_norm=NEW
            ),
            loss=ComponentRef(kind="losses", name="ppo", target="rlx.plugins.losses.ppo:ppo"),
            correction=ComponentRef(
                kind="corrections", name="none", target="rlx.plugins.corrections.none:none"
            ),
            temperature=1.0,
            total_updates=STEPS,
            rank=rank,
            world=world,
            master_port=port,
            threads=1,
            seed=0,
        )
        learner.start()
        losses, norms = [], []
        for step, batch in enumerate(batches(vocabulary)):
            share = batch_shares(batch, world, shared_prefix=True)[rank]
            result = learner.update([take(batch, share)], step=step)
            assert result is not None
            losses.append(result.metrics["policy/loss"])
            norms.append(result.metrics["policy/grad_norm"])
        curves.append([weights, stage, losses, norms])
    if rank == 0:
        (Path(folder) / f"{world}.json").write_text(json.dumps(curves))
    if world > 1:
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort an ordinary exit of the interpreter


def curves() -> dict[tuple[str, int, int], tuple[list[float], list[float]]]:
    """(weights, stage, ranks) → losses and gradient norms, step by step."""
    found = {}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            with socket.socket() as server:
                server.bind(("127.0.0.1", 0))
                port = server.getsockname()[1]
            ranks = [
                spawn.Process(target=rank_main, args=(rank, world, port, folder))
                for rank in range(world)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            lines = json.loads((Path(folder) / f"{world}.json").read_text())
            for weights, stage, losses, norms in lines:
                found[weights, stage, world] = (losses, norms)
    return found


def run(engines: int, folder: Path) -> list[dict[str, Any]]:
    """Metrics of each step of a whole run."""
    command = [sys.executable, "-m", "rlx", "train", "--steps", str(STEPS), "--engine"]
    command += ["transformers", "--groups", "8", "--group-size", "4", "--output", str(folder)]
    command += ["--set", f"rollout.engines={engines}", "--set", "checkpoint.export=false"]
    subprocess.run(command, check=True, capture_output=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    found = curves()
    print("| weights | ZeRO | ranks | first loss | last loss | loss differs by | norm differs by |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for (weights, stage, world), mine in found.items():
        losses = mine[0]
        print(
            f"| {weights} | {stage} | {world} | {losses[0]:.6f} | {losses[-1]:.6f} "
            f"| {_gaps(mine, found[weights, 0, 1])} |"
        )
    with tempfile.TemporaryDirectory() as folder:
        one, two = (run(engines, Path(folder) / str(engines)) for engines in (1, 2))
    names = ("reward/mean", "policy/loss", "policy/grad_norm")
    print("\n| engines | " + " | ".join(f"{name} differs by at most" for name in names) + " |")
    print("|---:|---:|---:|---:|")
    gaps = [max(abs(a[name] - b[name]) for a, b in zip(one, two, strict=True)) for name in names]
    print("| 2 | " + " | ".join(f"{gap:.1e}" for gap in gaps) + " |")


def _gaps(mine: tuple[list[float], list[float]], theirs: tuple[list[float], list[float]]) -> str:
    """Largest relative differences: of losses to the largest one, of norms each to its own."""
    losses, other_losses = np.array(mine[0]), np.array(theirs[0])
    norms, other_norms = np.array(mine[1]), np.array(theirs[1])
    loss = np.abs(losses - other_losses).max() / np.abs(other_losses).max()
    norm = (np.abs(norms - other_norms) / other_norms).max()
    return f"{loss:.1e} | {norm:.1e}"


if __name__ == "__main__":
    main()
