"""`rlx serve-reward`: rewards behind HTTP, for runs on other machines and for heavy models."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rlx.cli.output import console, next_step
from rlx.core.errors import UsageError

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)

TOKEN_ENV = "RLX_REWARD_TOKEN"
"""Suggested name of the variable with the token."""
_EXAMPLE = {"prompt": "What is 1 + 1?", "response": "2", "label": "2"}


@app.command()
def serve_reward(
    reward: Annotated[
        list[str] | None,
        typer.Argument(help="Rewards, each with a weight if wanted.", metavar="[NAME[:WEIGHT]]..."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="Reward model: folder or hub name; repeatable.", metavar="PATH"
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0: any free one.", min=0, max=65535)] = 8000,
    token_env: Annotated[
        str | None,
        typer.Option(
            "--token-env",
            help="Environment variable with the token that callers must send. Without it one is "
            "made, unless only this machine can reach the server.",
            metavar="NAME",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", help="Samples that are scored together, at most.", min=1)
    ] = 64,
    batch_wait: Annotated[
        float,
        typer.Option("--batch-wait-ms", help="How long a batch waits for more samples.", min=0),
    ] = 5.0,
    max_body: Annotated[
        float, typer.Option("--max-body-mib", help="Largest request.", min=0.001)
    ] = 64.0,
    grace: Annotated[
        int,
        typer.Option("--grace", help="Seconds for requests under way when it is ended.", min=0),
    ] = 30,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", help="YAML of a run, whose rewards are served."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="As in rlx train: --set rewards.regex.pattern=…", metavar="KEY=VALUE"
        ),
    ] = None,
) -> None:
    """Serve rewards, or a reward model, over HTTP (`--reward remote` asks them)."""
    rewards, policy = _selected(reward or [], model or [], config or [], set_ or [])
    token, made = _token(token_env, host)

    from rlx.core.engine.reward_server import Server, make_app
    from rlx.core.engine.reward_service import RewardService

    service = RewardService(rewards, policy, batch=batch, wait=batch_wait / 1000)
    names = [
        name if weight == 1 else f"{name} × {weight:g}"
        for name, weight in zip(service.names, service.weights, strict=True)
    ]
    service.load()

    def listening(url: str) -> None:
        _explain(url, " + ".join(names), token, token_env or TOKEN_ENV, made)

    server = Server(
        make_app(service, token=token, max_body=int(max_body * 2**20)),
        host=host,
        port=port,
        grace=grace,
        listening=listening,
    )
    _run(server, host, port)
    counts = service.counts
    console().print(f"served {counts['samples']} samples in {counts['requests']} requests")


def _selected(rewards: list[str], models: list[str], files: list[Path], sets: list[str]) -> Any:
    """References with weights, and the policy, from the same settings as a run's."""
    from rlx.core.component import tags_of
    from rlx.core.models import stored_weights
    from rlx.core.plugins import PluginSystem
    from rlx.core.selection import loaded_models
    from rlx.core.settings import load_settings

    chosen: list[Any] = list(rewards)
    if models:  # what callers ask together is one forward pass
        chosen.append({"name": "model", "params": {"model": models, "scope": "batch"}})
    if not chosen and not files:
        raise UsageError(
            "there is nothing to serve",
            where="REWARD",
            fix="a reward (`rlx plugins list rewards`), `--model PATH`, or `-c run.yaml`",
        )
    flags = {"reward": chosen} if chosen else {}
    settings = load_settings(files=files, sets=sets, flags=flags)
    config = settings.config
    plugins = PluginSystem.load(disable=config.plugins.disable, required=config.plugins.required)
    references = []
    for index, item in enumerate(config.rewards):
        key = f"rewards.{index}"
        ref = plugins.ref("rewards", item.name, item.params, where=key)
        for _, name in loaded_models(ref, tags_of(ref.load()), key):
            stored_weights(name, where=f"{key}: {item.name}")
        references.append((ref, item.weight))
    return references, config.reward


def _token(token_env: str | None, host: str) -> tuple[str | None, bool]:
    """The token that callers must send, and whether it was made here."""
    if token_env is not None:
        token = os.environ.get(token_env, "").strip()
        if not token:
            raise UsageError(
                f"the environment variable {token_env} is not set",
                where="--token-env",
                fix=f"export {token_env}=$(openssl rand -hex 24)",
            )
        return token, False
    return (None, False) if _is_loopback(host) else (secrets.token_urlsafe(24), True)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _explain(url: str, names: str, token: str | None, variable: str, made: bool) -> None:
    """Where it listens, how it is asked, how a run uses it."""
    out = console()
    out.print(f"serving {names} on {url}/score")
    if made:
        out.print(f"token:   export {variable}={token}")
    header = f" -H 'Authorization: Bearer '${variable}" if token else ""
    body = json.dumps({"samples": [_EXAMPLE]})
    out.print(
        f"try:     curl -s {url}/score -H 'Content-Type: application/json'{header} -d '{body}'"
    )
    used = f" --set rewards.remote.token_env={variable}" if token else ""
    next_step(f"rlx train --reward remote --set rewards.remote.url={url}{used}")
    sys.stdout.flush()


def _run(server: Any, host: str, port: int) -> None:
    try:
        server.run()
    except SystemExit:  # uvicorn logged why it can't listen
        raise UsageError(
            f"can't listen on {host}:{port}",
            where="--host, --port",
            fix="another port (`--port 0` takes a free one); is a server running there already?",
        ) from None
