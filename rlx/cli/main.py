"""`rlx`: the group of commands. A command's module is imported when that command runs, not before.

Neither `rlx --help` nor shell completion imports a plugin, torch, ray, vllm, deepspeed or
transformers.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import signal
import sys
import warnings
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from rlx.core.errors import RunInterrupted, UsageError, did_you_mean
from rlx.core.openmp import openmp_environment

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from rlx.core.registry import Provider

COMMANDS = {
    "train": ("rlx.cli.train:app", "Train a language model with reinforcement learning."),
    "sft": ("rlx.cli.offline:sft", "Fine-tune a language model on demonstrations."),
    "rm": ("rlx.cli.offline:rm", "Train a reward model on preference pairs."),
    "prm": ("rlx.cli.offline:prm", "Train a process reward model on judged steps."),
    "dpo": ("rlx.cli.offline:dpo", "Train on preference pairs directly (dpo, ipo, simpo, orpo)."),
    "kto": ("rlx.cli.offline:kto", "Train on answers that are desirable or not."),
    "distill": ("rlx.cli.offline:distill", "Draw a model's distributions to a teacher's."),
    "plan": ("rlx.cli.plan:app", "Show what would run where: batches, memory, processes."),
    "doctor": ("rlx.cli.doctor:app", "Check this machine: versions, devices, known problems."),
    "plugins": ("rlx.cli.plugins:app", "List, show, check and create components and plugins."),
    "eval": ("rlx.cli.eval:app", "Evaluate a model, a run or a checkpoint: pass@k."),
    "generate": ("rlx.cli.generate:app", "Sample responses with rewards; make data of them."),
    "runs": ("rlx.cli.runs:app", "List and look at runs on disk."),
    "serve-reward": ("rlx.cli.serve_reward:app", "Serve rewards or a reward model over HTTP."),
    "export": ("rlx.cli.export:app", "Write a checkpoint as a Hugging Face folder."),
}
"""Name → where its Typer app is, and the line that `rlx --help` shows."""
_NATIVE = {"ray", "torch", "vllm", "deepspeed"}


class LazyGroup(TyperGroup):
    """Lists commands from a table and from entry points; imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *sorted(set(_offers(ctx)) - set(COMMANDS))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command when it was loaded, else a stand-in that carries its help line."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name in COMMANDS:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1])
        offers = _offers(ctx).get(cmd_name)
        if not offers:
            return None
        return TyperCommand(cmd_name, help=f"From the plugin {_distributions(offers)}.")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            command = _load(args[0])
            if command is not None:
                command.name = args[0]
                self.commands[args[0]] = command
            elif not ctx.resilient_parsing:
                known = self.list_commands(ctx)
                raise UsageError(
                    f"there is no command {args[0]!r}",
                    fix=did_you_mean(args[0], known) or f"one of: {', '.join(known)}",
                )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=LazyGroup,
    name="rlx",
    help="Reinforcement-learning post-training of language models, with plugins.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="First run: [bold]rlx train[/bold] (needs no argument). "
    "This machine: [bold]rlx doctor[/bold].",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"rlx {importlib.metadata.version('rlx')}")
        except importlib.metadata.PackageNotFoundError:
            typer.echo("rlx (source tree, not installed)")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """The options before a command."""


def main() -> NoReturn:
    """Run the command line; mistakes exit with 2, failures with 1, Ctrl-C with 130."""
    os.environ.update(openmp_environment())  # which torch reads when a plugin imports it
    code = _exit_code()
    if _NATIVE.isdisjoint(sys.modules):
        sys.exit(code)
    # Ray, torch and gloo abort now and then while the interpreter tears them down. By now all
    # files are closed and all workers ended, so nothing is lost by leaving without that.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _exit_code() -> int:
    from rlx.cli.output import print_failure, print_notice, print_usage_error, show_warning

    python_way = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        ours = category.__module__.startswith("rlx.")
        (show_warning if ours else python_way)(message, category, *rest, **more)

    warnings.showwarning = show
    try:
        app(prog_name="rlx")
    except UsageError as error:
        if "_RLX_COMPLETE" not in os.environ:  # a shell that asks for words shows no errors
            print_usage_error(error)
        return 2
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except UnicodeDecodeError as error:
        from rlx.core.discovery import unreadable_metadata

        # Libraries read the metadata of all that is installed, and end here at what they can't.
        damaged = unreadable_metadata()
        if damaged is None:
            print_failure(error)
            return 1
        print_usage_error(damaged)
        return 2
    except RunInterrupted as stop:
        print_notice(str(stop))
        return 128 + (stop.signal or signal.SIGINT)
    except Exception as error:
        print_failure(error)
        return 1
    return 0


def _offers(ctx: Any) -> dict[str, list[tuple[Provider, EntryPoint]]]:
    """`_external()`, read once per command line."""
    found: dict[str, list[tuple[Provider, EntryPoint]]] = ctx.meta.setdefault(__name__, {})
    if not found:
        found.update(_external())
    return found


def _external() -> dict[str, list[tuple[Provider, EntryPoint]]]:
    """Commands of plugins, by name, with who brings them; their modules are not imported."""
    from rlx.core.discovery import COMMAND_GROUP, Selection, scan

    selection = Selection()
    found: dict[str, list[tuple[Provider, EntryPoint]]] = {}
    for distribution in scan():
        for point in distribution.in_group(COMMAND_GROUP):
            if selection.admits(distribution.provider.distribution, point.name):
                found.setdefault(point.name, []).append((distribution.provider, point))
    return found


def _distributions(offers: list[tuple[Provider, EntryPoint]]) -> str:
    return " and ".join(provider.distribution for provider, _ in offers)


def _load(name: str) -> Any:
    if name in COMMANDS:
        module, _, attribute = COMMANDS[name][0].partition(":")
        return _command(getattr(importlib.import_module(module), attribute))
    offers = _external().get(name)
    if not offers:
        return None
    if len(offers) > 1:
        first = offers[0][0].distribution
        raise UsageError(
            f"the command {name!r} is offered by {_distributions(offers)}",
            where="entry points rlx.commands",
            fix=f"uninstall one, or use one alone: RLX_PLUGINS={first} rlx {name}",
        )
    return load_command(name, *offers[0])


def load_command(name: str, provider: Provider, point: EntryPoint) -> Any:
    """Import a plugin's command. Raises `UsageError` when that fails or it is no Typer app."""
    from rlx.core.importing import imported, plugin_traceback

    label = f"the command {name!r} of {provider}"
    try:
        with imported():
            loaded = point.load()
        command = _command(loaded)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UsageError(
            f"{label} can't be imported:\n\n{plugin_traceback(error, without=(__file__,))}",
            where=point.value,
            fix="upgrade or uninstall that plugin",
        ) from error
    if not (hasattr(command, "make_context") and hasattr(command, "name")):
        raise UsageError(
            f"{label} is a {type(loaded).__name__}, not a Typer app",
            where=point.value,
            fix="point the entry point at an instance of typer.Typer",
        )
    return command


def _command(loaded: Any) -> Any:
    """A Click command of a Typer app, without a second pair of completion options."""
    if not isinstance(loaded, typer.Typer):
        return loaded
    loaded._add_completion = False
    return typer.main.get_command(loaded)
