"""`rlx serve-reward` as users start and end it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from reward_servers import reward_server

FUNCTIONS = """
import time

def slow(sample):
    time.sleep(1.0)
    return 1.0
"""


def rlx(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlx", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_what_it_prints_can_be_run(tmp_path: Path) -> None:
    with reward_server(
        tmp_path, "exact_match", "regex:0.5", "--set", "rewards.1.pattern=^2"
    ) as server:
        text = server.log.read_text()
        assert "serving exact_match + regex × 0.5 on http://127.0.0.1:" in text
        command = re.search(r"try: +(curl .*)", text)
        assert command
        words = shlex.split(command.group(1))
        answer = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
        (reward,) = json.loads(answer.stdout)["rewards"]
        assert reward["score"] == 1.5
        assert reward["parts"] == {"exact_match": 1.0, "regex": 1.0}
        assert f"rlx train --reward remote --set rewards.remote.url={server.url}" in text
        assert server.end() == 0
        assert "served 1 samples in 1 requests" in server.log.read_text()


def test_sigterm_lets_requests_under_way_finish(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    body = {"samples": [{"prompt": "p", "response": "r"}]}
    answers: list[httpx.Response] = []
    with reward_server(tmp_path, "functions.py:slow") as server:
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/score", json=body, timeout=20))
        )
        asking.start()
        while httpx.get(f"{server.url}/rewards").json()["counts"]["requests"] == 0:
            pass
        assert server.end() == 0
        asking.join()
    assert answers[0].json()["rewards"][0]["score"] == 1.0


def test_a_server_that_others_can_reach_makes_a_token(tmp_path: Path) -> None:
    body = {"samples": []}
    with reward_server(tmp_path, "exact_match", "--host", "0.0.0.0") as server:
        text = server.log.read_text()
        token = re.search(r"export RLX_REWARD_TOKEN=(\S{20,})", text)
        assert token
        url = f"http://127.0.0.1:{server.port}/score"
        assert httpx.post(url, json=body).status_code == 401
        headers = {"Authorization": f"Bearer {token.group(1)}"}
        assert httpx.post(url, json=body, headers=headers).json() == {"rewards": []}
        assert "--set rewards.remote.token_env=RLX_REWARD_TOKEN" in text


def test_a_token_of_ones_own_is_used_and_not_printed(tmp_path: Path) -> None:
    with reward_server(
        tmp_path, "exact_match", "--token-env", "MINE", env={"MINE": "s3cret"}
    ) as server:
        assert "s3cret" not in server.log.read_text()
        assert httpx.post(f"{server.url}/score", json={}).status_code == 401
        headers = {"Authorization": "Bearer s3cret"}
        answer = httpx.post(f"{server.url}/score", json={"samples": []}, headers=headers)
        assert answer.status_code == 200


def test_a_port_that_is_taken_is_said_plainly(tmp_path: Path) -> None:
    with reward_server(tmp_path, "exact_match") as server:
        second = rlx(tmp_path, "serve-reward", "exact_match", "--port", str(server.port))
    assert second.returncode == 2
    assert f"can't listen on 127.0.0.1:{server.port}" in second.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is nothing to serve"),
        (["exact_mach"], "did you mean 'exact_match'"),
        (["regex"], "needs a value for 'pattern'"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["exact_match", "--token-env", "NOT_SET_AT_ALL"], "NOT_SET_AT_ALL is not set"),
    ],
)
def test_mistakes_are_said_before_it_listens(
    tmp_path: Path, words: list[str], said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = rlx(tmp_path, "serve-reward", *words)
    assert result.returncode == 2
    assert said in result.stderr


def test_the_rewards_of_a_configuration_are_served(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("rewards: [exact_match, {name: regex, pattern: '^2'}]\n")
    with reward_server(tmp_path, "-c", "run.yaml") as server:
        names = httpx.get(f"{server.url}/rewards").json()["rewards"]
    assert names == {"exact_match": 1.0, "regex": 1.0}
