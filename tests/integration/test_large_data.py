"""A million rows: read in seconds, in little memory, and trained on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROWS = 1_000_000
TEXT = "A shop sells pens by the box, and each box has as many pens as it has boxes. "
QUESTION, ANSWER = TEXT * 3, TEXT * 4
"""Together as long as a row of GSM8K."""


def write(folder: Path, suffix: str) -> Path:
    path = folder / f"large{suffix}"
    if suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(
                f'{{"prompt": "{i}: {QUESTION}", "label": "{ANSWER}{i}"}}\n' for i in range(ROWS)
            )
        return path
    prompts = [f"{i}: {QUESTION}" for i in range(ROWS)]
    table = pa.table({"prompt": prompts, "label": [f"{ANSWER}{i}" for i in range(ROWS)]})
    if suffix == ".csv":
        pc.write_csv(table, path)
    elif suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ".arrow"])
def test_a_million_rows_train_within_ten_seconds_and_a_gigabyte(
    tmp_path: Path, suffix: str
) -> None:
    """The driver holds the model too. Seconds are those of its processor: what else the machine
    does is not counted."""
    command = (
        f"train --data {write(tmp_path, suffix).name} --runtime inline --engine transformers "
        "--steps 1 --groups 2 --group-size 2 --max-new-tokens 4 --output out"
    ).split()
    log = (tmp_path / "log.txt").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "rlx", *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    peak = 0
    while True:  # of this program: what `getrusage` says includes pytest's, which was forked
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        peak = max(peak, int(found[1]) if found else 0)
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        time.sleep(0.02)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (tmp_path / "log.txt").read_text()[-3000:]
    assert 100_000 < peak < 2**20  # KiB
    assert used.ru_utime + used.ru_stime < 15.0  # with a step, a checkpoint and an export in it
    (record,) = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text().splitlines())
    assert record["step"] == 1
    assert (record["reward/failed"], record["sampler/skipped_too_long"]) == (0, 0)
