"""A process that trains keeps the pages of its tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import resource, threading
import torch
from rlx.core.engine.kept_memory import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(2**24)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

def on_a_thread():
    worker = threading.Thread(target=faults)
    worker.start()
    worker.join()

faults()
keep_memory()
faults()
faults()
on_a_thread()
on_a_thread()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_large_tensors_get_no_new_pages_once_memory_is_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    given_back, _, kept, _, kept_by_a_thread = map(int, done.stdout.split())
    assert max(kept, kept_by_a_thread) < given_back / 50
