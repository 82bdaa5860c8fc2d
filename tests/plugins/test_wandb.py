"""The wandb tracker, against the real package where it is installed, offline."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlx.core.config import RunConfig
from rlx.core.errors import UsageError
from rlx.core.plugins import PluginSystem
from rlx.core.preflight import raise_errors
from rlx.core.preflight_libraries import check_libraries
from rlx.core.run import Run
from rlx.plugins.trackers.wandb import WandB


def test_a_missing_package_is_an_error_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ref = PluginSystem.load(hooks=False, rlxfile=False).ref("trackers", "wandb")
    with pytest.raises(UsageError, match=r"tracker 'wandb' needs the package wandb.*not installed"):
        raise_errors(list(check_libraries([ref])), {})


RECORD = {"prompt": "2+2=", "response": "4", "label": "4", "reward": 1.0, "advantage": 0.5}


def play(folder: Path, *, first: int, last: int, **params: Any) -> WandB:
    tracker = WandB(mode="offline", project="mine", **params)
    config = RunConfig(output=folder, steps=last)
    tracker.start(Run(name=folder.name, folder=folder, config=config, start_step=first - 1))
    for step in range(first, last + 1):
        tracker.log(step, {"reward/mean": step / 10, "time/step": 1.0})
        tracker.log_samples(step, [RECORD, RECORD])
    tracker.close(None)
    return tracker


def messages(path: Path) -> Iterator[bytes]:
    """The messages of a run's file: LevelDB's log, in blocks of 32 KiB, behind 7 bytes."""
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 2**15 - place % 2**15) < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole message, or the last piece of one
            yield whole
            whole = b""


def logged(folder: Path) -> list[dict[str, Any]]:
    """What offline runs in `folder/wandb` hold: one dictionary a call of `log`."""
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2
    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for message in messages(path):
            record = protocol.Record()
            record.ParseFromString(message)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                names = [item.key or "/".join(item.nested_key) for item in items]
                values = [json.loads(item.value_json) for item in items]
                found.append(dict(zip(names, values, strict=True)))
    return found


@pytest.mark.engine
def test_metrics_and_rollouts_are_in_the_offline_run(tmp_path: Path):
    pytest.importorskip("wandb")
    play(tmp_path, first=1, last=2, samples=1)
    identity = (tmp_path / "wandb-id").read_text()
    play(tmp_path, first=2, last=3)
    assert (tmp_path / "wandb-id").read_text() == identity
    records = logged(tmp_path)
    rewards = [(one["step"], one["reward/mean"]) for one in records if "reward/mean" in one]
    assert rewards == [(1, 0.1), (2, 0.2), (2, 0.2), (3, 0.3)]
    rows = [one["rollouts/nrows"] for one in records if "rollouts/nrows" in one]
    assert rows == [1, 1, 2, 2]
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{identity}"))) == 2
