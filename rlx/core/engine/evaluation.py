"""Evaluation with a rollout engine: the tasks, agent and rewards of training, not its sampler.

It leaves no trace in the training run: agent, seeds and group numbers are its own, and the engine
forgets the prefixes that it cached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.core.agents import Limits
from rlx.core.config import RunConfig
from rlx.core.engine.collector import GroupMaker, GroupScorer
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.interfaces import Sampling
from rlx.core.engine.reward_compose import part_names
from rlx.core.engine.waves import in_waves
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.evaluation import TOTAL, Evaluation, Scoring, evaluated, metric_names
from rlx.core.rollouts import Group, Task
from rlx.core.selection import Selection
from rlx.core.tasks import Source, load_sources

Progress = Callable[[int, int], None]
"""Told how many tasks are done, of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What is evaluated and how; known before any worker starts."""

    sources: tuple[Source, ...]
    samples: int
    scoring: Scoring
    sampling: Sampling
    seed: str


def plan_evaluation(
    config: RunConfig, selection: Selection, *, tokenizer: Any, context_length: int
) -> EvaluationPlan:
    """Load the data of `config.eval` and settle what its settings leave open.

    Raises:
        UsageError: for a mistake in the data, in `eval.part` or in `checkpoint.best`.
    """
    eval_, rollout = config.eval, config.rollout
    new_tokens = eval_.max_new_tokens or rollout.max_new_tokens
    longest = context_length - new_tokens
    common = config.data
    if eval_.max_tasks is not None:
        most = min(eval_.max_tasks, common.max_samples or eval_.max_tasks)
        common = common.model_copy(update={"max_samples": most})
    sources = load_sources(
        common,
        eval_.sources,
        tokenizer=tokenizer,
        max_prompt_tokens=min(common.max_prompt_tokens or longest, longest),
        needs_label=selection.needs_label,
        key="eval.sources",
        all_lengths=True,
    )
    _check_best(config, [source.name for source in sources])
    return EvaluationPlan(
        sources=sources,
        samples=eval_.samples,
        scoring=Scoring(part=_chosen_part(config, selection), threshold=eval_.threshold),
        sampling=Sampling(
            max_new_tokens=new_tokens,
            temperature=eval_.sampling_temperature(rollout.temperature),
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        ),
        seed=f"{config.seed}/eval",
    )


def limits_of(config: RunConfig, context_length: int) -> Limits:
    """Where episodes end at the latest, in training and in evaluation."""
    episode = config.episode
    return Limits(
        context_length=context_length,
        max_turns=config.rollout.max_turns,
        max_tokens=config.rollout.max_response_tokens,
        max_seconds=episode.max_seconds,
        step_timeout=episode.step_timeout,
        max_observation=episode.max_observation,
        cut_observations=episode.long_observation == "cut",
        failure=episode.failure,
        history=episode.history,
    )


class Evaluator:
    """Runs the evaluation of a plan, as often as it is asked to."""

    def __init__(
        self,
        plan: EvaluationPlan,
        *,
        client: RolloutEngines,
        selection: Selection,
        scorer: GroupScorer,
        tokenizer: Any,
        limits: Limits,
    ) -> None:
        self._plan = plan
        self._client = client
        self._scorer = scorer
        self._maker = GroupMaker(
            client=client,
            agent=selection.agent.resolve(),
            scorer=scorer,
            tokenizer=tokenizer,
            sampling=plan.sampling,
            limits=limits,
            group_size=plan.samples,
            seed=plan.seed,
        )

    async def evaluate(self, progress: Progress | None = None) -> Evaluation:
        """Evaluate the engine's present weights.

        Raises:
            ComponentError: a reward failed under the policy `raise`, or the agent failed.
        """
        started = time.perf_counter()
        remembered = await self._scorer.state_dict()
        self._scorer.take_metrics()  # what was counted so far is not of this evaluation
        jobs = [
            (source.name, task, number)
            for source in self._plan.sources
            for number, task in enumerate(source.tasks)
        ]
        done = 0

        async def make(job: tuple[str, Task, int]) -> Group | None:
            nonlocal done
            group = await self._maker.make(job[1], job[2])
            done += 1
            if progress is not None:
                progress(done, len(jobs))
            return group

        made = await in_waves(jobs, make, rollouts=self._plan.samples)
        groups: dict[str, list[Group | None]] = {source.name: [] for source in self._plan.sources}
        for (name, _, _), group in zip(jobs, made, strict=True):
            groups[name].append(group)
        await self._client.forget()
        await self._scorer.load_state_dict(remembered)
        return evaluated(
            groups,
            samples=self._plan.samples,
            scoring=self._plan.scoring,
            failed_rewards=int(self._scorer.take_metrics().get("reward/failed", 0)),
            seconds=time.perf_counter() - started,
        )


def _chosen_part(config: RunConfig, selection: Selection) -> str:
    names = part_names([ref.name for ref, _ in selection.rewards])
    part = config.eval.part
    if part is None:
        return names[0] if names else TOTAL
    if part not in (*names, TOTAL):
        raise UsageError(
            f"no reward is called {part!r}",
            where="eval.part",
            fix=did_you_mean(part, [*names, TOTAL]) or f"one of: {', '.join([*names, TOTAL])}",
        )
    return part


def _check_best(config: RunConfig, sources: Sequence[str]) -> None:
    best = config.checkpoint.best
    names = metric_names(sources, config.eval.samples)
    if best is not None and best not in names:
        raise UsageError(
            f"evaluation gives no metric {best!r} that could be best",
            where="checkpoint.best",
            fix=did_you_mean(best, names) or f"one of: {', '.join(names[:8])}",
        )
