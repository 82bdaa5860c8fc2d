"""Every task once per epoch in shuffled order; every group is trained on."""

from __future__ import annotations

from rlx.core.rollouts import Group


class Uniform:
    """Keep every group; the core's task stream supplies the shuffled epochs."""

    def keep(self, group: Group) -> bool:
        return True
