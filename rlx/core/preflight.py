"""What can be known to fail is found here, in milliseconds and before the first worker starts.

Each rule yields findings. An `error` names the setting, where it was set and what to write
instead; a `warning` is printed and the run goes on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from rlx.core import sizes
from rlx.core.config import RunConfig
from rlx.core.errors import UsageError
from rlx.core.machine import find_gpus
from rlx.core.models import ModelInfo, policy_info, stored_weights
from rlx.core.preflight_algorithm import check_kl_gradient, check_old_logprobs
from rlx.core.preflight_case import Case, Finding, Rule, error, warning
from rlx.core.preflight_critic import check_critic
from rlx.core.preflight_eval import eval_complaints
from rlx.core.preflight_faults import check_faults
from rlx.core.preflight_folder import check_output
from rlx.core.preflight_generate import check_generation
from rlx.core.preflight_libraries import check_libraries
from rlx.core.preflight_lora import check_lora
from rlx.core.preflight_placement import check_placement
from rlx.core.preflight_publication import check_publication
from rlx.core.preflight_rollouts import check_replay, check_sampling, check_staleness
from rlx.core.selection import Selection
from rlx.core.settings import nearest_origin

_INSTALL = {
    "torch": "pip install torch",
    "transformers": "pip install transformers",
    "deepspeed": "pip install deepspeed",
    "ray": "`pip install ray`, or run in one process with `--runtime inline`",
    "vllm": "`pip install 'rlx[cpu]'` or `'rlx[gpu]'`, or choose `--engine transformers`",
}


def check(
    config: RunConfig,
    selection: Selection,
    info: ModelInfo,
    *,
    resume: bool = False,
    origins: Mapping[str, str] | None = None,
    rules: tuple[Rule, ...] | None = None,
) -> list[Finding]:
    """Apply every rule and return the warnings.

    Args:
        rules: those that count; unset: `RULES`, for training.

    Raises:
        UsageError: one error with all that must be put right.
    """
    case = Case(config=config, selection=selection, info=info, resume=resume)
    findings = [finding for rule in rules or RULES for finding in rule(case)]
    return raise_errors(findings, origins or {})


def raise_errors(findings: list[Finding], origins: Mapping[str, str]) -> list[Finding]:
    """Return the warnings; raise one UsageError with all errors where there are any."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise _usage_error(errors, origins)
    return findings


def _usage_error(errors: list[Finding], origins: Mapping[str, str]) -> UsageError:
    def where(item: Finding) -> str:
        origin = nearest_origin(origins, item.key)
        key = item.key.replace(".params.", ".")  # as settings are written
        return key if not origins else f"{key} ({origin})"

    if len(errors) == 1:
        return UsageError(errors[0].what, where=where(errors[0]), fix=errors[0].fix)
    lines = [
        f"  {n}. {item.what}\n     where: {where(item)}\n     fix:   {item.fix}"
        for n, item in enumerate(errors, 1)
    ]
    return UsageError("\n".join([f"{len(errors)} settings don't fit together", *lines]))


def check_modules(case: Case) -> Iterator[Finding]:
    """The libraries that the chosen engine and runtime need are installed."""
    config = case.config
    wanted = {"torch": "learner", "transformers": "learner", "deepspeed": "learner"}
    if config.runtime.kind == "ray":
        wanted["ray"] = "runtime.kind"
    if config.rollout.engine == "vllm":
        wanted["vllm"] = "rollout.engine"
    for module, key in wanted.items():
        if importlib.util.find_spec(module) is None:
            yield error(f"{module} is not installed", key, _INSTALL[module])
    yield from check_libraries(case.selection.components)


def check_loaded(case: Case) -> Iterator[Finding]:
    """The models that rewards load are there."""
    for key, model in case.selection.loads:
        try:
            stored_weights(model, where=key)
        except UsageError as problem:
            yield error(problem.what, key, problem.fix or "another model")


def check_requirements(case: Case) -> Iterator[Finding]:
    """The engine can serve what the components require."""
    by = case.selection.required_by
    holders = by.get("reward_model", ())
    if holders and not any(name.startswith("reward ") for name in holders):
        yield error(
            f"{_names(holders)} requires a reward model, and no reward has one",
            _key(holders),
            "a reward that loads one (`rlx plugins list rewards`)",
        )
    if case.config.rollout.group_size == 1 and (names := by.get("groups")):
        yield error(
            f"{_names(names)} compares the rollouts of a task, and a group has only one",
            "rollout.group_size",
            "`--group-size 8`, or a component that does not require groups",
        )


