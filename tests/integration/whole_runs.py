"""Whole runs through the command line: a tiny random model, its data, a user's own reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

TIMES = ("time", "throughput/", "publish/", "memory/", "engine/")
"""Metrics that measure the machine and not the run."""

REWARD_MODULE = '''
def digits(sample):
    """Share of digits in the response."""
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)


def slow_digits(sample):
    """The same, after a while: a run with it is nearly always waiting for rewards."""
    import time

    time.sleep(0.5)
    return digits(sample)


def broken(sample):
    raise RuntimeError("no reward today")


def breaks_later(sample, *, after: int = 20, counter: list = []):
    counter.append(1)
    if len(counter) > after:
        raise RuntimeError("no reward any more")
    return float(len(sample.response) % 3)
'''


def write_workspace(folder: Path) -> Path:
    """A working directory as a user has it: model folder, data file, module with rewards."""
    from tiny_tokenizer import tiny_tokenizer

    write_model(folder / "tiny", tiny_tokenizer())
    rows = [{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mypkg.py").write_text(REWARD_MODULE)
    return folder


def write_model(folder: Path, tokenizer: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def arguments(output: str, *, steps: int, runtime: str, engine: str) -> list[str]:
    return (
        f"train --model tiny --data data.jsonl --reward mypkg:digits --runtime {runtime} "
        f"--engine {engine} --steps {steps} --groups 4 --group-size 4 --max-new-tokens 8 "
        f"--lr 1e-3 --output {output}"
    ).split()


def start(folder: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    """`rlx WORDS` in a session of its own, with output in `folder/log.txt`."""
    log = (folder / "log.txt").open("a")
    return subprocess.Popen(
        [sys.executable, "-m", "rlx", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "2", "COLUMNS": "200"},
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, words: Sequence[str], *, code: int = 0, timeout: float = 240) -> str:
    """Run `rlx WORDS` to its end, check the exit code, return what it printed."""
    (folder / "log.txt").unlink(missing_ok=True)
    process = start(folder, words)
    try:
        process.wait(timeout)
    finally:
        if process.poll() is None:
            process.kill()
    text = (folder / "log.txt").read_text()
    assert process.returncode == code, text[-6000:]
    return text


def wait_for_step(folder: Path, run_folder: Path, step: int, *, timeout: float = 120) -> None:
    """Wait until the metrics of `step` are written."""
    deadline = time.monotonic() + timeout
    while len(metrics(run_folder)) < step:
        assert time.monotonic() < deadline, (folder / "log.txt").read_text()[-3000:]
        time.sleep(0.05)


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The steps' metrics without what measures the machine."""
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            break
        records.append({key: value for key, value in record.items() if not key.startswith(TIMES)})
    return records


def weights(run_folder: Path) -> bytes:
    return (run_folder / "export" / "model.safetensors").read_bytes()


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def left_over(children: Sequence[psutil.Process], *, patience: float = 3.0) -> list[str]:
    """Those of `children` that still live after `patience` seconds."""
    _, alive = psutil.wait_procs(children, timeout=patience)
    return [
        " ".join(process.cmdline())[:120]
        for process in alive
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
