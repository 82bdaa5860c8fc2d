import torch
from rlx_zscore import zscore


def test_conforms(check_estimator):
    check_estimator(zscore)


def test_each_group_is_standardised(estimator_inputs):
    x = estimator_inputs(rewards=[0.0, 1.0, 5.0, 9.0], group=[0, 0, 1, 1])
    half = 0.5**0.5
    expected = torch.tensor([-half, half, -half, half], dtype=torch.float64)
    assert torch.allclose(zscore(x, eps=0.0), expected)
