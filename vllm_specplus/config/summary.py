"""One line for the log on what an engine does: what drafts, what verifies, what is lossless, what clients share."""

from vllm_specplus.config.keys import HISTORY_METHODS
from vllm_specplus.config.options import SpecPlusOptions
from vllm_specplus.config.resolve import Resolved
from vllm_specplus.strategies import POLICY_EFFECTS, TRAITS


def summary(resolved: Resolved) -> str:
    """Say what an engine with these options does; the plugin has something to do there."""
    options = resolved.options
    assert options is not None
    shared = "nothing"
    if options.caches_answers:
        among = "requests of one cache_salt" if options.needs_salts else "all requests"
        shared = f"suffix trees of past answers, by {among}"
    return f"drafts: {_sources(options)}; verification: {_verification(resolved, options)}; shared: {shared}"


def _sources(options: SpecPlusOptions) -> str:
    if not options.num_speculative_tokens:
        return "none"
    sources = [] if options.method in HISTORY_METHODS else [options.method]
    if options.drafts_ngrams:
        sources.append("n-grams of the request's text")
    if options.matches_suffixes:
        sources.append("suffix trees")
    if options.drafts_from_history:
        sources.append("the request's reference")
    return ", ".join(sources) + (" (what earns most)" if options.adaptive else "")


def _verification(resolved: Resolved, options: SpecPlusOptions) -> str:
    strategy, policy = options.verify_strategy, options.accept_policy
    if strategy is None:
        is_synthetic = resolved.vllm.get("rejection_sample_method") == "synthetic"
        return f"vLLM's own, {'lossy' if is_synthetic else 'lossless'}"
    if policy == "accept_all":
        return f"{policy}, which {POLICY_EFFECTS[policy]}: lossy"
    loss = TRAITS[strategy].loss
    text = f"{strategy}, lossy where a request samples: {loss}" if loss else f"{strategy}, lossless"
    if options.allow_force_accept:
        text += "; lossy for requests that have all of their drafts accepted"
    return text
