"""Environments as people publish them: one turn, several turns, a tool."""

import random
from string import ascii_lowercase

import verifiers as vf
from datasets import Dataset


def exact(completion, answer, **_):
    return float(completion[-1]["content"].strip() == answer)


def load_environment(words: int = 512, kind: str = "single"):
    rng = random.Random(0)
    letters = ["".join(rng.choices(ascii_lowercase, k=rng.randint(4, 7))) for _ in range(words)]
    rows = [{"question": f"reverse {word}=", "answer": word[::-1]} for word in letters]
    dataset = Dataset.from_list(rows)
    if kind == "single":
        return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[exact]))
    if kind == "group":

        def best(states):
            return [1.0 for _ in states]

        return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[best]))
    if kind == "tool":
        return vf.ToolEnv(
            dataset=dataset, tools=[backwards], rubric=vf.Rubric(funcs=[exact]), max_turns=4
        )
    return Again(dataset=dataset, rubric=vf.Rubric(funcs=[exact]), max_turns=3)


def backwards(text: str) -> str:
    """Write a text backwards.

    Args:
        text: what to turn round.
    """
    return text[::-1]


class Again(vf.MultiTurnEnv):
    """Wrong answers get another try."""

    @vf.stop
    async def right(self, state):
        steps = state["trajectory"]
        return bool(steps) and exact(steps[-1]["completion"], state["answer"]) == 1.0

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "No. Again."}]
