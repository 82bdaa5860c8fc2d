"""References: what they are made of, and that any process makes the same component of them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

import rlx
from rlx.core.errors import UsageError
from rlx.core.plugins import PluginSystem
from rlx.core.references import ComponentRef, shipped_modules

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """
from __future__ import annotations
import enum
import {helper}

class Mode(enum.Enum):
    ADD = "add"
    MUL = "mul"

def scale(x, *, by: float = 2.0, mode: Mode = Mode.MUL):
    return x * by if mode is Mode.MUL else x + by + {helper}.ZERO

class Scale:
    def __init__(self, *, by: float = 2.0):
        self.by = by
    def __call__(self, x):
        return x * self.by

ready = Scale(by=10)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a package, a module and a sibling, names unique to the test."""
    unique = tmp_path.name.replace("-", "_")
    before, path = set(sys.modules), list(sys.path)
    package = tmp_path / f"pkg_{unique}"
    package.mkdir()
    helper = f"helper_{unique}"
    (tmp_path / f"{helper}.py").write_text("ZERO = 0\n")
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(SOURCE.format(helper=helper))
    (tmp_path / "loose.py").write_text(SOURCE.format(helper=helper))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if unique in name or name.startswith("rlx_file_"):
            del sys.modules[name]


def package(project: Path) -> str:
    return f"pkg_{project.name.replace('-', '_')}.inner"


def elsewhere(ref: ComponentRef, argument: object = 3, *, cwd: str = "/", setup: str = "") -> str:
    """Resolve and call in a fresh interpreter that has nothing of this one's path."""
    code = f"import pickle, sys\n{setup}\nref = pickle.load(sys.stdin.buffer)\n"
    code += f"print(ref.resolve()({argument!r}))"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(ref),
        cwd=cwd,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    return done.stdout.decode() + done.stderr.decode()


def test_file_reference_resolves_here_and_in_another_process(project: Path) -> None:
    ref = PluginSystem.load().ref("losses", "loose.py:scale", {"by": "3", "mode": "add"})
    assert ref.target == f"{project}/loose.py:scale"
    assert str(project) in ref.search_path
    assert ref.params == {"by": 3.0, "mode": "add"}
    assert ref.resolve()(3) == 6
    assert elsewhere(ref) == "6.0\n"


def test_module_reference_resolves_here_and_in_another_process(project: Path) -> None:
    ref = PluginSystem.load().ref("losses", f"{package(project)}:Scale", {"by": 5})
    assert ref.search_path == (str(project),)
    assert ref.resolve()(3) == 15
    assert elsewhere(ref) == "15.0\n"


def test_object_at_module_level_is_a_component(project: Path) -> None:
    ref = PluginSystem.load().ref("losses", f"{package(project)}:ready")
    assert ref.resolve()(3) == 30
    assert elsewhere(ref) == "30\n"


def test_installed_module_needs_no_search_path() -> None:
    ref = PluginSystem.load().ref("losses", "pydantic:TypeAdapter.json_schemas")
    assert ref.search_path == ()


