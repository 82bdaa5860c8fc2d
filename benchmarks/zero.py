"""The loss curve under ZeRO 0, 2 and 3 on one and two ranks: how far from stage 0 on one rank?

The embedded model in float32, loss `ppo` with a KL term, the same ten batches of 32 rollouts.
Adam divides each gradient by its own size, so that rounding grows from step to step; shown are
the largest relative differences over ten steps.

    python -m benchmarks.zero
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

STAGES = (0, 2, 3)
STEPS = 10
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
    """All stages on one rank; rank 0 writes `[stage, [loss, …], [norm, …]]` for each."""
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
    for stage in STAGES:
        learner = PolicyLearner(
            model=model,
            settings=LearnerConfig(lr=1e-3, dtype="float32", zero_stage=stage),  # type: ignore[arg-type]
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
        curves.append([stage, losses, norms])
    if rank == 0:
        (Path(folder) / f"{world}.json").write_text(json.dumps(curves))
    if world > 1:
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort an ordinary exit of the interpreter


def curves() -> dict[tuple[int, int], tuple[list[float], list[float]]]:
    """(stage, ranks) → losses and gradient norms, step by step."""
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
            for stage, losses, norms in json.loads((Path(folder) / f"{world}.json").read_text()):
                found[stage, world] = (losses, norms)
    return found


def main() -> None:
    found = curves()
    losses, norms = (np.array(one) for one in found[0, 1])
    print("| ZeRO | ranks | first loss | last loss | loss differs by | gradient norm differs by |")
    print("|---:|---:|---:|---:|---:|---:|")
    for (stage, world), (mine, mine_norms) in found.items():
        gap = np.abs(np.array(mine) - losses).max() / np.abs(losses).max()
        norm_gap = (np.abs(np.array(mine_norms) - norms) / norms).max()
        print(
            f"| {stage} | {world} | {mine[0]:.6f} | {mine[-1]:.6f} | {gap:.1e} | {norm_gap:.1e} |"
        )


if __name__ == "__main__":
    main()
