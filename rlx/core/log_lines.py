"""A line in a run's `logs/`: time, level, who, message; lines without are part of the one before.

2026-03-01T14:20:03.123 INFO rlx.worker: learner-0 is ready
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import NamedTuple

LOGS_NAME = "logs"
DRIVER_LOG = "driver.log"
_START = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")


class LogLine(NamedTuple):
    """One line of a log."""

    time: str
    """Of this line, or of the last one before it that has a time; empty before the first."""
    source: str
    """File name without its ending: `driver`, `learner-0`, …"""
    text: str


def formatter() -> logging.Formatter:
    """What writes such lines."""
    form = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
    return logging.Formatter(form, "%Y-%m-%dT%H:%M:%S")


def read_lines(source: str, text: str, *, since: str = "") -> Iterator[LogLine]:
    """The lines of a log; `since` is the time of the line before the first."""
    time = since
    for line in text.splitlines():
        if match := _START.match(line):
            time = match[1]
        yield LogLine(time, source, line)
