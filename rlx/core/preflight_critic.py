"""Whether a critic's settings fit the run, and have an effect."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.core.models import model_info
from rlx.core.preflight_case import Case, Finding, error, warning


def check_critic(case: Case) -> Iterator[Finding]:
    """Yield what is wrong with `critic.*`, and what has no effect without a critic."""
    config, critic = case.config, case.config.critic
    if "values" not in case.selection.requires:
        defaults = type(critic)()
        for name in type(critic).model_fields:
            if getattr(critic, name) != getattr(defaults, name):
                yield warning(
                    f"critic.{name} has no effect: no selected component requires values",
                    f"critic.{name}",
                    "an estimator that does (`rlx plugins list estimators`), or leave it out",
                )
        return
    size = critic.minibatch_size
    if size is not None and (size > config.batch_size or config.batch_size % size):
        yield error(
            f"a critic's minibatch of {size} rollouts does not divide the batch of "
            f"{config.batch_size}",
            "critic.minibatch_size",
            f"a divisor of {config.batch_size}, or leave it out",
        )
    if critic.warmup_steps >= config.steps:
        yield error(
            f"the critic warms up for {critic.warmup_steps} of {config.steps} steps, so the "
            "policy would never train",
            "critic.warmup_steps",
            f"less than {config.steps}",
        )
    if critic.model is not None:
        found = model_info(critic.model, where="critic.model")
        if found.vocab_size != case.info.vocab_size:
            yield error(
                f"the critic {critic.model} has a vocabulary of {found.vocab_size}, the policy of "
                f"{case.info.vocab_size}",
                "critic.model",
                "a model with the policy's tokenizer; unset, it is the starting weights",
            )
