"""Measures the tables of docs/performance.md anew and puts them into the page.

    python -m benchmarks.page                       all of them, on an idle machine
    python -m benchmarks.page controller vs_trl     some

A table stands in the page between `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
COMMANDS = {
    "controller": ["controller"],
    "cold_start": ["cold_start"],
    "tiny": ["vs_trl", "tiny"],
    "short": ["vs_trl", "short"],
    "long": ["vs_trl", "long"],
    "floor": ["floor"],
    "learner_short": ["learner_step", "short"],
    "learner_long": ["learner_step", "long"],
    "packing": ["packing"],
    "zero": ["zero"],
    "sft": ["vs_trl_offline", "sft"],
    "dpo": ["vs_trl_offline", "dpo"],
    "objectives": ["objectives_vs_trl"],
    "publication": ["publication"],
}


_FOREIGN = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,]+\] \[WARNING\]")
"""What DeepSpeed prints when it is imported."""


def main() -> None:
    for name in sys.argv[1:] or COMMANDS:
        module, *words = COMMANDS[name]
        command = [sys.executable, "-m", f"benchmarks.{module}", *words]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        text = "".join(line for line in done.stdout.splitlines(True) if not _FOREIGN.match(line))
        replace(name, f"{text.strip()}\n\nMeasured on {time.strftime('%Y-%m-%d')}.")


def replace(name: str, text: str) -> None:
    """Put `text` between the marks of a table."""
    page = PAGE.read_text()
    head, mark, rest = page.partition(f"<!-- {name} -->\n")
    if not mark:
        raise SystemExit(f"{PAGE} has no place for {name!r}")
    _, end, tail = rest.partition("<!-- end -->")
    PAGE.write_text(f"{head}{mark}{text}\n{end}{tail}")
    print(f"{name}: done", flush=True)


if __name__ == "__main__":
    main()
