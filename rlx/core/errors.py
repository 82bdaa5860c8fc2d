"""Errors that a user can act on: what is wrong, where it was set, what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

RAISED_BY: Final = "raised by"
"""How the note begins that names the plugin to an exception of one of its hooks."""


class RlxError(Exception):
    """Base of every error that rlx raises on purpose."""

    weights_changed: bool = True
    """Set to false on an error in an update that came before the first weight was changed."""


class UsageError(RlxError):
    """A mistake in the input. The CLI prints it without a traceback and exits with code 2.

    Args:
        what: one sentence that says what is wrong.
        where: where the value came from (`--set estimator.eps`, `run.yaml:12`, a file name).
        fix: what to write instead.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_usage_error, (type(self), self.what, self.where, self.fix)


class ComponentError(RlxError):
    """A component failed while it ran (a reward raised, an estimator returned the wrong shape)."""


class EngineError(RlxError):
    """A worker, an engine or a library below rlx failed."""


class WorkerLostError(EngineError):
    """A worker's process died, hangs, or can't go on.

    Args:
        worker: its name.
        what: what became of it, for example "died during 'update'".
        hung: it still exists, but does not get on.
    """

    def __init__(self, worker: str, what: str, *, hung: bool = False) -> None:
        super().__init__(worker, what, hung)
        self.worker = worker
        self.what = what
        self.hung = hung

    def __str__(self) -> str:
        return f"the worker '{self.worker}' {self.what}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_lost, (self.worker, self.what, self.hung), self.__dict__


class ClusterLostError(EngineError):
    """The Ray cluster itself is lost: no worker can be reached, and no new one be started."""


class DivergedError(RlxError):
    """A metric was beyond its bound (`faults.bounds`) for too many steps.

    Args:
        last_good: the last step before the first of them.
    """

    def __init__(self, message: str, *, last_good: int) -> None:
        super().__init__(message)
        self.last_good = last_good


class NonFiniteError(ComponentError, EngineError):
    """A log-prob, value, loss, gradient or advantage is NaN or infinite; no weight was changed.

    Whether a component or the model is to blame can't be told from the number alone.

    Args:
        token: place of the first such number on the batch's axis of action tokens, if it has one.
    """

    def __init__(self, message: str, *, token: int | None = None) -> None:
        super().__init__(message)
        self.token = token


class RunInterrupted(RlxError):  # noqa: N818 - an orderly end, not a failure
    """Ctrl-C or SIGTERM ended the run in an orderly way.

    Args:
        signal: its number, where one is known.
    """

    def __init__(self, message: str, *, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


def _rebuild_usage_error(
    cls: type[UsageError], what: str, where: str | None, fix: str | None
) -> UsageError:
    return cls(what, where=where, fix=fix)


def _rebuild_lost(worker: str, what: str, hung: bool) -> WorkerLostError:
    return WorkerLostError(worker, what, hung=hung)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the nearest of `known`, or an empty string.

    >>> did_you_mean("zscroe", ["zscore", "other"])
    "did you mean 'zscore'?"
    """
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean '{match[0]}'?" if match else ""
