"""Write docs/algorithms.md from the docstrings of the built-in algorithms.

python scripts/algorithms_page.py            # writes docs/algorithms.md
python scripts/algorithms_page.py --check    # exit 1 when the page is out of date
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from rlx.cli.plugin_page import docstring_section, docstring_summary
from rlx.core.component import tags_of
from rlx.core.parameters import parameter_fields, parameters_model
from rlx.core.plugins import PluginSystem
from rlx.core.references import ComponentRef

PAGE = Path(__file__).resolve().parent.parent / "docs" / "algorithms.md"
KINDS = {
    "estimators": "Advantage estimators turn rewards into an advantage per rollout or per token.",
    "losses": "Losses are surrogates per action token; the core adds correction, KL, entropy and "
    "the reduction.",
    "corrections": "Corrections weigh tokens for the mismatch between engine and learner: "
    "w = exp(clamp(old log-prob − rollout log-prob, ±20)), detached.",
}
INTRODUCTION = """\
# Algorithms

Every algorithm is a component: choose one by name (`--estimator rloo --loss cispo --correction tis`), look at one with
`rlx plugins show KIND NAME`. This page is made from the components' docstrings by `make docs`; how each one learns the embedded
task is in [results.md](results.md).

Notation: per-token quantities lie flat over the action tokens `[N]`, rollouts on `[B]`. `R` is a rollout's total reward, `mean_g`
and `std_g` are over its group, `G_g` is the group's size, `A` the advantage, `ρ = exp(clamp(log π − log π_old, ±20))`, `sg` stops
the gradient. "Whitened" means over all action tokens of the batch: minus the mean, over sqrt(max(biased variance, 1e-8)).
"""
OBJECTIVE = """\
## What the core adds to every loss

| part | settings | what it is |
|---|---|---|
| reduction | `algorithm.aggregation` | `token-mean` (all action tokens of the optimizer step), `seq-mean-token-mean`, `seq-mean-token-sum-norm` (constant length, Dr. GRPO). Denominators are global over micro-batches, gradient accumulation and ranks |
| KL | `kl.coef`, `kl.estimator`, `kl.placement`, `kl.controller` | with d = log π − log π_ref: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, clamped to ±10 (J. Schulman, "Approximating KL divergence", 2020). In the loss, k2's gradient is the unbiased one of the reverse KL on policy; k3's is not. In the reward, the return-to-go of −β·k reaches every token. `adaptive`: β ← β·(1 + clip(kl/target − 1, ±0.2)·min(n/horizon, 1)) after a step of n rollouts, arXiv:1909.08593 |
| entropy | `algorithm.entropy_coef` | − coef · H, of the tempered distribution that sampled |
| old log-probs | `algorithm.old_logprobs` | `auto` runs the extra forward only when a batch is used for more than one update, or a component requires old log-probs; `recompute` always does; with `rollout` the engine's stand in for them |
| critic | `critic.*` | ½·max((V − ret)², (clip(V, V_old ± c) − ret)²) times `critic.coefficient`, same reduction |
"""
OBJECTIVES = (
    "Objectives train on fixed data (`rlx sft`, `rm`, `prm`, `dpo`, `kto`, `distill`; any of them with "
    "`--objective NAME`). `c` and `r` are the chosen and the rejected answer of a pair, m the mean and Δ the "
    "sum over an answer's tokens. The core averages over all tokens, sequences or pairs of the optimizer step."
)


def page() -> str:
    system = PluginSystem.load(hooks=False, rlxfile=False)
    parts = [INTRODUCTION, *(table(system, kind, text) for kind, text in KINDS.items()), OBJECTIVE]
    return "\n".join([*parts, table(system, "objectives", OBJECTIVES)])


def table(system: PluginSystem, kind: str, text: str) -> str:
    lines = [f"## {kind.capitalize()}", "", text, ""]
    lines += ["| name | what it computes | source | when to use it | needs | parameters |"]
    lines += ["|---|---|---|---|---|---|"]
    for name in system.names(kind):
        ref = system.locate(kind, name)
        if ref.distribution == "rlx":
            lines.append("| " + " | ".join(cells(ref)) + " |")
    return "\n".join([*lines, ""])


def cells(ref: ComponentRef) -> list[str]:
    component = ref.load()
    text = inspect.getdoc(component) or ""
    tags = tags_of(component)
    needs = sorted(tags.requires) + [f"aggregation {tags.aggregation}"] * bool(tags.aggregation)
    needs += [f"{name} {tags.extra[name]}" for name in ("data", "head") if name in tags.extra]
    needs += ["one greedy rollout per task"] * bool(tags.extra.get("greedy"))
    fields = parameter_fields(parameters_model(component, label=ref.name))
    parameters = [
        f"`{name}`" if field.is_required() else f"`{name}={field.default}`"
        for name, field in fields.items()
    ]
    formula = docstring_section(text, "Formula")
    what = docstring_summary(text) + (f"<br>`{formula.replace('`', '')}`" if formula else "")
    found = [f"`{ref.name}`", what, docstring_section(text, "Source")]
    found += [docstring_section(text, "Use"), ", ".join(needs), ", ".join(parameters)]
    return [(cell or "–").replace("|", "\\|").replace("\n", " ") for cell in found]


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
