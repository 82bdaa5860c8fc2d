"""Write docs/hooks.md from the docstrings of the hook specifications.

python scripts/hooks_page.py            # writes docs/hooks.md
python scripts/hooks_page.py --check    # exit 1 when the page is out of date
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

from rlx.core import hookspecs
from rlx.core.hookspecs import HOOKS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "hooks.md"
_SECTIONS = ("When", "Process", "Mode", "On failure", "Args", "Returns", "Example")
_INTRODUCTION = """\
# Hooks

A hook plugin is a module, or an object, with functions that `@rlx.hookimpl` marks. It is found
through the entry-point group `rlx`:

```toml
[project.entry-points.rlx]
my-hooks = "my_package.hooks"
```

or as `rlxfile.py` in the working directory (off with `--no-rlxfile`). An implementation takes
whichever of the hook's arguments it needs, by name and without defaults. A misspelt hook, a
forgotten decorator and a parameter with a default are reported when the plugin is loaded.

| mode | calls | an exception |
|---|---|---|
| collect | every implementation, at start | lists the plugin as broken, with a warning |
| first | until one answers something else than None | ends the command |
| control | every implementation | ends the command |
| observer | every implementation | is logged once; that implementation is off for the run |

`RLX_PLUGINS` is an allow-list of distributions and entry-point names (empty: none at all),
`--no-plugin NAME` and `plugins.disable` switch one off, `RLX_STRICT_PLUGINS=1` turns a plugin that
fails to load into an error.

This page is made by `python scripts/hooks_page.py`; its examples are run by the tests.
"""


def sections(name: str) -> dict[str, str]:
    """Return the parts of a hook's docstring by heading; `summary` is its first paragraph."""
    text = inspect.getdoc(getattr(hookspecs, name)) or ""
    pattern = rf"^({'|'.join(_SECTIONS)}):[ \n]"
    parts = re.split(pattern, text, flags=re.MULTILINE)
    found = {"summary": parts[0].strip()}
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        indented = heading in ("Args", "Returns", "Example")
        found[heading] = textwrap.dedent(body).strip() if indented else _unwrap(body)
    return found


def render() -> str:
    """Return the whole page."""
    return "\n".join([_INTRODUCTION, *(_entry(name) for name in HOOKS)])


def _entry(name: str) -> str:
    parts = sections(name)
    signature = re.sub(r"'", "", str(inspect.signature(getattr(hookspecs, name))))
    lines = [f"## `{name}`", "", parts["summary"], "", "```python", f"{name}{signature}", "```", ""]
    for heading in ("When", "Process", "Mode", "On failure"):
        lines.append(f"- **{heading}:** {parts[heading]}")
    arguments = re.split(r"\n(?=\w+: )", parts["Args"])
    for argument in arguments:
        word, _, text = argument.partition(":")
        lines.append(f"- **`{word}`:** {_unwrap(text)}")
    if "Returns" in parts:
        lines.append(f"- **Returns:** {_unwrap(parts['Returns'])}")
    return "\n".join([*lines, "", "```python", parts["Example"], "```", ""])


def _unwrap(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    page = render()
    if "--check" in sys.argv:
        current = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
        if current != page:
            print(f"{PAGE} is out of date: python scripts/hooks_page.py", file=sys.stderr)
        return int(current != page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
