"""docs/write-a-plugin.md: a new user who follows it word by word gets there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from environment import ROOT, Environment

from rlx.core.component import KINDS, REQUIREMENTS, singular

PAGE = ROOT / "docs" / "write-a-plugin.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCK = re.compile(r"```(\w+)(?: ([^\n]*))?\n(.*?)```", re.DOTALL)
BLOCKS = [(match[1], match[2] or "", match[3]) for match in BLOCK.finditer(TEXT)]
FIRST = next(body for language, _, body in BLOCKS if language == "sh")
LAST_LINE = "    return centred / (x.group_std(x.rewards) + eps)\n"


def test_python_examples_run() -> None:
    names: dict[str, object] = {"__name__": "page"}
    for language, info, body in BLOCKS:
        if language == "python" and not info:
            exec(body, names)
    assert {"mynorm", "cautious", "RunningBaseline"} <= set(names)


def test_page_names_every_kind_that_has_a_template_and_every_requirement() -> None:
    for kind in KINDS:
        assert f"| {singular(kind)} |" in TEXT
    for requirement in REQUIREMENTS:
        assert f"`{requirement}`" in TEXT


def test_links_lead_somewhere() -> None:
    for page in [PAGE, ROOT / "docs" / "plugins.md", *ROOT.glob("examples/**/README.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_other_pages_that_show_the_first_steps_show_the_same() -> None:
    steps = [line.partition("#")[0].split() for line in FIRST.splitlines()]
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        for _, _, body in BLOCK.findall(text):
            if "rlx plugins new estimator mynorm" in body:
                assert [line.partition("#")[0].split() for line in body.splitlines()] == steps


@pytest.mark.slow
@pytest.mark.engine
def test_new_user_gets_from_the_first_command_to_a_wheel(tmp_path: Path) -> None:
    """Every command of the page in its order, the first run on Ray and vLLM: about 80 s."""
    environment = Environment(tmp_path / "venv")
    work = tmp_path / "work"
    work.mkdir()
    module = work / "rlx-mynorm" / "rlx_mynorm" / "mynorm.py"
    printed = []
    for language, info, body in BLOCKS:
        if language == "sh":
            printed.append(environment.shell(body, cwd=work))
        elif info == "edit":
            text = module.read_text()
            assert text.count(LAST_LINE) == 1
            module.write_text(text.replace(LAST_LINE, body))
        elif info.startswith("file="):
            (work / info.removeprefix("file=")).write_text(body)
    first, again, shown, watched, published = printed
    for text in (first, again):
        assert "2 passed" in text
        assert "1 checked, 0 failed" in text
        assert "3 of 3 steps" in text
    runs = sorted((work / "runs").glob("embedded-mynorm-*"))
    assert len(runs) == 2
    engines = [json.loads((run / "manifest.json").read_text()) for run in runs]
    assert all("rlx-mynorm" in json.dumps(manifest["components"]) for manifest in engines)
    assert "keeps the division finite" in shown
    assert "eps: 0.001" in shown
    assert "rlxfile" in watched
    assert [line.split()[0] for line in watched.splitlines()[-2:]] == ["1", "2"]
    assert "1 checked, 0 failed" in published
    assert "0.1.0" in environment.rlx("plugins", "list", "estimator", cwd=tmp_path)
