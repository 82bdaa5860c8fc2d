"""What a run carries from step to step beside its models, and takes up from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.core.component import Bound
from rlx.core.engine.collector import Collection
from rlx.core.engine.critic import Critic
from rlx.core.engine.evaluations import Evaluations
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.engine.reward_norm import RunningNorm
from rlx.core.kl import KLController


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The parts of a run that have a state."""

    learner: LearnerGroup
    critic: Critic | None
    collector: Collection
    estimator: Bound
    kl: KLController
    reward_norm: RunningNorm | None
    evaluations: Evaluations | None

    async def state_dict(self, step: int) -> dict[str, Any]:
        """All but the models, after `step`; it goes on changing with the parts."""
        return {
            "step": step,
            "collector": await self.collector.state_dict(),
            "estimator": self.estimator.state_dict(),
            "kl": self.kl.state_dict(),
            "reward_norm": self.reward_norm.state_dict() if self.reward_norm else {},
            "evaluations": self.evaluations.state_dict() if self.evaluations else {},
        }

    async def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take up all of a checkpoint but where its rollouts come from (the collector)."""
        self.estimator.load_state_dict(state["estimator"])
        if self.evaluations is not None:
            self.evaluations.load_state_dict(state.get("evaluations", {}))
        self.kl.load_state_dict(state["kl"])
        if self.reward_norm is not None and state["reward_norm"]:
            self.reward_norm.load_state_dict(state["reward_norm"])
        await self.learner.load(str(folder / "policy"))
        if self.critic is not None:
            await self.critic.load(str(folder / "critic"))
