"""What stops a transfer of weights."""

from __future__ import annotations


class TransferError(RuntimeError):
    """Weights did not arrive as they were sent.

    Not an `EngineError`: part of the model may have been replaced, and an engine that fails with
    anything else takes no request any more.
    """


class LearnerLostError(TransferError):
    """The learner gave up, or is gone."""
