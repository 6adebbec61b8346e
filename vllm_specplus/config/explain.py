"""Explains each key of a speculative config in a sentence: ``vllm-specplus check --explain``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_specplus.config.aliases import (
    ALIASES,
    INPUT_LOOKUP_KEY,
    OFF,
    SYNONYMS,
    NormalisedConfig,
    normalise,
    translation,
)
from vllm_specplus.config.dialects import DIALECT_KEY, DIALECTS
from vllm_specplus.config.errors import setting, show
from vllm_specplus.config.keys import NAIVE, NGRAM_KEYS, SUFFIX_KEYS, real_method
from vllm_specplus.config.options import SpecPlusOptions
from vllm_specplus.config.resolve import Resolved
from vllm_specplus.config.rules import METHODS_WITHOUT_MODEL, VLLM_NGRAM_SIZE
from vllm_specplus.config.stock_keys import StockKeys, stock_keys
from vllm_specplus.strategies import POLICY_EFFECTS, TRAITS

_NO_EFFECT = "has no effect in this configuration"
_METHODS = {
    "ngram": "drafts are the tokens that followed an earlier match of the text's last tokens",
    "suffix": "drafts come from suffix trees of this request's text and of past answers",
    "mtp": "the model's own MTP head drafts",
    "draft_model": "a smaller model drafts",
    "medusa": "Medusa heads draft, all of them in one run",
}
_HISTORY_SOURCES = {
    "with_ngram": "matches in the request's own text",
    "with_suffix": "the suffix trees of this and past requests",
}


@dataclass(frozen=True)
class _Config:
    """One config that the sentences are about.

    method: None where vLLM chooses it. options: None where vLLM does it all. stock: what the installed vLLM knows.
    config: the keys under their own names.
    """

    method: str | None
    options: SpecPlusOptions | None
    stock: StockKeys
    config: NormalisedConfig

    def uses(self, key: str) -> bool:
        """Whether something reads this key of the n-gram or the suffix match."""
        strategy = None if self.options is None else self.options.mtp_strategy
        if key in SUFFIX_KEYS:
            return self.method == "suffix" or strategy == "with_suffix"
        if key == "ngram_match_order":
            return self.options is not None and self.options.drafts_ngrams
        drafts = self.options is not None and self.options.drafts_from_history and not self.is_idle
        return self.method in ("ngram", "ngram_gpu") or drafts

    @property
    def is_idle(self) -> bool:
        """Whether nothing is ever drafted."""
        return self.options is not None and not self.options.num_speculative_tokens

    @property
    def runs_topp(self) -> bool:
        """Whether `verify_strategy` is ``topp``, which alone reads some keys."""
        return self.options is not None and self.options.verify_strategy == "topp"

    @property
    def overrides_strategy(self) -> bool:
        """Whether `accept_policy` decides on the drafts in the strategy's place."""
        return self.options is not None and self.options.accept_policy != "normal"

    def as_vllm_reads(self, key: str, value: Any) -> Any:
        """The value of one of vLLM's keys, which vLLM reads leniently: ``"3"`` is 3."""
        return self.stock.keys[key].parse(key, value) if key in self.stock.keys else value


def explain(raw: Mapping[str, Any], resolved: Resolved) -> list[str]:
    """One line for each key of `raw`, which `resolve` has resolved to `resolved`."""
    items = [(key.replace("-", "_"), value) for key, value in raw.items()]
    stock = stock_keys()
    normalised = normalise(items)
    method = real_method(normalised.values.get("method"), stock)
    config = _Config(method, resolved.options, stock, normalised)
    return [f"{setting(name, value)} {_sentence(config, name, value)}." for name, value in items]


def _sentence(config: _Config, name: str, value: Any) -> str:
    alias = ALIASES.get(name)
    if alias is not None and alias.target is None:
        return f"is ignored: {alias.why}"
    if config.method == OFF:
        return "asks for no speculation" if (alias and alias.target == "method") else _NO_EFFECT
    if value is None and name != "max_candidate_len":
        return "is the same as leaving it out"
    key, meaning = SYNONYMS.get(name, name), value
    prefix = ""
    found = translation(name, value, config.config.dialect)
    if found is not None:
        system, key, meaning = found
        if key == "method":
            meaning = config.config.values[key]
        prefix = f"is {system}'s name for {setting(key, meaning)}, which "
    elif key != name and name not in config.stock.keys:
        prefix = f"is a synonym of {key}, which "
    if key not in config.config.values and key not in (DIALECT_KEY, INPUT_LOOKUP_KEY):
        return f"is ignored: {_NO_EFFECT}"
    return prefix + _effect(config, key, meaning)


def _effect(config: _Config, key: str, value: Any) -> str:
    if key in (*NGRAM_KEYS, "ngram_match_order", *SUFFIX_KEYS) and not config.uses(key):
        return _NO_EFFECT
    if key in ("model", "quantization") and config.method in METHODS_WITHOUT_MODEL:
        return f"{_NO_EFFECT}: method {config.method} has no draft model"
    if key in _EFFECTS:
        return _EFFECTS[key](config, value)
    return _of_vllm(config, key, value)


