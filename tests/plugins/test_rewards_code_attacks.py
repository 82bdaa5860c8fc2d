"""Programs that cheat or harm: each scores 0, says why, and is gone within seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlx.core.rewards import Reward
from rlx.plugins.rewards import sandbox
from rlx.plugins.rewards.code import code
from rlx.plugins.rewards.sandbox import Limits, Verdict, run_tests
from rlx.testing import reward_inputs

SANDBOX = str(Path(sandbox.__file__).parent)
TEST = "def check(candidate):\n    assert candidate(1) == 2\n"
SECONDS = 3.0
"""What a program may take; bombs end by themselves after one, should nothing end them."""
DIED = r"DiedError in `.*`: the program ended early, with exit code 0"
DENIED = r"PermissionError in .*(denied|not permitted)"
WRONG = r"AssertionError in `assert candidate\(1\) == 2`"
NO_DATA = r"the program sent no data"
IMPORTS = (
    "import builtins, os, pickle, resource, signal, socket, subprocess, sys, threading, time\n"
)

HARM = {
    "fork bomb": (
        "start = time.time()\ndef f(x):\n    while time.time() < start + 1: os.fork()\n",
        r"BlockingIOError in .* temporarily unavailable|more than 17 processes and threads",
    ),
    "fork bomb that catches errors": (
        "start = time.time()\nwhile time.time() < start + 1:\n"
        "    try: os.fork()\n    except OSError: pass\ndef f(x): return x\n",
        r"ValueError|AssertionError|DiedError|time-out|more than 17 processes and threads",
    ),
    "endless loop": ("def f(x):\n    while True: pass\n", "time-out"),
    "endless sleep": ("def f(x): time.sleep(1000)\n", "time-out"),
    "deaf to signals": (
        "def f(x):\n"
        "    for number in set(range(1, 65)) - {9, 19, 32, 33}:\n"
        "        signal.signal(number, signal.SIG_IGN)\n"
        "    while True: pass\n",
        "time-out",
    ),
    "10 GB of output": (
        "def f(x):\n    for _ in range(10 << 10): os.write(1, bytes(1 << 20))\n    return x\n",
        WRONG,
    ),
    "10 GB in a file": (
        "def f(x):\n    with open('big', 'wb') as file:\n"
        "        for _ in range(10 << 10): file.write(bytes(1 << 20))\n",
        "OSError in .* File too large",
    ),
    "10 GB in many files": (
        "def f(x):\n    for i in range(10 << 10):\n"
        "        with open(str(i), 'wb') as file: file.write(bytes(1 << 20))\n",
        "ended: more than 64 MiB of files",
    ),
    "10 GB of memory": ("def f(x): return len(bytearray(10 << 30))\n", "MemoryError"),
    "10 GB of memory, bit by bit": (
        "def f(x):\n    held = []\n    while True: held.append(bytes(1 << 20))\n",
        "MemoryError",
    ),
    "memory in many processes": (
        "def f(x):\n    for _ in range(6):\n        if not os.fork():\n"
        "            held = b'x' * (200 << 20)\n            time.sleep(10)\n    time.sleep(10)\n",
        "ended: more than 512 MiB of memory",
    ),
    "10 GB as an answer": ("def f(x): return 'a' * (100 << 20)\n", NO_DATA),
    "answer that unpacks to 10 GB": (
        "class Bomb:\n    def __reduce__(self): return bytearray, (10 << 30,)\n"
        "sys.modules['__main__'].portable = lambda value: value\n"
        "def f(x): return Bomb()\n",
        NO_DATA,
    ),
    "lifts its limits": (
        "def f(x): resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n",
        "ValueError in .*not allowed to raise maximum limit",
    ),
    "real-time priority": (
        "def f(x): os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))\n",
        DENIED,
    ),
    "kills its parent": ("def f(x): os.kill(os.getppid(), signal.SIGKILL)\n", DENIED),
    "kills all it can": ("def f(x): os.kill(-1, signal.SIGKILL)\n", "ProcessLookupError"),
    "kills its process group": (
        "def f(x): os.killpg(0, signal.SIGKILL)\n",
        "ended early, killed by SIGKILL",
    ),
    "crashes": (
        "import ctypes\ndef f(x): ctypes.string_at(0)\n",
        "ended early, killed by SIGSEGV",
    ),
    "connects": (
        "def f(x): socket.create_connection(('127.0.0.1', 1), 2)\n",
        r"(PermissionError|ConnectionRefusedError|OSError) in",
    ),
    "writes outside": (f"def f(x): open({__file__!r} + '.new', 'w')\n", DENIED),
    "reads its parent's environment": (
        "def f(x): return open(f'/proc/{os.getppid()}/environ').read()\n",
        DENIED,
    ),
    "reads the environment": (
        "def f(x): raise RuntimeError(os.environ.get('RLX_TEST_SECRET', 'no secret'))\n",
        "RuntimeError in .* no secret",
    ),
}
CHEATS = {
    "leaves early": ("def f(x): os._exit(0)\n", DIED),
    "leaves at once": (
        "os._exit(0)\ndef f(x): pass\n",
        "DiedError: the program ended early, with exit code 0",
    ),
    "system exit": ("def f(x): raise SystemExit(0)\n", "SystemExit: 0"),
    "equals everything": (
        "class Same:\n"
        "    def __eq__(self, other): return True\n"
        "    def __bool__(self): return True\n"
        "def f(x): return Same()\n",
        WRONG,
    ),
    "number that equals everything": (
        "class N(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def f(x): return N(0)\n",
        WRONG,
    ),
    "no assertion errors": (
        "class Quiet(Exception): pass\nbuiltins.AssertionError = Quiet\ndef f(x): return 0\n",
        WRONG,
    ),
    "writes verdicts": (
        "import json\n"
        "for fd in range(64):\n"
        "    try: os.write(fd, json.dumps({'passed': 1, 'total': 1, 'detail': ''}).encode())\n"
        "    except OSError: pass\n"
        "def f(x): return 0\n",
        NO_DATA,
    ),
    "writes its supervisor's verdict": (
        "def f(x):\n"
        "    for pid in range(1, 40):\n"
        "        for fd in range(20):\n"
        "            try:\n"
        "                with open(f'/proc/{pid}/fd/{fd}', 'wb') as file:\n"
        "                    file.write(b'{\"passed\": 1}')\n"
        "            except OSError: pass\n"
        "    return 0\n",
        f"{WRONG}|{NO_DATA}|DiedError",
    ),
    "sends code": (
        "class Evil:\n    def __reduce__(self): return os._exit, (0,)\n"
        "sys.modules['__main__'].portable = lambda value: value\n"
        "def f(x): return Evil()\n",
        NO_DATA,
    ),
}


def judged(program: str) -> Reward:
    row = {"prompt": "", "test": TEST, "entry_point": "f"}
    return code(reward_inputs(response=IMPORTS + program, **row), timeout=SECONDS)


@pytest.fixture(scope="module")
def kept_in() -> Verdict:
    return run_tests("", ["pass"], kind="code", limits=Limits())


@pytest.mark.parametrize("attack", [*HARM, *CHEATS])
def test_an_attack_scores_nothing_and_says_why(
    attack: str, kept_in: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (kept_in.isolated and kept_in.confined):
        pytest.skip("this system has no namespaces or no Landlock")
    monkeypatch.setenv("RLX_TEST_SECRET", "token")
    program, reason = (HARM | CHEATS)[attack]
    start = time.monotonic()
    reward = judged(program)
    assert reward.score == 0.0
    assert re.search(reason, reward.note), reward.note
    assert "token" not in reward.note
    assert time.monotonic() - start < SECONDS + 20  # a busy machine is slow to start Python
    assert reward.metrics["timed_out"] == (reward.note == "time-out")
    assert reward.metrics["over_limit"] == reward.note.startswith("ended: more than")
    assert not Path(f"{__file__}.new").exists()


def test_programs_have_threads_and_processes_up_to_the_limit() -> None:
    program = (
        "def f(n):\n    done = []\n"
        "    threads = [threading.Thread(target=done.append, args=(1,)) for _ in range(n)]\n"
        "    [t.start() for t in threads]; [t.join() for t in threads]\n"
        "    children = [subprocess.Popen(['true']) for _ in range(n)]\n"
        "    return len(done) + sum(child.wait() for child in children)\n"
    )
    verdict = run_tests(
        IMPORTS + program, ["assert f(4) == 4"], kind="code", limits=Limits(processes=8)
    )
    assert verdict.passed == 1, verdict.detail


def supervised(script: str, **values: object) -> dict[str, object]:
    """What a script with the sandbox's `watch` prints, as the supervisor uses it."""
    head = (
        f"import json, os, subprocess, sys, time\nsys.path.insert(0, {SANDBOX!r})\nimport watch\n"
    )
    given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", head + given + script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return dict(json.loads(done.stdout))


