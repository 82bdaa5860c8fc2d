"""A recorded rollout for people: turn by turn, with the tokens that carried loss marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.panel import Panel
from rich.text import Text

from rlx.core.messages import encodable

_TRAINED = "bold green"
_GIVEN = "dim"
_NUMBERS = "cyan"
LEGEND = "▌ and green: sampled by the policy, carried loss   · and dim: prompt and observations"


def rollout_panel(record: Mapping[str, Any]) -> Panel:
    """One record of `rollouts/`; older ones and single turns have no list of pieces."""
    body = Text()
    _add(body, "·", prompt_text(record["prompt"]), _GIVEN)
    for piece in record.get("episode") or [_only_turn(record)]:
        if piece["kind"] == "action":
            _add(body, "▌", piece["text"], _TRAINED)
            if "turn" in piece:
                body.append(_turn_line(piece) + "\n", style=_NUMBERS)
        else:
            if piece["kind"] == "prompt":
                body.append("— a new segment, with a prompt of its own\n", style=_NUMBERS)
            _add(body, "·", piece["text"], _GIVEN)
    if record.get("error"):
        body.append(f"the agent failed: {record['error']}\n", style="bold red")
    body.append("\n" + _totals(record), style=_NUMBERS)
    for name, note in (record.get("notes") or {}).items():
        body.append(f"\n{name}: {note}", style="yellow")
    return Panel(body, title=_title(record), title_align="left")


def prompt_text(prompt: Any) -> str:
    """A prompt as text; chat messages one to a line."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {_said(message)}" for message in prompt)


def _said(message: Mapping[str, Any]) -> Any:
    """A message may have calls of tools and no content."""
    return message.get("content") or message.get("tool_calls") or ""


def _only_turn(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "action", "text": str(record["response"])}


def _add(body: Text, mark: str, text: str, style: str) -> None:
    for line in encodable(text).split("\n"):
        body.append(f"{mark} {line}\n", style=style)


def _turn_line(piece: Mapping[str, Any]) -> str:
    return (
        f"  turn {piece['turn'] + 1}: {piece['tokens']} tokens, {piece['finish_reason']}  "
        f"reward {piece['reward']:+.3f}  advantage {piece['advantage']:+.3f}  "
        f"log-prob gap {piece['logprob_gap']:.1e}  version {piece['version']}"
    )


def _totals(record: Mapping[str, Any]) -> str:
    parts = "  ".join(
        f"{name} {'–' if value is None else format(value, '.3f')}"
        for name, value in record["parts"].items()
    )
    return (
        f"reward {record['reward']:.3f}{f' ({parts})' if parts else ''}  label {record['label']}  "
        f"advantage {record['advantage']:+.3f}  log-prob gap {record['logprob_gap']:.1e}"
    )


def _title(record: Mapping[str, Any]) -> str:
    turns = f", {record['turns']} turns" if record.get("turns", 1) > 1 else ""
    greedy = "greedy, " if record.get("greedy") else ""
    return (
        f"step {record['step']}  group {record['group']}.{record['index']}  {record['task']}  "
        f"{greedy}{record['tokens']} tokens{turns}, {record['finish_reason']}, "
        f"version {record['version']}"
    )
