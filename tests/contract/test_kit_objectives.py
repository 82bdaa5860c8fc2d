"""`check_objective`: every rule has an objective that breaks this rule and no other."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.functional import logsigmoid, softplus

import rlx
from rlx.core.offline.inputs import ObjectiveOutputs
from rlx.testing import ConformanceError, check_objective

EXAMPLES = 25
IN_CHILD = sys.argv[0].endswith("nursery.py")


def broken_rules(component) -> list[str]:
    try:
        check_objective(component, examples=EXAMPLES)
    except ConformanceError as error:
        return [violation.rule for violation in error.violations]
    return []


def nll(x):
    return -x.logprobs


@rlx.component(data="pairs")
def good_pairs(x, *, scale: float = 0.5):
    mean = x.sequence_mean(x.logprobs)
    gap = scale * (x.chosen(mean) - x.rejected(mean))
    return ObjectiveOutputs(softplus(-gap), {"gap": gap})


@rlx.component(data="pairs", head="score", per="sequence")
def good_scores(x):
    return torch.where(x.side, softplus(-x.scores), softplus(x.scores))


@rlx.component(data="steps", head="token")
def good_steps(x):
    return softplus(x.token_scores) - x.labels * x.token_scores


@rlx.component(head="logits")
def good_logits(x):
    return -torch.log_softmax(x.logits, -1).gather(-1, x.targets[:, None])[:, 0]


class GoodState:
    """Gives each further step less weight."""

    def __init__(self) -> None:
        self.steps = 0
        self.step = -1

    def __call__(self, x):
        if x.training and x.step != self.step:
            self.step, self.steps = x.step, self.steps + 1
        return -x.logprobs / max(self.steps, 1)

    def state_dict(self):
        return {"steps": self.steps, "step": self.step}

    def load_state_dict(self, state) -> None:
        self.steps, self.step = state["steps"], state["step"]


class ForgetsItsState(GoodState):
    def load_state_dict(self, state) -> None:
        self.step = state["step"]


class CountsMicroBatches(GoodState):
    def __call__(self, x):
        if x.training:
            self.steps += 1
        return -x.logprobs / max(self.steps, 1)


class LearnsFromHeldOutData(GoodState):
    def __call__(self, x):
        return super().__call__(x.replace(training=True))


def scalar(x):
    return -x.logprobs.mean()


@rlx.component(data="pairs", per="token")
def per_pair_though_tagged_per_token(x):
    return good_pairs(x).loss


def detached(x):
    return -x.logprobs.detach()


@rlx.component(data="pairs")
def wrong_way_round(x):
    mean = x.sequence_mean(x.logprobs)
    return softplus(x.chosen(mean) - x.rejected(mean))


@rlx.component(data="pairs")
def overflows(x):
    mean = x.sequence_mean(x.logprobs)
    return torch.log1p(torch.exp(x.rejected(mean) - x.chosen(mean)))


@rlx.component(data="pairs")
def pairs_by_position(x):
    mean = x.sequence_mean(x.logprobs)
    return -logsigmoid(mean[0::2] - mean[1::2]) if x.side[0] else -logsigmoid(mean[1::2])


def whole_batch(x):
    return -x.logprobs / (1 + x.batch_mean(x.logprobs.detach()) ** 2)


def mutates(x):
    loss = -x.logprobs.clone()
    x.lengths.add_(0)
    x.turn.add_(1)
    return loss


def random_below_rounding(x):
    return -x.logprobs + 1e-13 * torch.rand(x.token_count)


def halves_precision(x):
    return -x.logprobs.float()


def metric_is_a_float(x):
    return ObjectiveOutputs(-x.logprobs, {"nll": float(-x.logprobs.detach().mean())})


def depends_on_the_process(x):
    return -x.logprobs * (2 if IN_CHILD else 1)


def parameter_without_plain_form(x, *, scale: object = object()):
    return -x.logprobs


@rlx.component(data="pairs", head="score", per="token")
def tags_that_contradict(x):
    return -x.scores


WRONG = {
    "declares tags that fit together": tags_that_contradict,
    "returns [N] numbers": scalar,
    "has a gradient": detached,
    "gets smaller when the model does what the data wants": wrong_way_round,
    "stays finite at extreme answers of the model, value and gradient": overflows,
    "has the same values and gradient in one micro-batch and in several": whole_batch,
    "leaves its inputs as they are": mutates,
    "is deterministic": random_below_rounding,
    "keeps float64": halves_precision,
    "reports metrics as tensors": metric_is_a_float,
    "resolves in another process to the same component": depends_on_the_process,
    "parameters survive config.yaml": parameter_without_plain_form,
    "goes on from a checkpoint as if it had not stopped": ForgetsItsState,
    "keeps its state while held-out data is evaluated (x.training is False)": LearnsFromHeldOutData,
    "counts a step once, in however many micro-batches it comes": CountsMicroBatches,
}


@pytest.mark.parametrize(
    "component", [nll, good_pairs, good_scores, good_steps, good_logits, GoodState]
)
def test_right_objective_passes(component) -> None:
    check_objective(component, examples=EXAMPLES)


@pytest.mark.parametrize("rule", WRONG)
def test_wrong_objective_is_caught_by_its_rule_alone(rule: str) -> None:
    assert broken_rules(WRONG[rule]) == [rule]


def test_pairs_found_by_position_are_caught() -> None:
    """Micro-batches may hold the sequences of a pair in any order."""
    found = broken_rules(pairs_by_position)
    assert "does not depend on the order of the sequences" in found


def test_unit_is_what_the_tag_says() -> None:
    assert broken_rules(per_pair_though_tagged_per_token) == ["returns [N] numbers"]
