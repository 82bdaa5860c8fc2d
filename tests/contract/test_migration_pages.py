"""docs/rewards.md, docs/migrate.md: every command is one that rlx takes, every setting exists."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlx.core.plugins import PluginSystem
from rlx.core.settings import known_keys

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text(encoding="utf-8") for name in ("rewards.md", "migrate.md")}
DRY = "--dry-run"
MODEL = "Qwen/Qwen2.5-0.5B"


def commands(page: str) -> Iterator[list[str]]:
    """The words of each `rlx …` command of a page's shell blocks."""
    for block in re.findall(r"```bash\n(.*?)```", PAGES[page], re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removesuffix(" &"), comments=True)
            if words[:1] == ["rlx"]:
                yield words


TRAIN = [
    pytest.param(words[2:], id=f"{page}-{number}")
    for page in PAGES
    for number, words in enumerate(commands(page))
    if words[1] == "train"
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages' commands name."""
    import datasets

    from rlx.embedded import MODEL_FOLDER

    folder = tmp_path_factory.mktemp("docs")
    for name, text in re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", PAGES["rewards.md"], re.DOTALL
    ):
        (folder / name).write_text(text)
    (folder / "reward_func.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    (folder / "mine.py").write_text("def has_answer(completions, answer, **kwargs): ...\n")
    (folder / "score.py").write_text("def compute_score(*args, **kwargs): ...\n")
    for name in ("rm", "my/reward-model"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(MODEL_FOLDER)
    row = {"prompt": "1+1=", "input": "1+1=", "label": "2", "answer": "2", "test": "assert True"}
    for name in ("sums.jsonl", "programs.jsonl", "train.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    theirs = {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2"}}
    for name in ("train.parquet", "test.parquet"):
        datasets.Dataset.from_list([theirs] * 4).to_parquet(str(folder / name))
    return folder


@pytest.mark.parametrize("words", TRAIN)
def test_command_is_one_that_rlx_takes(
    words: list[str],
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rlx.cli.main import _exit_code

    monkeypatch.chdir(workspace)
    # The model of the examples isn't here, and the one that is has a shorter context.
    short = {MODEL: "embedded", "1024": "16", "512": "16"}
    short["data.max_prompt_tokens=512"] = "data.max_prompt_tokens=64"
    given = [short.get(word, word) for word in words if word != DRY]
    monkeypatch.setattr(sys, "argv", ["rlx", "train", *given, DRY])
    code = _exit_code()
    assert code == 0, capsys.readouterr().err


def test_there_are_commands_to_check() -> None:
    assert len(TRAIN) >= 20


def test_every_setting_that_a_page_names_exists() -> None:
    roots = "data|rollout|learner|critic|kl|algorithm|reward|runtime|checkpoint|logging|eval"
    for page, text in PAGES.items():
        ours = text
        if page == "migrate.md":  # the middle column of its tables
            ours = "\n".join(row.split("|")[2] for row in text.splitlines() if row.count("|") >= 4)
        for key in re.findall(rf"[`\s]((?:{roots})\.[a-z_]+)", ours):
            assert key in known_keys(), f"{page}: {key}"


def test_every_component_that_the_migration_tables_name_exists() -> None:
    system = PluginSystem.load(hooks=False)
    rows = [row.split("|")[2] for row in PAGES["migrate.md"].splitlines() if row.count("|") >= 4]
    named = [
        (kind, name)
        for row in rows
        for kind, names in re.findall(
            r"--(estimator|loss|correction|sampler|reward|agent) ((?:[a-z_]+(?:, )?)+)", row
        )
        for name in names.split(", ")
        if name and "NAME" not in name
    ]
    assert len(named) > 30
    for kind, name in named:
        if (kind, name) not in {("estimator", "with"), ("loss", "with"), ("agent", "file")}:
            known = system.names({"loss": "losses"}.get(kind, f"{kind}s"))
            assert name in known or name in ("trl", "verl", "openrlhf"), f"--{kind} {name}"


def test_the_table_of_built_in_rewards_is_complete() -> None:
    system = PluginSystem.load(hooks=False)
    table = set(re.findall(r"^\| `(\w+)` \|", PAGES["rewards.md"], re.MULTILINE))
    builtin = {
        entry.name
        for entry in system.registry.entries()
        if entry.kind == "rewards" and entry.provider.builtin
    }
    assert builtin <= table
