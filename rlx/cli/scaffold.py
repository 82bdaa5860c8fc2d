"""`rlx plugins new`: writes an installable package with one component."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from pathlib import Path

import jinja2

from rlx.core.api import API_VERSION
from rlx.core.component import kind_of, singular
from rlx.core.errors import UsageError
from rlx.core.plugins import PluginSystem

_TEMPLATES = Path(__file__).parent / "templates"
_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_SELECTION = {
    "estimators": ("--estimator {name}", "estimator.eps", "1e-5"),
    "losses": ("--loss {name}", "loss.clip", "0.1"),
    "corrections": ("--set correction={name}", "correction.high", "3"),
    "rewards": ("--reward {name}", "rewards.0.longest", "500"),
    "agents": ("--agent {name}", "agent.tries", "5"),
    "samplers": ("--sampler {name}", "sampler.least_spread", "0.1"),
    "objectives": ("--objective {name}", "objective.margin", "0.5"),
    "trackers": ("--set 'trackers=[jsonl, {name}]'", "trackers.1.file", "log.txt"),
}
"""By kind: how the component is selected, and a parameter of the template with a value."""
_COMMAND = {"objectives": "dpo"}
"""By kind: the command that runs the template's component, where that is not `train`."""


def write_package(kind: str, name: str, output: Path) -> Path:
    """Write the package into a new folder `output/rlx-NAME` and return it.

    Raises `UsageError` for a name that is taken or can't be a module, and a folder that exists.
    """
    kind = kind_of(kind)
    _check_name(kind, name)
    values = _values(kind, name)
    folder = output / values["distribution"]
    if folder.exists():
        raise UsageError(f"{folder} exists", where="--output", fix="another name or folder")
    package = folder / values["package"]
    files = {
        folder / "pyproject.toml": "common/pyproject.toml.j2",
        folder / "README.md": "common/README.md.j2",
        package / f"{values['identifier']}.py": f"modules/{kind}.py.j2",
        folder / "tests" / f"test_{values['identifier']}.py": f"tests/{kind}.py.j2",
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    texts = {
        path: environment.get_template(template).render(values) for path, template in files.items()
    }
    texts[package / "__init__.py"] = f'"""{values["title"]} for rlx."""\n'
    texts[package / "py.typed"] = ""
    for path, text in texts.items():
        if path.suffix == ".py":
            _check_free(values["attribute"], text, name)
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{folder} can't be written: {error.strerror}", where="--output", fix="another folder"
        ) from error
    return folder


def selection(kind: str, name: str) -> str:
    """Return the options that select a component: `--estimator mynorm`."""
    return _SELECTION[kind_of(kind)][0].format(name=name)


def command(kind: str) -> str:
    """Return the command that runs the template's component of a kind."""
    return _COMMAND.get(kind_of(kind), "train")


def _values(kind: str, name: str) -> dict[str, str]:
    identifier = name.replace("-", "_")
    _, setting, example = _SELECTION[kind]
    words = re.split(r"[_-]", name)
    is_class = kind == "trackers"
    return {
        "kind": kind,
        "singular": singular(kind),
        "article": "An" if singular(kind)[0] in "aeio" else "A",
        "name": name,
        "identifier": identifier,
        "attribute": "".join(word.capitalize() for word in words) if is_class else identifier,
        "distribution": f"rlx-{name.replace('_', '-')}",
        "package": f"rlx_{identifier}",
        "title": f"The {singular(kind)} {name}",
        "command": command(kind),
        "selection": selection(kind, name),
        "setting": setting,
        "example_value": example,
        "api_version": str(API_VERSION),
    }


def _check_free(attribute: str, text: str, name: str) -> None:
    """Refuse a function's name that means something else to the module or to its test."""
    taken: set[str] = set(dir(builtins))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.arg):
            taken.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            taken.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            home = str(getattr(node, "module", ""))
            taken |= {alias.name for alias in node.names if not home.startswith("rlx_")}
    if attribute in taken:
        raise UsageError(
            f"{name!r} can't be the name of a component: its module uses {attribute!r} for "
            "something else",
            where="NAME",
            fix=f"choose another name, for example my-{name}",
        )


def _check_name(kind: str, name: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} can't be the name of a component",
            where="NAME",
            fix="lower-case letters and digits, parts joined by _ or -",
        )
    entry = PluginSystem.load(hooks=False, rlxfile=False).registry
    if any(item.name == name and item.provider.builtin for item in entry.entries(kind)):
        raise UsageError(
            f"{name!r} is a built-in {singular(kind)}, whose name can't be taken over",
            where="NAME",
            fix="choose another name",
        )
