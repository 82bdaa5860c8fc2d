"""What becomes of runs whose processes are killed, stopped, or deprived of their disk.

    python -m benchmarks.chaos [--only NAME …] [--small] [--keep FILE] [--folder FOLDER]

Prints a Markdown table (docs/reliability.md holds one). An experiment is a short run of the model
that ships with rlx; with `--keep`, those that the file has are not done again, so that a long list
can be done in pieces.
"""
