import torch
from rlx_asymmetric.loss import Asymmetric

import rlx


def test_conforms(check_loss):
    check_loss(Asymmetric)
    check_loss(Asymmetric, balance=0.5, decay=0.0)


def step(loss, loss_inputs, number, advantages=(2.0, -1.0, -1.0)):
    x = loss_inputs(
        logprobs=[-1.0] * len(advantages), advantages=advantages, metadata={"step": number}
    )
    return loss(x)


def test_first_step_is_unweighted_and_later_ones_are_balanced(loss_inputs):
    loss = Asymmetric(decay=0.0)
    assert step(loss, loss_inputs, 0).metrics["negative_weight"] == 1.0
    outputs = step(loss, loss_inputs, 1, (1.0, -1.0, -1.0, -1.0))
    assert outputs.metrics["negative_weight"] == 1.0  # step 0 pulled 2 up and pushed 2 down
    outputs = step(loss, loss_inputs, 2)
    assert torch.isclose(outputs.metrics["negative_weight"], torch.tensor(1 / 3).double())
    assert torch.allclose(outputs.per_token, torch.tensor([-2.0, 1 / 3, 1 / 3]).double())


def test_weight_stays_within_its_limits(loss_inputs):
    loss = Asymmetric(decay=0.0, limit=2.0)
    for number, advantages in enumerate([(9.0, -1.0), (1.0, -9.0), (1.0, -1.0)]):
        weight = step(loss, loss_inputs, number, advantages).metrics["negative_weight"]
        assert weight == (1.0, 2.0, 0.5)[number]


def test_clips_are_those_of_the_sign(loss_inputs):
    x = loss_inputs(
        logprobs=[-0.1, -0.1, -4.0, -4.0],
        old_logprobs=[-1.0, -1.0, -1.0, -1.0],
        advantages=[1.0, -1.0, 1.0, -1.0],
    )
    rlx.resolve("losses", Asymmetric)(x).per_token.sum().backward()
    assert (x.logprobs.grad != 0).tolist() == [False, True, True, False]