WATCHED = """
watch.adopt_orphans()
judged, end = os.pipe()
child = os.fork()
if not child:
    processes = [subprocess.Popen([sys.executable, "-I", "-S", "-c", program]) for _ in range(6)]
    time.sleep(20)
    os._exit(0)
os.close(end)
breach = watch.watch(child, judged, folder, watch.Bounds(**bounds))
watch.end_descendants()
print(json.dumps({"limit": breach and breach.limit}))
"""


@pytest.mark.parametrize(
    ("bounds", "limit"),
    [
        ({"processes": 5, "memory": 1 << 40, "files": 1 << 40}, "processes"),
        ({"processes": 99, "memory": 20 << 20, "files": 1 << 40}, "memory"),
        ({"processes": 99, "memory": 1 << 40, "files": 1000}, "files"),
    ],
)
def test_the_watch_ends_what_the_kernel_lets_through(
    tmp_path: Path, bounds: dict[str, int], limit: str
) -> None:
    (tmp_path / "deep").mkdir()
    program = f"open({str(tmp_path)!r} + '/deep/' + str(id(0)), 'w').write('x' * 5000)\n"
    program += "import time\nfor _ in range(100): time.sleep(0.1)"
    found = supervised(WATCHED, program=program, folder=str(tmp_path), bounds=bounds)
    assert found == {"limit": limit}


def test_no_descendant_survives_even_without_namespaces() -> None:
    """A daemon: its parent is gone and it has a session of its own."""
    script = """
watch.adopt_orphans()
subprocess.run([sys.executable, "-I", "-S", "-c", '''
import os, time
for _ in range(3):
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(60)
'''])
before = len(list(watch.descendants(os.getpid())))
watch.end_descendants()
print(json.dumps({"before": before, "after": len(list(watch.descendants(os.getpid())))}))
"""
    found = supervised(script)
    assert found["before"] in range(3, 7)  # parents that have not been waited for count
    assert found["after"] == 0


def test_a_note_is_text_that_files_can_hold() -> None:
    from rlx.core.rewards import as_reward

    reward = judged("def f(x): raise ValueError('\\\\ud800' * 9999)\n")
    note = as_reward(reward).note
    assert json.loads(json.dumps(note).encode())
    note.encode()
    assert len(note) <= 1000
    assert os.linesep not in note
