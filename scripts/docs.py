"""Regenerate every page that is made from the code (`make docs`).

python scripts/docs.py            # writes the pages
python scripts/docs.py --check    # exit 1, with their names, when pages are out of date
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

PAGES = {
    "hooks_page": "render",
    "api_page": "render",
    "api_surface": "render",
    "algorithms_page": "page",
}
"""Module beside this file → its function that returns the page; `PAGE` there is the path.

A new generated page is a module with `PAGE` and such a function, and a line here."""


def outdated(*, write: bool) -> Iterator[Path]:
    """Yield the pages that differ from what the code says; with `write` they are replaced."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        for name, function in PAGES.items():
            module = importlib.import_module(name)
            text = getattr(module, function)()
            if not module.PAGE.is_file() or module.PAGE.read_text(encoding="utf-8") != text:
                yield module.PAGE
                if write:
                    module.PAGE.write_text(text, encoding="utf-8")
    finally:
        sys.path.pop(0)


def main() -> int:
    check = "--check" in sys.argv[1:]
    changed = list(outdated(write=not check))
    for page in changed:
        print(f"{'out of date' if check else 'wrote'}: {page.parent.name}/{page.name}")
    if check and changed:
        print("make docs writes them anew", file=sys.stderr)
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
