import pytest
from rlx_verifiers import Verifiers, load

from rlx import UsageError
from rlx.testing import play_agent

CALL = '<tool_call>{"name": "backwards", "arguments": {"text": "abc"}}</tool_call>'


def rows(**args):
    return load(env="rlx-verifiers-demo", size=2, **args)


def trained(rollout):
    return ["".join(map(chr, rollout.tokens[s.start : s.stop - 1])) for s in rollout.spans]


def test_rows_are_the_environments():
    row, other = rows()
    assert row["prompt"] == [{"role": "user", "content": f"reverse {row['label'][::-1]}="}]
    assert row["label"] != other["label"]


@pytest.mark.parametrize("reward", [1.0, 0.0])
def test_one_turn_is_rewarded_by_the_rubric(reward):
    row = rows()[0]
    answer = row["label"] if reward else "no"
    rollout = play_agent(Verifiers, [answer], **row)
    assert trained(rollout) == [answer]
    assert rollout.spans[0].reward == reward
    assert rollout.metrics["exact"] == reward
    assert rollout.text == answer
    assert rollout.finish_reason == "stop"


def test_several_turns_are_one_sequence():
    row = rows(kind="again")[0]
    rollout = play_agent(Verifiers, ["x", "y", row["label"]], **row)
    assert trained(rollout) == ["x", "y", row["label"]]
    assert [span.reward for span in rollout.spans] == [0.0, 0.0, 1.0]
    assert tuple(rollout.segments) == (0,)
    assert "No. Again." in "".join(map(chr, rollout.tokens))


def test_tools_are_called():
    row = rows(kind="tool")[1]
    rollout = play_agent(Verifiers, [CALL, row["label"]], **row)
    assert trained(rollout) == [CALL, row["label"]]
    assert rollout.spans[-1].reward == 1.0
    whole = "".join(map(chr, rollout.tokens))
    assert "tool: cba" in whole


def test_mistakes_are_usage_errors():
    with pytest.raises(UsageError, match="can't be loaded"):
        load(env="no-such-env")
    with pytest.raises(UsageError, match="compares the rollouts"):
        rows(kind="group")
    with pytest.raises(UsageError, match="names no environment"):
        play_agent(Verifiers, ["x"])


def test_agent_conforms(check_agent):
    check_agent(Verifiers, examples=6)
