import string

import gymnasium
import pytest
from gymnasium import spaces
from rlx_gymnasium import choose, load, make, play, show

from rlx import UsageError
from rlx.testing import play_agent

LAKE = {
    "env": "FrozenLake-v1",
    "actions": ["left", "down", "right", "up"],
    "options": {"is_slippery": False},
}
TO_THE_GIFT = ["down", "down", "right", "right", "down", "right"]


class Guess(gymnasium.Env):
    """Guess a word; both sides speak text."""

    metadata = {"render_modes": ["ansi"]}
    action_space = spaces.Text(5)
    observation_space = spaces.Text(50, charset=string.printable)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "A word of three letters?", {}

    def step(self, action):
        right = action == "cat"
        return "No.", float(right), right, False, {}


gymnasium.register("Guess-v0", Guess)


def test_a_row_opens_the_game():
    row, *rest = load(**LAKE, size=3, instructions="Reach G.")
    assert len(rest) == 2
    assert row["prompt"] == (
        "Reach G.\nAnswer with one of: left, down, right, up.\n[S]FFF\nFHFH\nFFFH\nHFFG\n"
    )


def test_a_game_is_played_to_its_end():
    row = load(**LAKE, size=1)[0]
    rollout = play_agent(play, TO_THE_GIFT, **row)
    assert [span.reward for span in rollout.spans] == [0.0] * 5 + [1.0]
    assert rollout.metrics == {"invalid_actions": 0.0, "return": 1.0}
    assert rollout.finish_reason == "stop"
    assert "SFFF\n[F]HFH" in rollout.text


def test_an_answer_without_an_action_stands_still():
    row = load(**LAKE, size=1)[0]
    rollout = play_agent(play, ["well", "DOWN, I think", "down, no: right"], **row)
    assert [span.reward for span in rollout.spans] == [-0.1, 0.0, 0.0]
    assert rollout.text.count("[F]") == 1
    assert "That is no action" in rollout.text


def test_an_environment_that_speaks_text():
    row = load(env="Guess-v0", size=1)[0]
    assert row["prompt"].endswith("A word of three letters?\n")
    rollout = play_agent(play, ["dog", "cat"], **row)
    assert [span.reward for span in rollout.spans] == [0.0, 1.0]


def test_numbers_are_shown_where_there_is_no_text():
    game = make("Blackjack-v1", None) if "Blackjack-v1" in gymnasium.registry else None
    if game is not None:
        observation, _ = game.reset(seed=1)
        assert show(game, observation).startswith("(")
        assert choose("1", ["0", "1"], game) == 1


def test_mistakes_are_usage_errors():
    with pytest.raises(UsageError, match="doesn't exist"):
        load(env="FrozenLaek-v1")
    with pytest.raises(UsageError, match="has 4 actions, not 2"):
        load(env="FrozenLake-v1", actions=["left", "right"])


def test_agent_conforms(check_agent):
    check_agent(play, examples=6, max_turns=3)