def _of_vllm(config: _Config, key: str, value: Any) -> str:
    summary = config.stock.keys[key].summary if key in config.stock.keys else ""
    says = f"; vLLM says of this key: {summary}" if summary else ""
    return f"goes to vLLM as {show(config.as_vllm_reads(key, value))}{says}"


def _count(number: float, noun: str) -> str:
    shown = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{shown} {noun}" if number == 1 else f"{shown} {noun}s"


def _model_slots(options: SpecPlusOptions) -> str:
    """The slots that the draft model of a hybrid fills."""
    steps = options.num_model_steps
    if steps == options.num_speculative_tokens:
        return "every slot"
    return "the first slot" if steps == 1 else f"the first {steps} slots"


def _method(config: _Config, value: Any) -> str:
    options, method = config.options, config.method or value
    if method == NAIVE:
        if options is not None and options.num_speculative_tokens:
            return "drafts from a request's reference text alone"
        return "drafts nothing"
    by = _METHODS.get(method, f"vLLM's drafter of that name drafts (method {method})")
    if method in ("ngram", "ngram_gpu") and not set(NGRAM_KEYS) & config.config.values.keys():
        by += f"; a match has exactly {VLLM_NGRAM_SIZE} tokens, as vLLM's default is"
    if options is None:
        return f"is run by vLLM alone: {by}"
    if options.is_hybrid and not options.adaptive:
        return f"fills {_model_slots(options)} of a request: {by}"
    return f"chooses the drafter: {by}"


def _tokens(config: _Config, value: Any) -> str:
    options = config.options
    if options is None:
        slots = _count(config.as_vllm_reads("num_speculative_tokens", value), "slot")
        return f"gives each request {slots} for drafts in a step"
    if not options.num_speculative_tokens:
        return "gives a request no slot for drafts"
    most = "up to " if options.drafts_from_history else ""
    return f"gives each request {most}{_count(options.num_speculative_tokens, 'slot')} for drafts in a step"


def _steps(config: _Config, value: Any) -> str:
    if config.options is None or not config.options.is_hybrid:
        return "is the number of passes that vLLM's drafter makes anyway"
    times = "once" if value == 1 else f"{value} times"
    if config.options.adaptive:
        return f"runs the draft model at most {times} a step"
    return f"runs the draft model {times} a step, which fills {_model_slots(config.options)}"


def _strategy(config: _Config, value: Any) -> str:
    options, source = config.options, _HISTORY_SOURCES.get(value)
    if options is None or not options.is_hybrid:
        return "leaves the slots to vLLM's drafter, as without this key"
    if options.adaptive:
        also = " and matches in its own text" if value == "with_suffix" else ""
        return f"offers drafts from {source}{also} beside the model's"
    if options.num_model_steps != options.num_speculative_tokens:
        return f"fills the slots after the model's {options.num_model_steps} from {source}"
    if options.match_override_len:
        return f"fills no slot, as the model fills every one; only match_override_len acts, with {source}"
    return f"{_NO_EFFECT}: the model fills every slot"


def _with_reference(config: _Config) -> str:
    """The rest of a sentence on n-gram sizes, where no n-gram of the request's own text drafts."""
    options = config.options
    return "" if options is None or options.drafts_ngrams else ", and acts on a request's reference alone"


def _override(config: _Config, value: Any) -> str:
    if config.options is None or not config.options.is_hybrid:
        return _NO_EFFECT
    if not value:
        return "keeps the model's drafts, however long a match is"
    return f"puts a match of at least {_count(value, 'token')} in place of the model's drafts"


def _adaptive(config: _Config, value: Any) -> str:
    options = config.options
    if options is None or config.is_idle or not options.drafts_from_history or options.match_override_len:
        return _NO_EFFECT
    if value:
        return "drafts in each step what earns most tokens for its time, up to all slots"
    return "appends matches to the model's drafts" if options.is_hybrid else "fills as many slots as it can"


def _adaptive_verification(config: _Config, value: Any) -> str:
    if not value or config.options is None:
        return _of_vllm(config, "enable_adaptive_verification", value)
    return "lets vLLM trim the drafts of a step on the device by their chances, on V2 where it can; the log says if not"


_SCOPES = {
    "shared": "lets all requests draft from each other's answers",
    "salt": "lets only requests with the same cache_salt draft from each other's answers",
    "request": "lets no request draft from another's answer",
}


def _scope(config: _Config, value: Any) -> str:
    if value != "request" and config.options is not None and not config.options.caches_answers:
        return f"{_NO_EFFECT}: no past answers are kept"
    return _SCOPES[value]


def _cached(config: _Config, value: Any) -> str:
    if not value:
        return "keeps no past answers"
    if config.options is not None and not config.options.caches_answers:
        return f"{_NO_EFFECT}: no past answers are kept"
    kept = "every past answer" if value == -1 else _count(value, "past answer")
    is_salted = config.options is not None and config.options.needs_salts
    return f"keeps {kept} in trees that {'requests of one cache_salt' if is_salted else 'all requests'} share"


