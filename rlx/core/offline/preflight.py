"""What can be known to fail in an offline run, before anything heavy is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from rlx.core.config import RunConfig
from rlx.core.models import ModelInfo
from rlx.core.offline.selection import OfflineSelection
from rlx.core.preflight import raise_errors, warmup_findings
from rlx.core.preflight_case import Finding, error, warning
from rlx.core.preflight_faults import bounds_findings, restart_findings
from rlx.core.preflight_folder import check_place, folder_complaints
from rlx.core.preflight_libraries import check_libraries
from rlx.core.preflight_lora import lora_complaints, resumed_complaints

_INSTALL = {
    "torch": "pip install torch",
    "transformers": "pip install transformers",
    "deepspeed": "pip install deepspeed",
    "ray": "`pip install ray`, or run in one process with `--runtime inline`",
}


def check_offline(
    config: RunConfig,
    selection: OfflineSelection,
    info: ModelInfo,
    *,
    origins: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Apply the rules that need no data, and return the warnings.

    Raises:
        UsageError: one error with all that must be put right.
    """
    findings = [
        *_modules(config),
        *check_libraries(selection.components),
        *bounds_findings(config.faults.bounds, selection.components),
        *_sizes(config, info),
        *_wishes(config, selection),
        *lora_complaints(config, info),
        *_faults(config),
    ]
    return raise_errors(findings, origins or {})


def check_offline_output(
    config: RunConfig,
    info: ModelInfo,
    *,
    resume: bool,
    origins: Mapping[str, str] | None = None,
) -> list[Finding]:
    """The run folder is free, or holds what `--resume` needs, and the steps are enough: warnings.

    Raises:
        UsageError: for the folder.
    """
    complaints = list(folder_complaints(config.output, steps=config.steps, resume=resume))
    findings = [error(what, "output", fix) for what, fix in complaints]
    findings += resumed_complaints(config) if resume else []
    findings += check_place(config, info, critic=False)
    findings += warmup_findings(config.learner.warmup_steps, config.steps)
    return raise_errors(findings, origins or {})


def _modules(config: RunConfig) -> Iterator[Finding]:
    wanted = {"torch": "learner", "transformers": "learner", "deepspeed": "learner"}
    if config.runtime.kind == "ray":
        wanted["ray"] = "runtime.kind"
    for module, key in wanted.items():
        if importlib.util.find_spec(module) is None:
            yield error(f"{module} is not installed", key, _INSTALL[module])


def _faults(config: RunConfig) -> Iterator[Finding]:
    yield from restart_findings(config)
    if config.faults.divergence == "rollback":
        yield error(
            "fixed data can't be gone on with after a rollback: the same rows would come again",
            "faults.divergence",
            "`stop`",
        )


def _sizes(config: RunConfig, info: ModelInfo) -> Iterator[Finding]:
    offline, learner = config.offline, config.learner
    if offline.max_length is not None and offline.max_length > info.context_length:
        yield error(
            f"{offline.max_length} tokens are more than the model's context of "
            f"{info.context_length}",
            "offline.max_length",
            f"at most {info.context_length}",
        )
    if offline.batch_size < learner.ranks:
        yield error(
            f"{offline.batch_size} rows per optimizer step leave some of {learner.ranks} ranks "
            "idle",
            "offline.batch_size",
            f"at least {learner.ranks}",
        )
    if learner.ranks > 1 and config.runtime.kind == "inline":
        yield error(
            f"{learner.ranks} ranks need processes of their own",
            "learner.ranks",
            "`--runtime ray`, or one rank",
        )
    for key in ("minibatch_size", "epochs"):
        if getattr(learner, key) not in (None, 1):
            yield error(
                f"learner.{key} is of rollouts, which are used again",
                f"learner.{key}",
                "offline.batch_size and offline.epochs",
            )
    dtype = info.dtype if learner.dtype == "auto" else learner.dtype
    if learner.zero_stage == 0 and dtype == "bfloat16":
        yield error(
            "ZeRO stage 0 keeps no float32 copy of bfloat16 weights: small updates would be lost",
            "learner.zero_stage",
            "learner.zero_stage: 1, or learner.dtype: float32",
        )


def _wishes(config: RunConfig, selection: OfflineSelection) -> Iterator[Finding]:
    evaluates = bool(config.eval.sources)
    wishes = {
        "eval.every": config.eval.every > 0,
        "eval.before_training": config.eval.before_training,
        "checkpoint.best": config.checkpoint.best is not None,
    }
    for key in [key for key, wanted in wishes.items() if wanted and not evaluates][:1]:
        yield error(
            f"{key} is set, and there is no data to evaluate on",
            key,
            "`--eval-data FILE` (or eval.sources in a file)",
        )
    if config.kl.reference and "ref_logprobs" not in selection.requires:
        yield warning(
            f"the objective {selection.objective.name!r} reads no reference model",
            "kl.reference",
            "an objective that requires ref_logprobs, or leave it out",
        )
    needs_teacher = "teacher_logits" in selection.requires
    if needs_teacher and config.offline.teacher is None:
        yield error(
            f"the objective {selection.objective.name!r} needs a teacher, and none is named",
            "offline.teacher",
            "`--teacher MODEL`: a folder or hub name with the same vocabulary",
        )
    elif config.offline.teacher is not None and not needs_teacher:
        yield warning(
            f"the objective {selection.objective.name!r} reads no teacher",
            "offline.teacher",
            "an objective that requires teacher_logits, or leave it out",
        )
    everything = selection.needs.data == "conversations" and config.offline.train_on == "all"
    whole = selection.needs.head == "score" or everything
    if config.data.max_prompt_tokens is not None and whole:
        yield error(
            "no prompt is measured where prompt and answer are one text",
            "data.max_prompt_tokens",
            "offline.max_length for the whole text, or leave it out",
        )
    if config.offline.margin and selection.needs.data != "pairs":
        yield warning(
            f"the objective {selection.objective.name!r} reads no pairs",
            "offline.margin",
            "leave it out",
        )