def test_objects_of_main_and_closures_travel_by_value(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(
        textwrap.dedent("""
        import pickle, sys
        import rlx
        OFFSET = 4
        def shift(x, *, by: float = 1.0):
            return x + by + OFFSET
        by_name = rlx.resolve("losses", "__main__:shift", by="2")
        by_object = rlx.resolve("losses", shift, by=2)
        closure = (lambda k: lambda x: x * k)(7)
        assert by_name(3) == by_object(3) == 9
        assert by_object.instance is shift, "the driver keeps the original"
        refs = [by_name.ref, by_object.ref, rlx.resolve("losses", closure).ref]
        sys.stdout.buffer.write(pickle.dumps(refs))
        """)
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    output = subprocess.run(
        [sys.executable, str(script)], capture_output=True, check=True, env=environment
    ).stdout
    refs = pickle.loads(output)
    assert all(ref.payload and ref.source_hash for ref in refs)
    assert len({ref.source_hash for ref in refs}) == 2, "two of them are one function"
    assert [elsewhere(ref) for ref in refs] == ["9.0\n", "9.0\n", "21\n"]


def test_reference_pickles_small_and_equal(project: Path) -> None:
    ref = PluginSystem.load().ref("losses", "loose.py:scale")
    assert pickle.loads(pickle.dumps(ref)) == ref
    assert len(pickle.dumps(ref)) < 1000


def test_import_of_a_file_can_not_shadow_a_library(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "json.py").write_text("def f(x):\n    return x\n")
    monkeypatch.chdir(tmp_path)
    assert rlx.resolve("losses", "json.py:f")(1) == 1
    import json

    assert json.loads("[1]") == [1]
    assert elsewhere(rlx.resolve("losses", "json.py:f").ref, setup="import json") == "3\n"


def test_edited_file_is_a_new_module_in_the_same_process(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for factor in (1, 2):
        (tmp_path / "mine.py").write_text(f"def f(x):\n    return x * {factor}\n")
        assert rlx.resolve("losses", "mine.py:f")(5) == 5 * factor


def test_source_that_differs_from_the_drivers_is_refused(project: Path) -> None:
    ref = PluginSystem.load().ref("losses", f"{package(project)}:scale")
    (project / package(project).partition(".")[0] / "inner.py").write_text("def scale(x): ...\n")
    answer = elsewhere(ref)
    assert "differs between the driver and this process" in answer
    assert "inner.py" in answer


def test_hash_covers_the_module_that_defines_a_reexported_object(project: Path) -> None:
    init = project / package(project).partition(".")[0] / "__init__.py"
    init.write_text("from .inner import scale\n")
    ref = PluginSystem.load().ref("losses", f"{init.parent.name}:scale")
    inner = init.parent / "inner.py"
    inner.write_text(inner.read_text() + "\n# edited\n")
    assert "differs between" in elsewhere(ref)


def test_file_is_found_by_name_on_a_node_without_the_drivers_folder(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ref = PluginSystem.load().ref("losses", "loose.py:scale")
    node = tmp_path_factory.mktemp("node")
    for path in shipped_modules([ref]):
        path.rename(node / path.name)
    assert elsewhere(ref, setup=f"sys.path.append({str(node)!r})") == "6.0\n"


def test_shipped_modules_are_targets_and_what_they_import_but_nothing_installed(
    project: Path,
) -> None:
    system = PluginSystem.load()
    names = ["loose.py:scale", f"{package(project)}:Scale"]
    refs = [system.ref("losses", name) for name in names]
    refs.append(system.ref("losses", "operator:neg"))
    unique = project.name.replace("-", "_")
    assert {path.name for path in shipped_modules(refs)} == {
        "loose.py",
        f"pkg_{unique}",
        f"helper_{unique}.py",
    }
    assert shipped_modules(refs[2:]) == []


def test_modules_imported_inside_of_functions_are_shipped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outer.py").write_text("def f(x):\n    import later.deep\n    return x\n")
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "deep.py").write_text("from last import x\nfrom . import y\n")
    (tmp_path / "last.py").write_text("import json, outer\n")
    (tmp_path / "unrelated.py").write_text("")
    ref = PluginSystem.load().ref("losses", "outer.py:f")
    assert [path.name for path in shipped_modules([ref])] == ["last.py", "later", "outer.py"]


def test_pickled_object_ships_what_the_driver_has_imported(project: Path) -> None:
    system = PluginSystem.load()
    system.ref("losses", f"{package(project)}:Scale")
    ref = system.ref("losses", lambda x: x)
    assert f"pkg_{project.name.replace('-', '_')}" in {p.name for p in shipped_modules([ref])}


def refusal(name: str, **params: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        PluginSystem.load().ref("losses", name, params, where="--loss")
    assert caught.value.where
    return caught.value


def test_mistakes_in_references_say_what_to_write(project: Path) -> None:
    assert refusal("loose.py").fix == "loose.py:Mode or loose.py:scale or loose.py:Scale"
    assert refusal("loos.py:scale").fix == "did you mean 'loose.py'?"
    assert refusal("loose.py:scal").fix == "did you mean 'scale'?"
    assert "no module 'absent'" in refusal("absent.module:f").what
    assert "no module 'json.absent'" in refusal("json.absent:f").what
    assert "no reference" in refusal("loose.py:").what
    assert "is a int, not a function or class" in refusal("sys:maxsize").what
    assert refusal("loose.py:scale", bi=1).where == "--loss.bi"


def test_import_failure_of_a_selected_component_has_the_whole_traceback(project: Path) -> None:
    (project / "broken.py").write_text("def helper():\n    return 1 / 0\n\nhelper()\n")
    error = refusal("broken.py:f")
    assert "ZeroDivisionError: division by zero" in error.what
    assert "in helper" in error.what
    assert "importlib" not in error.what
    (project / "needy.py").write_text("import absent_library\n")
    assert "absent_library" in refusal("needy.py:f").what
    (project / "quits.py").write_text("raise SystemExit(3)\n")
    assert "SystemExit(3)" in refusal("quits.py:f").what


def test_reference_passes_through_and_takes_more_parameters(project: Path) -> None:
    system = PluginSystem.load()
    ref = system.ref("losses", "loose.py:scale", {"by": 3})
    assert system.ref("losses", ref) == ref
    assert system.ref("losses", ref, {"mode": "add"}).params == {"by": 3.0, "mode": "add"}


def test_reference_without_hash_is_not_compared(project: Path) -> None:
    ref = PluginSystem.load().ref("losses", "loose.py:scale")
    edited = project / "loose.py"
    edited.write_text(edited.read_text() + "# edited\n")
    with pytest.raises(UsageError, match="differs"):
        ref.load()
    assert replace(ref, source_hash=None).resolve()(1) == 2


def module_level(x):
    return x


def test_configuration_takes_functions_of_modules_and_files(project: Path) -> None:
    from rlx.core.importing import import_file

    of_file = import_file(project / "loose.py").Scale
    config = rlx.RunConfig(
        estimator=module_level, loss={"name": of_file, "by": 3}, rewards=[module_level]
    )
    assert config.estimator.name == f"{__name__}:module_level"
    assert config.loss.name == f"{project}/loose.py:Scale"
    assert config.loss.params == {"by": 3}
    assert config.rewards[0].weight == 1.0
    assert PluginSystem.load().resolve("losses", config.loss.name, config.loss.params)(2) == 6
    for nameless in (lambda x: x, of_file(by=2.0)):
        with pytest.raises(ValueError, match="is not under its own name in its module"):
            rlx.RunConfig(estimator=nameless)


def test_name_with_something_after_a_colon_is_told_how_names_are_written() -> None:
    system = PluginSystem.load(hooks=False, rlxfile=False)
    with pytest.raises(UsageError) as caught:
        system.ref("rewards", "math:x")
    assert caught.value.fix.endswith("is selected by math, with a weight math:0.5")
    with pytest.raises(UsageError, match="there is no module 'gspo'") as caught:
        system.ref("losses", "gspo:0.5")
    assert caught.value.fix.endswith("is selected by gspo")
