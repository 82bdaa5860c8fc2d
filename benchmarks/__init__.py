"""Benchmarks: each module prints a table; run them on an otherwise idle machine."""
