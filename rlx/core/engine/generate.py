"""`rlx generate`: samples of every task into a journal, then files with rows made from them.

    tasks ──agent × engine──▶ groups ──rewards──▶ journal ──select──▶ samples, best, pairs, …

A task is in the journal as soon as it is done, so a run that is ended in any way goes on where it
was. Seeds are of the task's place, not of the order in which tasks are made.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlx.core.config import RunConfig
from rlx.core.engine.collector import GroupMaker
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.evaluation import Progress, limits_of
from rlx.core.engine.inference import Setup, run_inference, set_up
from rlx.core.engine.interfaces import Sampling
from rlx.core.engine.rewards import RewardRunner
from rlx.core.engine.waves import in_waves
from rlx.core.errors import UsageError
from rlx.core.journal import Journal
from rlx.core.picks import Row, picked
from rlx.core.plugins import PluginSystem
from rlx.core.preflight import GENERATE_RULES
from rlx.core.rollouts import Task
from rlx.core.rows_file import write_rows
from rlx.core.run import CONFIG_NAME, library_versions, write_json
from rlx.core.sample_totals import SampleTotals
from rlx.core.samples import SampledTask
from rlx.core.settings import dump_yaml
from rlx.core.tasks import TaskSet, load_tasks

JOURNAL_NAME = "journal.jsonl"
RESULTS_NAME = "results.json"
FILES: Mapping[str, str] = {
    "all": "samples",
    "best": "best",
    "pairs": "pairs",
    "conditioned": "conditioned",
}
"""Form of `generate.select` → name of its file, before the ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """Everything that is known before the engine starts."""

    setup: Setup
    tasks: TaskSet
    sampling: Sampling

    @property
    def config(self) -> RunConfig:
        return self.setup.config

    @property
    def context_length(self) -> int:
        """Of the engine."""
        return self.setup.needed_context(self.sampling.max_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """One file of rows."""

    path: Path
    rows: int
    dropped: Mapping[str, int]
    """Reason → how many samples or tasks were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What was written."""

    totals: SampleTotals
    files: Mapping[str, WrittenFile]
    """By form of `generate.select`."""
    resumed: int
    """Tasks that were done before."""
    failed_rewards: int
    """Rewards that raised, timed out or returned no number, in this call."""
    seconds: float


def prepare_generation(
    config: RunConfig,
    *,
    plugins: PluginSystem | None = None,
    origins: Mapping[str, str] | None = None,
) -> GenerateJob:
    """Check names, parameters, sizes and the data; start nothing. Raises UsageError."""
    setup = set_up(config, plugins=plugins, origins=origins, rules=GENERATE_RULES)
    rollout, temperature = config.rollout, config.generate.temperature
    tasks = load_tasks(
        config.data,
        tokenizer=setup.tokenizer,
        max_prompt_tokens=setup.context_length - rollout.max_new_tokens,
        needs_label=setup.selection.needs_label,
        all_lengths=True,
    )
    sampling = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )
    return GenerateJob(setup=setup, tasks=tasks, sampling=sampling)


def generate(
    job: GenerateJob,
    folder: Path,
    *,
    status: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> Generated:
    """Sample what is missing in `folder`, then write the files of `generate.select`.

    Args:
        folder: new, or of an earlier call with the same model, data and sampling.
        status: told what is being waited for.
        progress: told how many tasks are done.

    Raises:
        UsageError: the samples in the folder are of other data.
        ComponentError: a reward failed under the policy `raise`, or the agent failed.
        EngineError: a worker failed.
        RunInterrupted: Ctrl-C or SIGTERM.
    """
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    tasks = job.tasks.tasks
    settings = folder / CONFIG_NAME
    if not settings.exists():  # before the journal, so that whatever happens can be gone on with
        settings.write_text(dump_yaml(job.config), encoding="utf-8")
    with Journal(folder / JOURNAL_NAME) as journal:
        resumed = len(journal)
        _check_same_data(journal, tasks)
        settings.write_text(dump_yaml(job.config), encoding="utf-8")
        missing = [number for number in range(len(tasks)) if number not in journal]
        failed = _sample(job, folder, journal, missing, status, progress) if missing else 0
        status("writing")
        generated = Generated(
            totals=SampleTotals.of(journal),
            files={form: _write(form, job, folder, journal) for form in _forms(job.config)},
            resumed=resumed,
            failed_rewards=failed,
            seconds=time.perf_counter() - started,
        )
    write_json(folder / RESULTS_NAME, results_of(job, generated))
    return generated


def results_of(job: GenerateJob, generated: Generated) -> dict[str, Any]:
    """What `results.json` holds."""
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": job.config.model,
        "settings": {
            **job.config.generate.model_dump(),
            **asdict(job.sampling),
            "engine": job.config.rollout.engine,
            "seed": job.config.seed,
        },
        **asdict(generated.totals),
        "prompts_too_long": job.tasks.skipped_too_long,
        "failed_rewards": generated.failed_rewards,
        "files": {
            file.path.name: {"rows": file.rows, "dropped": dict(file.dropped)}
            for file in generated.files.values()
        },
        "resumed_tasks": generated.resumed,
        "seconds": generated.seconds,
        "versions": library_versions(),
    }


def _sample(
    job: GenerateJob,
    folder: Path,
    journal: Journal,
    missing: Sequence[int],
    status: Callable[[str], None],
    progress: Progress | None,
) -> int:
    """Sample the tasks that the journal lacks; returns how many rewards failed."""
    setup, config, tasks = job.setup, job.config, job.tasks.tasks

    async def use(engine: RolloutEngines, rewards: RewardRunner) -> int:
        maker = GroupMaker(
            client=engine,
            agent=setup.selection.agent.resolve(),
            scorer=rewards,
            tokenizer=setup.tokenizer,
            sampling=job.sampling,
            limits=limits_of(config, job.context_length),
            group_size=config.generate.samples,
            seed=f"{config.seed}/generate",
        )

        async def make(number: int) -> None:
            task = tasks[number]
            group = await maker.make(task, number)
            journal.add(SampledTask.of(number, task, group))
            if progress is not None:
                progress(len(journal), len(tasks))

        status("generating")
        await in_waves(missing, make, rollouts=config.generate.samples)
        return int(rewards.take_metrics().get("reward/failed", 0))

    return run_inference(
        setup, use, context_length=job.context_length, folder=folder, status=status
    )


def _write(form: str, job: GenerateJob, folder: Path, journal: Journal) -> WrittenFile:
    settings = job.config.generate
    dropped: Counter[str] = Counter()

    def rows() -> Iterator[Row]:
        dropped.clear()  # a file may be written in several passes
        return picked(form, iter(journal), settings, dropped)

    path = folder / f"{FILES[form]}{'.parquet' if settings.parquet else '.jsonl'}"
    count = write_rows(path, rows)
    return WrittenFile(path=path, rows=count, dropped=dict(dropped))


def _forms(config: RunConfig) -> list[str]:
    return list(dict.fromkeys(config.generate.select))


def _check_same_data(journal: Journal, tasks: Sequence[Task]) -> None:
    """Every task that is done has the prompt that it had."""
    for done in journal:
        if done.number >= len(tasks):
            what = f"the folder has samples of task {done.id}, which the data no longer has"
        elif not done.is_of(tasks[done.number]):
            what = f"task {tasks[done.number].id} has another prompt than its samples in the folder"
        else:
            continue
        raise UsageError(what, where="--output", fix="the data as it was, or a new folder")
