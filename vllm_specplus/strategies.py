"""The verification strategies and policies: their names, and what each does in a sentence."""

from typing import Literal, get_args

VerifyStrategy = Literal["greedy", "target_match", "topp", "rejection"]
"""The rule that accepts a draft."""
AcceptPolicy = Literal["normal", "accept_all", "reject_all"]
"""An override of the strategy, for debugging."""

STRATEGIES: tuple[str, ...] = get_args(VerifyStrategy)
"""The kernels know a strategy by its place here."""
POLICIES: tuple[str, ...] = get_args(AcceptPolicy)
"""The kernels know a policy by its place here."""

STRATEGY_EFFECTS: dict[VerifyStrategy, str] = {
    "greedy": "accepts a draft if it is the target's first choice; lossy where a request samples",
    "target_match": "accepts a draft if it is the token that the target samples there; lossless",
    "topp": "accepts a draft if it is in the target's nucleus; lossy where a request samples",
    "rejection": "accepts drafts by vLLM's rule of rejection sampling, in the plugin's own form; lossless",
}
POLICY_EFFECTS: dict[AcceptPolicy, str] = {
    "normal": "lets the strategy decide on each draft",
    "accept_all": "accepts every valid draft, for debugging",
    "reject_all": "accepts no draft, for debugging",
}
