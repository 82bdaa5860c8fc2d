"""Benchmarks: each module prints a table; run them on an otherwise idle machine."""

from pathlib import Path

DATA = Path("../shared/data")
"""Folder with GSM8K and the pairs of hh-rlhf as JSON lines."""