def check_batch(case: Case) -> Iterator[Finding]:
    """Minibatches divide the batch; every rank gets work."""
    config = case.config
    batch, mini = config.batch_size, config.learner.minibatch_size
    product = f"{config.rollout.groups} groups × {config.rollout.group_size} rollouts = {batch}"
    if mini is not None and (mini > batch or batch % mini):
        divisors = [n for n in range(1, batch + 1) if batch % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - mini))[:3])
        yield error(
            f"a minibatch of {mini} rollouts does not divide the batch ({product})",
            "learner.minibatch_size",
            f"one of {', '.join(map(str, near))}",
        )
    share = min(mini or batch, batch)
    if share < config.learner.ranks:
        yield error(
            f"{share} rollouts per optimizer step leave some of {config.learner.ranks} ranks idle",
            "learner.ranks",
            f"at most {share} ranks, or larger minibatches",
        )


def check_length(case: Case) -> Iterator[Finding]:
    """Prompt and response fit the context, and the context fits model and engine."""
    rollout, data, longest = case.config.rollout, case.config.data, case.info.context_length
    if rollout.context_length and rollout.context_length > longest:
        yield error(
            f"rollout.context_length {rollout.context_length} is beyond the model's {longest}",
            "rollout.context_length",
            f"at most {longest}",
        )
    context = min(longest, rollout.context_length or longest)
    if rollout.max_new_tokens >= context:
        yield error(
            f"{rollout.max_new_tokens} new tokens leave no room for a prompt in a context of "
            f"{context}",
            "rollout.max_new_tokens",
            f"`--max-new-tokens {max(context // 2, 1)}`",
        )
    elif rollout.max_response_tokens and rollout.max_response_tokens < rollout.max_new_tokens:
        yield error(
            f"a response of {rollout.max_response_tokens} tokens in all can't hold a turn of "
            f"{rollout.max_new_tokens}",
            "rollout.max_response_tokens",
            f"at least {rollout.max_new_tokens}, or fewer `--max-new-tokens`",
        )
    elif data.max_prompt_tokens and data.max_prompt_tokens + rollout.max_new_tokens > context:
        yield error(
            f"prompts of {data.max_prompt_tokens} and {rollout.max_new_tokens} new tokens exceed "
            f"the context of {context}",
            "data.max_prompt_tokens",
            f"at most {context - rollout.max_new_tokens}, or fewer new tokens",
        )


def check_engine(case: Case) -> Iterator[Finding]:
    """The KV cache holds one sequence; tensor parallelism has devices."""
    config, info = case.config, case.info
    rollout = config.rollout
    gpus = len(find_gpus())
    if rollout.tensor_parallel > 1 and rollout.engine != "vllm":
        yield error(
            f"the {rollout.engine} engine runs on one device",
            "rollout.tensor_parallel",
            "`--set rollout.tensor_parallel=1`, or `--engine vllm`",
        )
    elif gpus and rollout.tensor_parallel > gpus and config.runtime.ray_address is None:
        yield error(
            f"tensor_parallel {rollout.tensor_parallel} needs as many GPUs; there are {gpus}",
            "rollout.tensor_parallel",
            f"at most {gpus}",
        )
    if rollout.engines > 1 and rollout.engine == "vllm" and config.runtime.kind == "inline":
        yield error(
            f"{rollout.engines} vLLM engines need a process each",
            "rollout.engines",
            "`--runtime ray`, one engine, or `--engine transformers`",
        )
    token = sizes.kv_bytes_per_token(info, sizes.engine_dtype(config, info))
    if rollout.engine == "vllm" and not gpus and token:
        longest = sizes.longest_sequence(config, info.context_length)
        if longest * token > rollout.kv_cache_gib * sizes.GIB:
            yield error(
                f"a KV cache of {rollout.kv_cache_gib:g} GiB does not hold one sequence of "
                f"{longest} tokens ({sizes.gib(longest * token)})",
                "rollout.kv_cache_gib",
                f"`--set rollout.kv_cache_gib={longest * token / sizes.GIB:.1f}` or more, or a "
                "shorter `rollout.context_length`",
            )


