"""What is settled before the workers of an offline run start: names, sizes, all of the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.core.config import DataConfig, RunConfig, SourceConfig
from rlx.core.engine.checkpoints import resumable_checkpoint
from rlx.core.engine.prepare import plain_tokenizer
from rlx.core.errors import UsageError
from rlx.core.mixture import check_probabilities
from rlx.core.models import ModelInfo, check_head, model_info, policy_info, resolve_model
from rlx.core.offline.draws import Draws, rows_and_steps
from rlx.core.offline.preflight import check_offline, check_offline_output
from rlx.core.offline.rows import RowBatch, join
from rlx.core.offline.selection import OfflineSelection, select_offline
from rlx.core.offline.sources import Source, load_source
from rlx.core.offline.vocabulary import check_reference, check_teacher
from rlx.core.plugins import PluginSystem
from rlx.core.preflight_case import Finding
from rlx.core.run import default_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePlan:
    """Everything that is known before the first worker starts."""

    config: RunConfig
    """Its `steps` are those that the data and the epochs come to."""
    selection: OfflineSelection
    plugins: PluginSystem
    model: str
    info: ModelInfo
    tokenizer: Any
    pad: int | None
    """Token that pads, for those who load the trained model."""
    sources: Sequence[Source]
    evaluation: Sequence[Source]
    teacher: str | None = None
    """Folder of the teacher, where one is required."""
    reference: str | None = None
    """Folder of the reference, where one is required; None: the model as training starts."""
    total_rows: int
    dtype: str
    resume: bool
    checkpoint: Path | None
    """Where a resumed run goes on; None: from the beginning."""
    warnings: Sequence[Finding] = ()
    origins: Mapping[str, str] = field(default_factory=dict)

    def draws(self) -> Draws:
        """The order in which rows are trained on."""
        shares = {source.name: source.probability for source in self.sources}
        return Draws(
            {source.name: source.rows.rollout_count for source in self.sources},
            probabilities={name: share for name, share in shares.items() if share} or None,
            seed=self.config.seed,
            shuffle=self.config.data.shuffle,
            batch_size=self.config.offline.batch_size,
            total=self.total_rows,
        )

    def rows(self) -> tuple[RowBatch, RowBatch | None]:
        """The rows of all sources, and their mismatched partners where they are required."""
        others = [source.others for source in self.sources if source.others is not None]
        return join([source.rows for source in self.sources]), join(others) if others else None


def prepare_offline(
    config: RunConfig,
    *,
    plugins: PluginSystem | None = None,
    resume: bool = False,
    origins: Mapping[str, str] | None = None,
    status: Callable[[str], None] | None = None,
) -> OfflinePlan:
    """Check names, parameters, sizes, and read the data; start nothing.

    Raises:
        UsageError: for a mistake in the configuration or the data.
    """
    plugins = plugins or PluginSystem.load(
        disable=config.plugins.disable, required=config.plugins.required
    )
    selection = select_offline(config, plugins, origins=origins)
    if config.output is None and not resume:
        folder = default_folder(config, Path("runs"), what=selection.objective.name)
        config = config.model_copy(update={"output": folder})
    model = resolve_model(config.model)
    info = model_info(model)
    check_head(info, selection.needs.head if selection.needs.head in ("score", "token") else None)
    warnings = check_offline(config, selection, info, origins=origins)
    plugins.control("rlx_configure", config=config)
    tokenizer = plain_tokenizer(model, config.data)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    teacher = _teacher(config, selection, tokenizer)
    reference = _reference(config, selection, tokenizer)
    reader = _Reader(config, selection, info, tokenizer, pad, status)
    sources = reader.training()
    evaluation = reader.evaluation()
    _check_best(config.checkpoint.best, evaluation)
    offline = config.offline
    total_rows, steps = rows_and_steps(
        [source.rows.rollout_count for source in sources],
        epochs=offline.epochs,
        steps=offline.steps,
        batch_size=offline.batch_size,
    )
    config = config.model_copy(update={"steps": steps})
    warnings += check_offline_output(config, info, resume=resume, origins=origins)
    assert config.output is not None
    return OfflinePlan(
        config=config,
        selection=selection,
        plugins=plugins,
        model=model,
        info=info,
        tokenizer=tokenizer,
        pad=pad,
        sources=sources,
        evaluation=evaluation,
        teacher=teacher,
        reference=reference,
        total_rows=total_rows,
        dtype=info.dtype if config.learner.dtype == "auto" else config.learner.dtype,
        resume=resume,
        checkpoint=resumable_checkpoint(config.output / "checkpoints") if resume else None,
        warnings=warnings,
        origins=origins or {},
    )


def _check_best(metric: str | None, evaluation: Sequence[Source]) -> None:
    """The metric is of held-out data that there is; what it measures, the objective says later."""
    prefixes = [f"eval/{source.name}/" for source in evaluation]
    if metric is not None and not any(metric.startswith(prefix) for prefix in prefixes):
        raise UsageError(
            f"{metric!r} is no metric of the held-out data",
            where="checkpoint.best",
            fix=" or ".join(f"{prefix}loss" for prefix in prefixes),
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the data sets of a run."""

    config: RunConfig
    selection: OfflineSelection
    info: ModelInfo
    tokenizer: Any
    pad: int | None
    status: Callable[[str], None] | None

    def training(self) -> list[Source]:
        data = self.config.data
        if not data.sources:
            return [self._read(data, "data.path")]
        if data.path != DataConfig.model_fields["path"].default:
            raise UsageError(
                f"data.path ({data.path}) and data.sources are two answers to one question",
                where="data.sources",
                fix="list all data sets in data.sources, or `--set data.sources=[]`",
            )
        sources = list(self._all(data.sources, "data.sources"))
        check_probabilities({source.name: source.probability for source in sources})
        return sources

    def evaluation(self) -> list[Source]:
        return list(self._all(self.config.eval.sources, "eval.sources"))

    def _all(self, items: Sequence[SourceConfig], key: str) -> Iterator[Source]:
        taken: set[str] = set()
        for number, item in enumerate(items):
            data = self.config.data.of(item)
            most = self.config.eval.max_tasks if key == "eval.sources" else None
            if most is not None:
                data = data.model_copy(update={"max_samples": min(most, data.max_samples or most)})
            source = self._read(data, f"{key}.{number}")
            name = item.name or source.name
            if name in taken:
                raise UsageError(
                    f"two data sets have the name {name!r}",
                    where=f"{key}.{number}.name",
                    fix="give each a `name` of its own",
                )
            taken.add(name)
            yield dataclasses.replace(
                source,
                name=name,
                rows=dataclasses.replace(source.rows, sources=(name,)),
                probability=item.probability,
            )

    def _read(self, data: DataConfig, where: str) -> Source:
        offline = self.config.offline
        return load_source(
            data,
            self.selection.needs,
            offline,
            tokenizer=self.tokenizer,
            max_length=min(self.info.context_length, offline.max_length or 10**9),
            pad=self.pad,
            where=where,
            status=self.status,
        )


def _teacher(config: RunConfig, selection: OfflineSelection, tokenizer: Any) -> str | None:
    """The teacher's folder; raises UsageError unless its vocabulary is the model's."""
    named = config.offline.teacher
    if "teacher_logits" not in selection.requires or named is None:
        return None
    folder = policy_info(named, where="offline.teacher").name
    theirs = plain_tokenizer(folder, DataConfig(), where="offline.teacher").get_vocab()
    check_teacher(named, theirs, config.model, tokenizer.get_vocab())
    return folder


def _reference(config: RunConfig, selection: OfflineSelection, tokenizer: Any) -> str | None:
    """The reference's folder where it is another model; raises UsageError unless it fits."""
    named = config.kl.reference
    if "ref_logprobs" not in selection.requires or not named:
        return None
    folder = policy_info(named, where="kl.reference").name
    theirs = plain_tokenizer(folder, DataConfig(), where="kl.reference").get_vocab()
    check_reference(named, theirs, config.model, tokenizer.get_vocab())
    return folder