def _cached_tokens(config: _Config, value: Any) -> str:
    if not value:
        return "keeps no past answers"
    if config.options is not None and not config.options.caches_answers:
        return f"{_NO_EFFECT}: no past answers are kept"
    return (
        "sets no limit to the tokens of past answers"
        if value == -1
        else f"keeps at most {_count(value, 'token')} of past answers"
    )


def _model(config: _Config, value: Any) -> str:
    what = "the MTP head" if config.method == "mtp" else "the draft model"
    return f"is where vLLM finds {what}; this command does not look there"


def _verify_strategy(config: _Config, value: Any) -> str:
    if config.is_idle:
        return "only decides how tokens are sampled: nothing is drafted"
    if config.overrides_strategy:
        return "is overridden by accept_policy: it only decides which token follows the accepted drafts"
    traits = TRAITS[value]
    limit = config.options.max_candidate_len if config.runs_topp and config.options is not None else None
    also = "" if limit is None else f" and among {_most_likely(limit)} of it"
    return f"{traits.effect}{also}; {'lossy where a request samples' if traits.loss else 'lossless'}"


def _most_likely(number: int) -> str:
    return "the most likely token" if number == 1 else f"the {number} most likely tokens"


def _dialect(config: _Config, value: Any) -> str:
    return f"takes {DIALECTS[value].system}'s defaults for what is left out"


def _order(config: _Config, value: Any) -> str:
    which = "the earliest occurrence, so the prompt's come first" if value == "first" else "the latest occurrence"
    return f"takes {which}, where an n-gram occurs more than once"


def _candidates(config: _Config, value: Any) -> str:
    if not config.runs_topp:
        return _NO_EFFECT
    only_samples = config.is_idle or config.overrides_strategy
    if value is None:
        return f"sets no limit: the whole nucleus is {'sampled' if only_samples else 'accepted'}"
    return f"{'samples' if only_samples else 'accepts'} only {_most_likely(value)} of the nucleus"


def _window(config: _Config, value: Any) -> str:
    if not config.runs_topp:
        return _NO_EFFECT
    if config.options is not None and config.options.max_candidate_len == 1:
        return f"{_NO_EFFECT}: max_candidate_len is 1"
    if config.is_idle:
        return f"{_NO_EFFECT}: nothing is drafted"
    if config.overrides_strategy:
        return f"{_NO_EFFECT}: accept_policy overrides it"
    if not value:
        return "saves no draft that fails"
    assert config.options is not None
    width = config.options.num_speculative_tokens
    if value >= width:
        drafts, slots = _count(value, "draft"), _count(width, "slot")
        return f"never acts: it needs {drafts} after the one that it saves, and a request has {slots}"
    following = "the next draft is a first choice" if value == 1 else f"the next {value} drafts are first choices"
    return f"accepts a draft that is the second choice if {following}"


def _policy(config: _Config, value: Any) -> str:
    return f"{_NO_EFFECT}: nothing is drafted" if config.is_idle else POLICY_EFFECTS[value]


def _force_accept(config: _Config, value: Any) -> str:
    if config.is_idle:
        return f"{_NO_EFFECT}: nothing is drafted"
    return f"{'lets a request' if value else 'lets no request'} have all of its drafts accepted"


_EFFECTS: dict[str, Callable[[_Config, Any], str]] = {
    "method": _method,
    "model": _model,
    "num_speculative_tokens": _tokens,
    "num_model_steps": _steps,
    "mtp_strategy": _strategy,
    "max_ngram_size": lambda config, value: (
        f"compares at most the last {_count(value, 'token')} of the text{_with_reference(config)}"
    ),
    "min_ngram_size": lambda config, value: (
        f"takes no match of fewer than {_count(value, 'token')}{_with_reference(config)}"
    ),
    "ngram_match_order": _order,
    DIALECT_KEY: _dialect,
    INPUT_LOOKUP_KEY: lambda config, value: (
        "searches the request's own text too" if value else "leaves the request's own text alone"
    ),
    "allow_force_accept": _force_accept,
    "match_override_len": _override,
    "adaptive": _adaptive,
    "enable_adaptive_verification": _adaptive_verification,
    "suffix_decoding_max_tree_depth": lambda config, value: (
        f"limits a match and its drafts to {_count(value, 'token')} together"
    ),
    "suffix_decoding_max_cached_requests": _cached,
    "suffix_decoding_max_cached_tokens": _cached_tokens,
    "suffix_decoding_max_spec_factor": lambda config, value: (
        f"drafts at most {_count(value, 'token')} for each token of the match"
    ),
    "suffix_decoding_scope": _scope,
    "suffix_decoding_min_token_prob": lambda config, value: f"drafts no token of less than {value} probability",
    "verify_strategy": _verify_strategy,
    "max_candidate_len": _candidates,
    "verify_window": _window,
    "accept_policy": _policy,
    "quantization": lambda config, value: f"reads the draft model's weights as {show(value)}",
}
