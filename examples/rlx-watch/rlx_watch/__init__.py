"""Hooks for rlx that watch a run, and a command that looks at one."""
