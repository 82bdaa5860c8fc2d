"""What TRL's environment runs: scripts that import TRL and nothing of rlx, and print JSON."""
