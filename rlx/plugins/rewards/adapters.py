"""Reward functions written for other frameworks, selected by prefix, unchanged.

    openrlhf:file.py[:fn]   fn(queries, prompts, labels) -> tensor | {rewards, scores, extra_logs}
    trl:pkg.mod:fn          fn(prompts, completions, completion_ids, **columns) -> [float | None]
    verl:pkg.mod:fn         fn(data_source, solution_str, ground_truth, extra_info) -> float | dict

`fn` defaults to `reward_func` (openrlhf) and `compute_score` (verl). The reference points at the
user's function, so that its source is what the manifest records; the adapter is applied where the
reference is resolved.
https://github.com/OpenRLHF/OpenRLHF https://github.com/huggingface/trl https://github.com/volcengine/verl
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from rlx.core.component import component
from rlx.core.errors import UsageError
from rlx.core.importing import import_target
from rlx.core.references import ComponentRef, source_hash
from rlx.core.rewards import Reward, RewardInputs

Function = Callable[..., Any]
Kwargs = dict[str, Any]
Samples = list[RewardInputs]


@dataclass(frozen=True, slots=True)
class _Call:
    """How the function is called for some samples, and how its answer is read."""

    read: Callable[[Any], list[Any]]
    """One reward for each sample."""
    args: tuple[Any, ...] = ()
    kwargs: Kwargs = field(default_factory=dict)


def openrlhf(function: Function) -> Function:
    """Adapt `reward_func(queries, prompts, labels, **kwargs)`.

    A query is the prompt's text followed by the response; chat messages are written out as
    `role: content` lines, because the chat template's text isn't kept.
    """

    def call(samples: Samples) -> _Call:
        def read(result: Any) -> list[Reward]:
            if not isinstance(result, Mapping):
                return [Reward(score) for score in per_sample(result, samples, "rewards")]
            logs = {**(result.get("extra_logs") or {})}
            if "scores" in result:
                logs["scores"] = result["scores"]
            columns = {key: per_sample(values, samples, key) for key, values in logs.items()}
            return [
                Reward(score, metrics={key: column[i] for key, column in columns.items()})
                for i, score in enumerate(per_sample(result["rewards"], samples, "rewards"))
            ]

        prompts = [sample.prompt_text for sample in samples]
        queries = [p + sample.response for p, sample in zip(prompts, samples, strict=True)]
        # by position: users' functions name these three as they like
        return _Call(read, args=(queries, prompts, [sample.label for sample in samples]))

    return _component("batch", function, call)


def trl(function: Function) -> Function:
    """Adapt `fn(prompts, completions, completion_ids, **columns)`; None means: does not apply.

    With chat prompts a completion is `[{"role": "assistant", "content": …}]`, else text. What
    `log_metric` is told becomes metrics, what `log_extra` is told notes. Arguments that a function
    without `**kwargs` doesn't name are not passed; `trainer_state` never is.
    """
    accepted = _accepted(function)

    def call(samples: Samples) -> _Call:
        metrics: dict[str, float] = {}
        extra: dict[str, list[Any]] = {}

        def read(result: Any) -> list[Any]:
            if not (metrics or extra):
                return per_sample(result, samples, "rewards")
            columns = {key: per_sample(values, samples, key) for key, values in extra.items()}
            return [
                Reward(
                    score,
                    metrics=metrics,
                    note="\n".join(f"{key}: {column[i]}" for key, column in columns.items()),
                )
                for i, score in enumerate(per_sample(result, samples, "rewards"))
            ]

        names = dict.fromkeys(name for sample in samples for name in sample.task)
        given = {
            # TRL keeps these two columns to itself
            **{
                name: [sample.task.get(name) for sample in samples]
                for name in names
                if name not in ("prompt", "completion")
            },
            "prompts": [sample.prompt for sample in samples],
            "completions": [_completion(sample) for sample in samples],
            "completion_ids": [[int(token) for token in sample.tokens] for sample in samples],
            "log_metric": metrics.__setitem__,
            "log_extra": extra.__setitem__,
        }
        return _Call(read, kwargs=_only(accepted, given))

    return _component("batch", function, call)


def verl(function: Function) -> Function:
    """Adapt `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    Rows in verl's own format are read as verl does: `data_source`, `reward_model.ground_truth` and
    `extra_info` columns; else the task's source and label stand in. A dict's `score` is the
    reward, its other numbers are metrics. Arguments that the function does not name are not
    passed, so that the functions of `verl.utils.reward_score` run too.
    """
    accepted = _accepted(function)

    def call(samples: Samples) -> _Call:
        (sample,) = samples
        model = sample.task.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else None
        given = {
            "data_source": sample.task.get("data_source", sample.source),
            "solution_str": sample.response,
            "ground_truth": sample.label if truth is None else truth,
            "extra_info": {**(sample.task.get("extra_info") or {}), "num_turns": sample.turns},
        }
        return _Call(_read_verl, kwargs=_only(accepted, given))

    return _component("rollout", function, call)


def _read_verl(result: Any) -> list[Any]:
    if not isinstance(result, Mapping):
        return [result]
    if "score" not in result:
        raise TypeError(f"a dict from compute_score needs the key 'score', not {list(result)}")
    numbers = {k: float(v) for k, v in result.items() if k != "score" and isinstance(v, Real)}
    return [Reward(result["score"], metrics=numbers)]


@dataclass(frozen=True, slots=True)
class _Scheme:
    adapter: Callable[[Function], Function]
    default: str | None
    """Name of the function where the reference doesn't say."""
    call: str


SCHEMES = {
    "openrlhf": _Scheme(openrlhf, "reward_func", "reward_func(queries, prompts, labels)"),
    "trl": _Scheme(trl, None, "fn(prompts, completions, **columns)"),
    "verl": _Scheme(
        verl, "compute_score", "compute_score(data_source, solution_str, ground_truth, extra_info)"
    ),
}


def adapt(prefix: str, target: str) -> Function:
    """Return the component for a function of another framework (`adapt("trl", "pkg.mod:fn")`)."""
    return SCHEMES[prefix].adapter(import_target(_target(prefix, target), label=f"reward {target}"))


def resolve(reference: str) -> ComponentRef | None:
    """Return the reference for `prefix:target`, or None for any other; imports the function.

    Raises `UsageError` for a function that isn't named or can't be imported.
    """
    prefix, _, rest = reference.partition(":")
    if prefix not in SCHEMES or not rest:
        return None
    target = _target(prefix, rest)
    place = target.rpartition(":")[0]
    folder = str(Path(place).parent) if place.endswith(".py") else str(Path.cwd())
    function = import_target(target, label=f"reward {reference!r}", search_path=(folder,))
    return ComponentRef(
        kind="rewards",
        name=reference,
        target=target,
        source_hash=source_hash(function, target),
        search_path=(folder,),
        adapter=f"{__name__}:{prefix}",
    )


def per_sample(values: Any, samples: Samples, what: str) -> list[Any]:
    """Return one value per sample from a list, tensor or array; a single number stands for all."""
    tolist = getattr(values, "tolist", None)
    values = tolist() if callable(tolist) else values
    if values is None or isinstance(values, Real):
        return [values] * len(samples)
    if not isinstance(values, (list, tuple)) or len(values) != len(samples):
        found = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(values)
        raise TypeError(f"{what}: {found} for {len(samples)} samples")
    items = (getattr(value, "tolist", lambda value=value: value)() for value in values)
    return [item[0] if isinstance(item, list) and len(item) == 1 else item for item in items]


def _component(
    scope: Literal["rollout", "batch"], function: Function, call: Callable[[Samples], _Call]
) -> Function:
    """Return the reward component: asynchronous when the function is, else synchronous."""

    def start(x: Any, kwargs: Kwargs | None) -> tuple[Any, _Call]:
        this = call(x if scope == "batch" else [x])
        return function(*this.args, **{**this.kwargs, **(kwargs or {})}), this

    def finish(result: Any, this: _Call) -> Any:
        replies = this.read(result)
        return replies if scope == "batch" else replies[0]

    def adapted(x: Any, *, kwargs: Kwargs | None = None) -> Any:
        return finish(*start(x, kwargs))

    async def adapted_async(x: Any, *, kwargs: Kwargs | None = None) -> Any:
        result, this = start(x, kwargs)
        return finish(await result, this)

    chosen: Function = adapted_async if _is_async(function) else adapted
    chosen.__doc__ = f"""{inspect.getdoc(function) or "A reward of another framework."}

    Args:
        kwargs: passed on to the function as keyword arguments.
    """
    return component(scope=scope)(chosen)


def _is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an instance, not a test for callability
    )


def _completion(sample: RewardInputs) -> str | list[dict[str, str]]:
    if isinstance(sample.prompt, str):
        return sample.response
    return [{"role": "assistant", "content": sample.response}]


def _accepted(function: Function) -> set[str] | None:
    """Return the names that a function takes; None when it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _only(accepted: set[str] | None, given: Kwargs) -> Kwargs:
    return {k: v for k, v in given.items() if accepted is None or k in accepted}


def _target(prefix: str, rest: str) -> str:
    place, _, name = rest.rpartition(":")
    if not place:
        place, name = rest, SCHEMES[prefix].default or ""
        if not name:
            raise UsageError(
                f"{prefix}:{rest} doesn't say which function",
                fix=f"{prefix}:{rest}:NAME of a function {SCHEMES[prefix].call}",
            )
    if place.endswith(".py"):
        place = str(Path(place).expanduser().resolve())
    return f"{place}:{name}"
