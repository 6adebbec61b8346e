"""The verification strategies and policies: their names, and what the config and the runners must know of each."""

from dataclasses import dataclass
from typing import Literal, get_args

VerifyStrategy = Literal["greedy", "target_match", "topp", "rejection"]
"""The rule that accepts a draft."""
AcceptPolicy = Literal["normal", "accept_all", "reject_all"]
"""An override of the strategy, for debugging."""

STRATEGIES: tuple[str, ...] = get_args(VerifyStrategy)
"""The kernels know a strategy by its place here."""
POLICIES: tuple[str, ...] = get_args(AcceptPolicy)
"""The kernels know a policy by its place here."""


@dataclass(frozen=True)
class Traits:
    """One strategy.

    effect: what it does, in a sentence. loss: what it changes in the target's distribution; "" = nothing.
    uses_draft_distribution: whether it asks what distribution a draft was sampled from.
    """

    effect: str
    loss: str = ""
    uses_draft_distribution: bool = False


TRAITS: dict[str, Traits] = {
    "greedy": Traits(
        "accepts a draft if it is the target's first choice",
        loss="it emits the argmax, whatever the temperature of a request",
    ),
    "target_match": Traits("accepts a draft if it is the token that the target samples there"),
    "topp": Traits(
        "accepts a draft if it is in the target's nucleus",
        loss="it changes the output distribution",
    ),
    "rejection": Traits(
        "accepts drafts by vLLM's rule of rejection sampling, in the plugin's own form",
        uses_draft_distribution=True,
    ),
}
POLICY_EFFECTS: dict[str, str] = {
    "normal": "lets the strategy decide on each draft",
    "accept_all": "accepts every valid draft, for debugging",
    "reject_all": "accepts no draft, for debugging",
}


def uses_draft_distribution(strategy: str | None) -> bool:
    """Whether a strategy asks what distribution a draft was sampled from; None is vLLM's own, which does."""
    return strategy is None or TRAITS[strategy].uses_draft_distribution
