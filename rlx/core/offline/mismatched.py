"""Prompts followed by other rows' answers: what a policy's KL to the reference is measured on.

Row i gets the answer of row (i + ⌊R/2⌋) mod R, or of the next one whose prompt is another: rows of
one prompt often stand side by side, and their answers would match.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rlx.core.offline.rows import RowBatch


def mismatched(rows: RowBatch, max_length: int) -> RowBatch:
    """Row for row its prompt with another row's answer, cut to length.

    With a single prompt in the data every answer matches; rows then keep their neighbours'.
    """
    starts = np.cumsum(rows.lengths) - rows.lengths
    firsts = rows.action_positions[np.cumsum(rows.action_lengths) - rows.action_lengths]
    prompts = [
        rows.tokens[start : start + first] for start, first in zip(starts, firsts, strict=True)
    ]
    keys = [prompt.tobytes() for prompt in prompts]
    single = len(set(keys)) == 1  # looking for another prompt would take R² comparisons
    parts, prompt_lengths = [], []
    for row, prompt in enumerate(prompts):
        other = (row + 1) % len(keys) if single else _partner(row, keys)
        stop = starts[other] + rows.lengths[other]
        answer = rows.tokens[starts[other] + firsts[other] : stop]
        room = max(max_length - len(prompt), 1)
        parts.append(np.concatenate([prompt, answer[:room]]))
        prompt_lengths.append(len(prompt))
    lengths = np.array([len(part) for part in parts], np.int64)
    action_lengths = lengths - np.array(prompt_lengths, np.int64)
    positions = [
        np.arange(first, length) for first, length in zip(prompt_lengths, lengths, strict=True)
    ]
    return dataclasses.replace(
        rows,
        tokens=np.concatenate(parts),
        lengths=lengths,
        action_lengths=action_lengths,
        action_positions=np.concatenate(positions),
        turn=np.zeros(int(action_lengths.sum()), np.int64),
    )


def _partner(row: int, keys: list[bytes]) -> int:
    count = len(keys)
    for step in range(count // 2, count // 2 + count):
        other = (row + step) % count
        if keys[other] != keys[row]:
            return other
    raise AssertionError("one prompt alone")
