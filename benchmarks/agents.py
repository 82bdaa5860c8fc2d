"""Train the embedded model with agents of each kind, through vLLM.

    python -m benchmarks.agents [--steps 40] [--only NAME …] [--keep FILE]

`reasoning-gym` and `verifiers` need their packages (`examples/`, `requirements/environments.lock`)
and are left out where those are not installed. Prints a Markdown table and draws the curves into
docs/agents.png. With `--keep` the runs are kept in a file, and only those that it lacks are made.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rlx

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "agents.png"
TAIL = 5
COMMON = (
    "--runtime inline --groups 32 --group-size 8 --max-new-tokens 10 --lr 2e-4 "
    "--set learner.token_budget=8192 --set learner.row_tokens=256 --set eval.sources=[] "
    "--set eval.every=0 --set checkpoint.export=false"
).split()
SPOKEN = '''
from rlx import Episode
from rlx.core.tool_calls import ToolCall, ToolCalls


def spoken(text):
    """The model that ships with rlx has letters only: its first word is a call of `submit`."""
    word = text.strip().split(" ")[0]
    if word in ("", "ok"):
        return ToolCalls(content=text)
    return ToolCalls(content=text, calls=(ToolCall(name="submit", arguments={"word": word}),))


def submit(word: str, episode: Episode) -> str:
    """Hand in an answer.

    Args:
        word: the answer.
    """
    right = word == episode.task.label
    episode.reward(float(right))
    return "ok" if right else "no"
'''
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""A chat template that writes what is said and nothing else."""
RUNS: Mapping[str, Sequence[str]] = {
    "retry": (
        *("--agent", "retry", "--set", "agent.attempts=2", "--set", "rewards=[]"),
        *("--estimator", "turn_returns"),
    ),
    "tool_calling": (
        *("--agent", "tool_calling", "--set", "agent.tools=[spoken.py:submit]"),
        *("--set", "agent.format=spoken.py:spoken", "--set", "agent.max_turns=2"),
        *("--set", "rewards=[]", "--estimator", "turn_returns"),
    ),
    "reasoning-gym": (
        *("--data", "rlx_reasoning_gym:load", "--set", "data.params.task=spell_backward"),
        *("--set", "data.params.config={min_word_len: 4, max_word_len: 7}"),
        *("--set", "data.prompt=word", "--set", "data.template=reverse {prompt}="),
        *("--reward", "reasoning_gym"),
    ),
    "verifiers": (
        *("--model", "./chat", "--data", "rlx_verifiers:load", "--agent", "verifiers"),
        *("--set", "data.params.env=rlx-verifiers-demo", "--set", "rewards=[]"),
    ),
}
NEEDS = {"reasoning-gym": "rlx_reasoning_gym", "verifiers": "rlx_verifiers"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--keep", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    keep: Path | None = arguments.keep
    done: dict[str, Any] = json.loads(keep.read_text()) if keep and keep.is_file() else {}
    print("| run | first step | last steps | turns | largest log-prob gap | seconds |")
    print("|---|---|---|---|---|---|")
    curves = {}
    for name, words in RUNS.items():
        missing = name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None
        if missing or (arguments.only and name not in arguments.only):
            continue
        key = f"{name} {arguments.steps}"
        if key not in done:
            done[key] = train(words, arguments.steps)
            if keep:
                keep.write_text(json.dumps(done))
        steps, seconds = done[key]
        curves[name] = [step["reward/mean"] for step in steps]
        print(row(name, steps, seconds), flush=True)
    if not arguments.only:
        draw(curves)


def train(words: Sequence[str], steps: int) -> tuple[list[dict[str, Any]], float]:
    """The steps' metrics, and the wall time of the whole command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spoken.py").write_text(SPOKEN)
        shutil.copytree(Path(rlx.__file__).parent / "embedded" / "model", folder / "chat")
        (folder / "chat" / "chat_template.jinja").write_text(TEMPLATE)
        command = [sys.executable, "-m", "rlx", "train", *COMMON, "--steps", str(steps)]
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "--output", "run", *words], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], time.perf_counter() - started


def row(name: str, steps: Sequence[Mapping[str, Any]], seconds: float) -> str:
    rewards = [step["reward/mean"] for step in steps]
    turns = sum(step["rollout/turns_mean"] for step in steps) / len(steps)
    gap = max(step["mismatch/logprob_abs_max"] for step in steps)
    last = sum(rewards[-TAIL:]) / TAIL
    return f"| {name} | {rewards[0]:.3f} | {last:.3f} | {turns:.2f} | {gap:.1e} | {seconds:.0f} |"


def draw(curves: Mapping[str, Sequence[float]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4))
    for name, rewards in curves.items():
        axis.plot(range(1, len(rewards) + 1), rewards, label=name, linewidth=1.2)
    axis.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    axis.legend(fontsize=8, loc="lower right")
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