def check_learner(case: Case) -> Iterator[Finding]:
    """The learner can train in the data type, and in one process when that is asked."""
    config = case.config
    dtype = sizes.learner_dtype(config, case.info)
    if dtype not in ("float32", "bfloat16"):
        yield error(
            f"the model's weights are {dtype}, which the learner can't train in",
            "learner.dtype",
            "`--set learner.dtype=bfloat16` (or float32)",
        )
    if config.runtime.kind == "inline" and config.learner.ranks > 1:
        yield error(
            f"{config.learner.ranks} learner ranks need a process each",
            "learner.ranks",
            "`--runtime ray`, or one rank",
        )
    yield from warmup_findings(config.learner.warmup_steps, config.steps * config.updates_per_step)


def warmup_findings(warmup: int, updates: int) -> Iterator[Finding]:
    """The learning rate reaches its height within a run of so many optimizer steps."""
    if warmup >= updates:
        yield warning(
            f"the warm-up of {warmup} optimizer steps is as long as the run ({updates})",
            "learner.warmup_steps",
            "a shorter warm-up",
        )


def check_kl(case: Case) -> Iterator[Finding]:
    """A reference fits the policy; KL settings have an effect."""
    kl, info = case.config.kl, case.info
    used = "ref_logprobs" in case.selection.requires
    if kl.reference and used:
        reference = policy_info(kl.reference, where="kl.reference")
        if reference.vocab_size != info.vocab_size:
            yield error(
                f"the reference {kl.reference} has a vocabulary of {reference.vocab_size}, the "
                f"policy of {info.vocab_size}",
                "kl.reference",
                "a reference with the policy's tokenizer; unset, it is the starting weights",
            )
    defaults = type(kl)()
    for name in [name for name in type(kl).model_fields if name != "coef"]:
        value = getattr(kl, name)
        ignored = kl.coef == 0 and not (name == "reference" and used)
        if ignored and value != getattr(defaults, name):
            yield warning(
                f"kl.{name} = {value} has no effect while kl.coef is 0",
                f"kl.{name}",
                "`--kl-coef 0.001`, or leave it out",
            )
        elif kl.controller == "fixed" and name in ("target", "horizon"):
            if value == getattr(defaults, name):
                continue
            yield warning(
                f"kl.{name} = {value} has no effect under the fixed controller",
                f"kl.{name}",
                "`--set kl.controller=adaptive`, or leave it out",
            )
    if kl.coef > 0 and kl.controller == "adaptive" and kl.horizon < case.config.batch_size:
        yield warning(
            f"kl.horizon {kl.horizon} is less than the {case.config.batch_size} rollouts of one "
            "step, which may change β by 20 % at most",
            "kl.horizon",
            f"{10 * case.config.batch_size}, for ten steps",
        )


def check_rewards(case: Case) -> Iterator[Finding]:
    """There is something to learn from."""
    rewards = case.selection.rewards
    if not rewards:
        yield warning(
            "no reward is selected: only what the agent itself gives counts",
            "rewards",
            "`--reward NAME` (`rlx plugins list rewards`)",
        )
    elif all(weight == 0 for _, weight in rewards):
        yield error("every reward has weight 0", "rewards", "`--reward NAME:1.0`")


def check_evaluation(case: Case) -> Iterator[Finding]:
    """There is data to evaluate on, and its settings fit together."""
    context = case.info.context_length
    context = min(context, case.config.rollout.context_length or context)
    for complaint in eval_complaints(case.config, context=context):
        yield error(*complaint)


def _names(names: tuple[str, ...]) -> str:
    return " and ".join(dict.fromkeys(names))


def _key(names: tuple[str, ...]) -> str:
    kind = names[0].partition(" ")[0]
    return {"reward": "rewards", "tracker": "trackers"}.get(kind, kind)


RULES: tuple[Rule, ...] = (
    check_modules,
    check_requirements,
    check_batch,
    check_length,
    check_engine,
    check_sampling,
    check_staleness,
    check_learner,
    check_placement,
    check_old_logprobs,
    check_critic,
    check_lora,
    check_kl,
    check_kl_gradient,
    check_rewards,
    check_loaded,
    check_evaluation,
    check_faults,
    check_replay,
    check_output,
    check_publication,
)
ELSEWHERE_RULES = tuple(
    rule
    for rule in RULES
    if rule not in (check_modules, check_engine, check_placement, check_output, check_publication)
)
"""Of a run that is planned for other hardware."""
EVAL_RULES: tuple[Rule, ...] = (
    check_modules,
    check_engine,
    check_rewards,
    check_loaded,
    check_evaluation,
)
"""Of `rlx eval`, which trains nothing."""
GENERATE_RULES: tuple[Rule, ...] = (
    check_modules,
    check_length,
    check_engine,
    check_loaded,
    check_generation,
)
"""Of `rlx generate`, which trains nothing either."""
