"""A whole rlx plugin: one function and, in pyproject.toml, one line that gives it a name."""

from rlx import EstimatorInputs, Tensor


def zscore(x: EstimatorInputs, *, eps: float = 1e-6) -> Tensor:
    """Rewards, standardised within each group.

    Formula: A = (r - mean_group(r)) / (std_group(r) + eps).
    Source: DeepSeekMath, arXiv:2402.03300.

    Args:
        eps: keeps the division finite when all rewards of a group are equal.

    Returns:
        [B].
    """
    return (x.rewards - x.group_mean(x.rewards)) / (x.group_std(x.rewards) + eps)
