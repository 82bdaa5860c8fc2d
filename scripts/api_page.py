"""Write docs/api.md from the signatures and docstrings of the public names.

python scripts/api_page.py            # writes docs/api.md
python scripts/api_page.py --check    # exit 1 when the page is out of date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Set
from pathlib import Path

from api_surface import Item, Member, items

import rlx
import rlx.testing

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
_INTRODUCTION = """\
# Python API

Everything here is imported from `rlx` or `rlx.testing`; nothing else is promised. A change that
could break a plugin raises `rlx.API_VERSION` (now {version}), and plugins that state an older one
(`RLX_API_VERSION = {version}` in their module) are then told what changed. New needs become new
fields and new keyword-only parameters, never new positional ones.

Axes: `B` rollouts, `N` action tokens of the batch or micro-batch, `G` rollouts of a group, `T`
tokens. Hooks have [a page of their own](hooks.md). This page is made by `make docs`.
"""
SECTIONS: dict[str, tuple[str, ...]] = {
    "Estimators": ("EstimatorInputs", "Advantages"),
    "Losses and corrections": ("LossInputs", "LossOutputs", "CorrectionInputs"),
    "Objectives of offline training": ("ObjectiveInputs", "ObjectiveOutputs"),
    "Rewards": ("RewardInputs", "Reward"),
    "Agents": ("Turn", "Step", "Episode", "parse_tool_calls"),
    "Samplers": ("Group", "Drop"),
    "Tasks and rollouts": ("Task", "Rollout", "Span", "TrainBatch", "Tensor"),
    "Declaring plugins": ("component", "hookimpl", "RunView", "WorkerContext", "API_VERSION"),
    "Using rlx from Python": (
        "resolve",
        "train",
        "train_offline",
        "RunConfig",
        "PluginSystem",
        "Bound",
        "ComponentRef",
        "UsageError",
        "ComponentError",
    ),
}
_HELPERS_OF = "EstimatorInputs"
_SAME_HELPERS = {"LossInputs", "CorrectionInputs", "ObjectiveInputs"}


def render() -> str:
    """Return the whole page; raises `ValueError` for a public name that no section has."""
    public = {item.name.removeprefix("rlx."): item for item in items(rlx)}
    listed = [name for names in SECTIONS.values() for name in names]
    if missing := sorted(set(public) ^ set(listed)):
        raise ValueError(f"scripts/api_page.py: put into a section, or take out: {missing}")
    parts = [_INTRODUCTION.format(version=rlx.API_VERSION)]
    helpers = {str(member) for member in public[_HELPERS_OF].members}
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [
            _entry(public[name], helpers if name in _SAME_HELPERS else set()) for name in names
        ]
    parts.append("## rlx.testing\n")
    parts.append("Each is also a pytest fixture of the same name, in every environment with rlx.\n")
    parts += [_entry(item) for item in items(rlx.testing)]
    return "\n".join(parts)


def _entry(item: Item, known: Set[str] = frozenset()) -> str:
    """One name; of the members in `known`, which another name has too, only that they exist."""
    lines = [f"### `{item.name}`", ""]
    if item.signature.startswith("("):
        lines += ["```python", _wrapped(item.name.rpartition(".")[2] + item.signature), "```", ""]
    if item.doc:
        lines += [_markdown(item.doc), ""]
    lines += [_bullet(member) for member in item.members if str(member) not in known]
    shared = [f"`{member.name}`" for member in item.members if str(member) in known]
    if shared:
        lines.append(f"- as of `{_HELPERS_OF}`: {', '.join(shared)}")
    return "\n".join([*lines, *([""] if item.members else [])])


def _bullet(member: Member) -> str:
    text = " ".join(re.split(r"\n\s*\n", member.doc)[0].split())
    name = str(member).replace("|", "\\|") if "|" in text else str(member)
    return f"- `{name}`" + (f": {text}" if text else "")


def _wrapped(signature: str) -> str:
    """A signature that is too long for a line, with one parameter a line."""
    if len(signature) <= 100:
        return signature
    name, _, rest = signature.partition("(")
    inside, _, answer = rest.rpartition(")")
    depth, start, parts = 0, 0, []
    for index, character in enumerate(inside):
        depth += character in "([{"
        depth -= character in ")]}"
        if character == "," and not depth:
            parts.append(inside[start:index].strip())
            start = index + 1
    parts.append(inside[start:].strip())
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){answer}"])


def _markdown(doc: str) -> str:
    """A docstring's sections as lists, its doctests as code."""
    out: list[str] = []
    block: list[str] = []
    for line in [*doc.splitlines(), ""]:
        if line.startswith((">>>", "...")) or (block and line.strip()):
            block.append(line)
            continue
        if block:
            out += ["```python", *block, "```", ""]
            block = []
        if match := re.fullmatch(r"(Args|Returns|Raises):", line):
            out += [f"**{match[1]}:**", ""]
        elif match := re.fullmatch(r"    (\w+): (.*)", line):
            out.append(f"- `{match[1]}`: {match[2]}")
        else:
            out.append(f"  {line.strip()}" if line.startswith("     ") else line.strip())
    return "\n".join(out).strip()


def main() -> int:
    page = render()
    if "--check" in sys.argv[1:]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
        return int(current != page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
