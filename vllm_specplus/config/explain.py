"""What each key of a speculative config does in that config, in a sentence: ``vllm-specplus check --explain``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_specplus.config.aliases import ALIASES, METHOD_ALIASES, SYNONYMS, normalise
from vllm_specplus.config.errors import setting, show
from vllm_specplus.config.keys import NAIVE, NGRAM_KEYS, SUFFIX_KEYS, real_method
from vllm_specplus.config.options import SpecPlusOptions
from vllm_specplus.config.resolve import Resolved
from vllm_specplus.config.rules import METHODS_WITHOUT_MODEL
from vllm_specplus.config.stock_keys import StockKeys, stock_keys
from vllm_specplus.strategies import POLICY_EFFECTS, TRAITS

_NO_EFFECT = "has no effect in this configuration"
_METHODS = {
    "ngram": "drafts are the tokens that followed an earlier match of the text's last tokens",
    "suffix": "drafts come from suffix trees of this request's text and of past answers",
    "mtp": "the model's own MTP head drafts",
    "draft_model": "a smaller model drafts",
}
_HISTORY_SOURCES = {
    "with_ngram": "matches in the request's own text",
    "with_suffix": "the suffix trees of this and past requests",
}


@dataclass(frozen=True)
class _Config:
    """One config that the sentences are about.

    method: None where vLLM chooses it. options: None where vLLM does it all. stock: what the installed vLLM knows.
    """

    method: str | None
    options: SpecPlusOptions | None
    stock: StockKeys

    def uses(self, key: str) -> bool:
        """Whether something reads this key of the n-gram or the suffix match."""
        strategy = None if self.options is None else self.options.mtp_strategy
        if key in SUFFIX_KEYS:
            return self.method == "suffix" or strategy == "with_suffix"
        return self.method in ("ngram", "ngram_gpu") or strategy == "with_ngram"


def explain(raw: Mapping[str, Any], resolved: Resolved) -> list[str]:
    """One line for each key of `raw`, which `resolve` has resolved to `resolved`."""
    items = [(key.replace("-", "_"), value) for key, value in raw.items()]
    stock = stock_keys()
    method = real_method(normalise(items).values.get("method"), stock)
    config = _Config(method, resolved.options, stock)
    return [f"{setting(name, value)} {_sentence(config, name, value)}." for name, value in items]


def _sentence(config: _Config, name: str, value: Any) -> str:
    alias = ALIASES.get(name)
    if alias is not None and alias.target is None:
        return f"is ignored: {alias.why}"
    if value is None:
        return "is the same as leaving it out"
    key, meaning = SYNONYMS.get(name, name), value
    prefix = ""
    if alias is not None and alias.target is not None:
        key, meaning = alias.target, (alias.values or {}).get(value, value)
        prefix = f"is {alias.system}'s name for {setting(key, meaning)}, which "
    elif name == "method" and value in METHOD_ALIASES:
        system, meaning = METHOD_ALIASES[value]
        prefix = f"is {system}'s name for {setting(key, meaning)}, which "
    elif key != name and name not in config.stock.keys:
        prefix = f"is a synonym of {key}, which "
    return prefix + _effect(config, key, meaning)


def _effect(config: _Config, key: str, value: Any) -> str:
    if key in (*NGRAM_KEYS, *SUFFIX_KEYS) and not config.uses(key):
        return _NO_EFFECT
    if key in ("model", "quantization") and config.method in METHODS_WITHOUT_MODEL:
        return f"{_NO_EFFECT}: method {config.method} has no draft model"
    if key in _EFFECTS:
        return _EFFECTS[key](config, value)
    summary = config.stock.keys[key].summary if key in config.stock.keys else ""
    return f"goes to vLLM, which says of this key: {summary}" if summary else "goes to vLLM as it is"


def _method(config: _Config, value: Any) -> str:
    options, method = config.options, config.method or value
    if method == NAIVE:
        if options is not None and options.num_speculative_tokens:
            return "drafts from a request's reference text alone"
        return "drafts nothing"
    by = _METHODS.get(method, f"vLLM's drafter of that name drafts (method {method})")
    if options is None:
        return f"is run by vLLM alone: {by}"
    if options.is_hybrid:
        return f"fills the first slots of a request: {by}"
    return f"chooses the drafter: {by}"


def _tokens(config: _Config, value: Any) -> str:
    options = config.options
    if options is None:
        return f"gives each request {value} slots for drafts in a step"
    if not options.num_speculative_tokens:
        return "gives a request no slot for drafts"
    most = "up to " if options.drafts_from_history else ""
    return f"gives each request {most}{options.num_speculative_tokens} slots for drafts in a step"


def _steps(config: _Config, value: Any) -> str:
    if config.options is None or not config.options.is_hybrid:
        return "is the number of passes that vLLM's drafter makes anyway"
    return f"runs the draft model {value} times a step, which fills the first {value} slots"


def _strategy(config: _Config, value: Any) -> str:
    if config.options is None or not config.options.is_hybrid:
        return "leaves the slots to vLLM's drafter, as without this key"
    return f"fills the slots after the model's {config.options.num_model_steps} from {_HISTORY_SOURCES[value]}"


def _override(config: _Config, value: Any) -> str:
    if not value:
        return "keeps the model's drafts, however long a match is"
    return f"puts the match in place of the model's drafts where at least {value} tokens match"


def _cached(config: _Config, value: Any) -> str:
    if value == -1:
        return "keeps every past answer in the tree that all requests share"
    return f"keeps {value} past answers in the tree that all requests share" if value else "keeps no past answers"


def _model(config: _Config, value: Any) -> str:
    what = "the MTP head" if config.method == "mtp" else "the draft model"
    return f"is where vLLM finds {what}; this command does not look there"


_EFFECTS: dict[str, Callable[[_Config, Any], str]] = {
    "method": _method,
    "model": _model,
    "num_speculative_tokens": _tokens,
    "num_model_steps": _steps,
    "mtp_strategy": _strategy,
    "max_ngram_size": lambda config, value: f"matches the last {value} tokens of the text first, then fewer",
    "min_ngram_size": lambda config, value: f"takes no match of fewer than {value} tokens",
    "match_override_len": _override,
    "suffix_decoding_max_tree_depth": lambda config, value: f"limits a match and its drafts to {value} tokens together",
    "suffix_decoding_max_cached_requests": _cached,
    "suffix_decoding_max_spec_factor": lambda config, value: f"drafts at most {value} tokens for each equal token",
    "suffix_decoding_min_token_prob": lambda config, value: f"drafts no token of less than {value} probability",
    "verify_strategy": lambda config, value: TRAITS[value].effect,
    "max_candidate_len": lambda config, value: f"accepts only the {value} most likely tokens of the nucleus",
    "verify_window": lambda config, value: (
        f"accepts a draft that is the second choice if the next {value} drafts are first choices"
        if value
        else "saves no draft that fails"
    ),
    "accept_policy": lambda config, value: POLICY_EFFECTS[value],
    "quantization": lambda config, value: f"reads the draft model's weights as {show(value)}",
}
