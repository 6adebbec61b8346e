"""The rules that join several keys: combinations that cannot work, and lines for the log."""

from collections.abc import Callable, Iterable
from typing import Any

from vllm_specplus.config.dialects import FASTDEPLOY, PADDLENLP
from vllm_specplus.config.errors import choices, config_error, not_allowed_error, setting
from vllm_specplus.config.keys import (
    DEFAULT_NGRAM_SIZES,
    HISTORY_METHODS,
    HYBRID_METHODS,
    MAX_DRAFT_TOKENS,
    NAIVE,
    NGRAM_KEYS,
    OWN_SUFFIX_KEYS,
    STOCK_NGRAM_KEYS,
    SUFFIX_KEYS,
    TOPP_DEFAULTS,
    ParsedConfig,
)
from vllm_specplus.config.stock_rules import SYNTHETIC_KEYS, missing_suffix_trees_error, suffix_available
from vllm_specplus.strategies import TRAITS

# vLLM's default of both n-gram sizes.
VLLM_NGRAM_SIZE = 5
_NEEDS_MODEL_PATH = ("eagle", "eagle3", "draft_model", "medusa")
METHODS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix", NAIVE)


def check(parsed: ParsedConfig) -> None:
    """Raise SpecPlusConfigError for the first combination that cannot work."""
    for rule in _RULES:
        rule(parsed)


def needs_options(parsed: ParsedConfig) -> bool:
    """Whether the config asks for something that vLLM does not do by itself."""
    keys = parsed.keys
    return bool(
        parsed.is_hybrid
        or parsed.method == NAIVE
        or keys.verify_strategy
        or keys.accept_policy != "normal"
        or keys.allow_force_accept
        or (parsed.method in HISTORY_METHODS and (parsed.names_ngram_sizes or keys.adaptive))
        or (parsed.method in HISTORY_METHODS and _chooses_order(parsed))
        or (parsed.method == "suffix" and keys.suffix_decoding_max_cached_requests == -1)
        or (parsed.method == "suffix" and (_limits_sharing(parsed) or _limits_tokens(parsed)))
    )


def _chooses_order(parsed: ParsedConfig) -> bool:
    """Whether the user asks for an order of matches that vLLM has not: its own n-gram takes the first one, unasked."""
    is_stated = parsed.config.values.get("ngram_match_order") is not None
    return parsed.keys.ngram_match_order != "recent" or (is_stated and parsed.method == "ngram")


def _limits_sharing(parsed: ParsedConfig) -> bool:
    """Whether the user asks for suffix trees that not all requests share; those of vLLM's own method are shared."""
    is_stated = parsed.config.values.get("suffix_decoding_scope") is not None
    return is_stated and parsed.keys.suffix_decoding_scope != "shared"


def _limits_tokens(parsed: ParsedConfig) -> bool:
    """Whether the user limits the tokens in suffix trees; vLLM's own method does not."""
    return parsed.keys.suffix_decoding_max_cached_tokens not in (None, -1)


def active_keys(parsed: ParsedConfig) -> list[str]:
    """The plugin's keys that ask for something."""
    keys = parsed.keys
    is_active = {
        "mtp_strategy": parsed.is_hybrid,
        "num_model_steps": keys.num_model_steps is not None,
        "match_override_len": keys.match_override_len > 0,
        "adaptive": bool(keys.adaptive),
        "verify_strategy": keys.verify_strategy is not None,
        "max_candidate_len": keys.max_candidate_len is not None,
        "verify_window": keys.verify_window > 0,
        "accept_policy": keys.accept_policy != "normal",
        "allow_force_accept": keys.allow_force_accept,
        "ngram_match_order": _chooses_order(parsed),
        "suffix_decoding_max_cached_tokens": _limits_tokens(parsed),
        "suffix_decoding_scope": _limits_sharing(parsed),
    }
    for key in NGRAM_KEYS:
        is_active[key] = bool(set(parsed.config.names(key)) - STOCK_NGRAM_KEYS) and (getattr(keys, key) is not None)
    return [key for key, active in is_active.items() if active]


def _require_method(parsed: ParsedConfig) -> None:
    keys = active_keys(parsed)
    if keys and parsed.method is None:
        methods = HYBRID_METHODS if parsed.is_hybrid else (NAIVE, *parsed.stock.methods)
        raise config_error(f"method is required with {parsed.setting(keys[0])}: one of {choices(methods)}")


def _require_model_method(parsed: ParsedConfig) -> None:
    for key in ("mtp_strategy", "num_model_steps"):
        if key in active_keys(parsed) and parsed.method not in HYBRID_METHODS:
            raise not_allowed_error(
                f"{parsed.setting(key)} with {parsed.setting('method')}",
                f"it needs a draft model: method must be one of {choices(HYBRID_METHODS)}",
            )


def _require_tokens(parsed: ParsedConfig) -> None:
    is_needed = needs_options(parsed) or parsed.keys.num_model_steps is not None
    is_optional = parsed.method in (NAIVE, "suffix")
    if is_needed and not is_optional and not parsed.keys.num_speculative_tokens:
        key = [*active_keys(parsed), "method"][0]
        raise config_error(
            f"num_speculative_tokens is required with {parsed.setting(key)}: an integer from 1 to {MAX_DRAFT_TOKENS}"
        )


def _require_model(parsed: ParsedConfig) -> None:
    if needs_options(parsed) and parsed.method in _NEEDS_MODEL_PATH and not parsed.keys.model:
        raise config_error(f"model is required with {parsed.setting('method')}: the draft model's name or path")


def _refuse_steps_that_do_not_fit(parsed: ParsedConfig) -> None:
    steps, tokens = parsed.keys.num_model_steps, parsed.keys.num_speculative_tokens
    if steps is None:
        return
    if steps > tokens:
        raise not_allowed_error(
            parsed.setting("num_model_steps"),
            f"1 <= num_model_steps <= num_speculative_tokens ({tokens})",
        )
    if steps != tokens and not parsed.is_hybrid:
        raise not_allowed_error(
            f"{parsed.setting('num_model_steps')} with {parsed.setting('mtp_strategy')}",
            f"it must equal num_speculative_tokens ({tokens}), or mtp_strategy must be "
            f'"with_ngram" or "with_suffix" to fill the other slots',
        )


def _refuse_idle_ngram_sizes(parsed: ParsedConfig) -> None:
    """Refuse n-gram sizes where the plugin does not draft: wherever it does, references are matched by them."""
    if parsed.method in HISTORY_METHODS or parsed.is_hybrid:
        return
    for key in NGRAM_KEYS:
        if key in active_keys(parsed):
            raise not_allowed_error(
                f"{parsed.setting(key)} with {parsed.setting('method')} and {parsed.setting('mtp_strategy')}",
                f'it acts only with method {choices(HISTORY_METHODS)}, or mtp_strategy="with_ngram" or "with_suffix"',
            )


def _refuse_idle_match_order(parsed: ParsedConfig) -> None:
    if parsed.keys.ngram_match_order == "recent" or matches_ngrams(parsed):
        return
    raise not_allowed_error(
        f"{parsed.setting('ngram_match_order')} with {parsed.setting('method')} and {parsed.setting('mtp_strategy')}",
        'it acts only with method="ngram" or mtp_strategy="with_ngram", or with suffix trees and adaptive=true',
    )


def _refuse_idle_suffix_keys(parsed: ParsedConfig) -> None:
    if parsed.method == "suffix" or parsed.keys.mtp_strategy == "with_suffix":
        return
    for key in OWN_SUFFIX_KEYS:
        if key in active_keys(parsed):
            raise not_allowed_error(
                f"{parsed.setting(key)} with {parsed.setting('method')} and {parsed.setting('mtp_strategy')}",
                'it acts only with method="suffix" or mtp_strategy="with_suffix"',
            )


def _refuse_ngram_sizes_out_of_order(parsed: ParsedConfig) -> None:
    low, high = parsed.keys.min_ngram_size, parsed.keys.max_ngram_size
    if low is not None and high is not None and low > high:
        raise not_allowed_error(
            f"{parsed.setting('min_ngram_size')} with {parsed.setting('max_ngram_size')}",
            "the smallest size must not be larger than the largest",
        )


def _refuse_idle_override(parsed: ParsedConfig) -> None:
    if parsed.keys.match_override_len and not parsed.is_hybrid:
        raise not_allowed_error(
            f"{parsed.setting('match_override_len')} with {parsed.setting('mtp_strategy')}",
            'it acts only with mtp_strategy="with_ngram" or "with_suffix"',
        )


def _refuse_idle_adaptive(parsed: ParsedConfig) -> None:
    if not parsed.keys.adaptive:
        return
    if parsed.keys.match_override_len:
        raise not_allowed_error(
            f"{parsed.setting('adaptive')} with {parsed.setting('match_override_len')}",
            "both choose between the model's drafts and a match; set only one of them",
        )
    if not parsed.is_hybrid and parsed.method not in HISTORY_METHODS:
        raise not_allowed_error(
            f"{parsed.setting('adaptive')} with {parsed.setting('method')} and {parsed.setting('mtp_strategy')}",
            f'it acts only with mtp_strategy="with_ngram" or "with_suffix", or method {choices(HISTORY_METHODS)}',
        )


def _refuse_override_out_of_reach(parsed: ParsedConfig) -> None:
    override, depth = parsed.keys.match_override_len, parsed.keys.suffix_decoding_max_tree_depth
    if parsed.keys.mtp_strategy == "with_suffix" and override >= depth:
        raise not_allowed_error(
            parsed.setting("match_override_len"),
            f"a suffix match is shorter than suffix_decoding_max_tree_depth ({depth})",
        )


def _refuse_idle_topp_keys(parsed: ParsedConfig) -> None:
    for key in ("max_candidate_len", "verify_window"):
        if key in active_keys(parsed) and parsed.keys.verify_strategy != "topp":
            raise not_allowed_error(
                f"{parsed.setting(key)} with {parsed.setting('verify_strategy')}",
                'it acts only with verify_strategy="topp"',
            )


def _refuse_two_verifiers(parsed: ParsedConfig) -> None:
    verifier_keys = ("verify_strategy", "accept_policy", "allow_force_accept")
    plugin_keys = [key for key in active_keys(parsed) if key in verifier_keys]
    for key in ("rejection_sample_method", *SYNTHETIC_KEYS) if plugin_keys else ():
        if parsed.values.get(key) not in (None, "standard"):
            raise not_allowed_error(
                f"{parsed.setting(key)} with {parsed.setting(plugin_keys[0])}",
                "both choose how drafts are verified; set only one of them",
            )


def _refuse_other_ways_of_drafting(parsed: ParsedConfig) -> None:
    hybrid = f"{parsed.setting('mtp_strategy')}" if parsed.is_hybrid else None
    naive = parsed.setting("method") if parsed.method == NAIVE else None
    for key, other in (
        ("parallel_drafting", hybrid),
        ("num_speculative_tokens_per_batch_size", hybrid or naive),
    ):
        if other and parsed.values.get(key):
            raise not_allowed_error(f"{parsed.setting(key)} with {other}", "they do not work together")


def _refuse_adaptive_verification(parsed: ParsedConfig) -> None:
    if not parsed.values.get("enable_adaptive_verification") or not needs_options(parsed):
        return
    if not parsed.is_hybrid or not is_adaptive(parsed, tokens=1):
        raise not_allowed_error(
            f"{parsed.setting('enable_adaptive_verification')} with keys of vllm-specplus",
            'with these it needs mtp_strategy="with_ngram" or "with_suffix", and adaptive=true',
        )


def _require_suffix_package(parsed: ParsedConfig) -> None:
    is_method = parsed.method == "suffix" and (needs_options(parsed) or active_keys(parsed))
    key = "mtp_strategy" if parsed.keys.mtp_strategy == "with_suffix" else "method"
    if (is_method or key == "mtp_strategy") and not suffix_available():
        raise missing_suffix_trees_error(parsed.setting(key))


_RULES: tuple[Callable[[ParsedConfig], None], ...] = (
    _require_method,
    _require_model_method,
    _refuse_idle_ngram_sizes,
    _refuse_ngram_sizes_out_of_order,
    _refuse_idle_match_order,
    _refuse_idle_suffix_keys,
    _refuse_idle_override,
    _refuse_idle_adaptive,
    _refuse_override_out_of_reach,
    _refuse_idle_topp_keys,
    _refuse_two_verifiers,
    _refuse_other_ways_of_drafting,
    _refuse_adaptive_verification,
    _require_tokens,
    _refuse_steps_that_do_not_fit,
    _require_model,
    _require_suffix_package,
)


def ngram_sizes(parsed: ParsedConfig) -> tuple[int, int, list[str]]:
    """The largest and the smallest n-gram size, and notes on the one that the plugin chose.

    For method ``ngram`` with vLLM's own names, vLLM's defaults hold. So another plugin key does not change the drafts.
    """
    if not parsed.is_hybrid and (parsed.method not in HISTORY_METHODS or _is_suffix_alone(parsed)):
        return *DEFAULT_NGRAM_SIZES, []
    high, low = parsed.keys.max_ngram_size, parsed.keys.min_ngram_size
    if parsed.method == "ngram" and not parsed.names_ngram_sizes:
        return high or low or VLLM_NGRAM_SIZE, low or high or VLLM_NGRAM_SIZE, []
    default_high, default_low = DEFAULT_NGRAM_SIZES
    if high is not None and low is None and high < default_low:
        return high, high, [f"min_ngram_size={high}, to fit {parsed.setting('max_ngram_size')}"]
    if low is not None and high is None and low > default_high:
        return low, low, [f"max_ngram_size={low}, to fit {parsed.setting('min_ngram_size')}"]
    return high or default_high, low or default_low, []


def _is_suffix_alone(parsed: ParsedConfig) -> bool:
    """Whether vLLM's names of n-gram sizes have nothing to act on."""
    return parsed.method == "suffix" and not parsed.names_ngram_sizes


def matches_ngrams(parsed: ParsedConfig) -> bool:
    """Whether n-grams of the request's own text draft; beside suffix trees they do where the arbiter chooses."""
    if parsed.method == "ngram" or parsed.keys.mtp_strategy == "with_ngram":
        return True
    return (parsed.method == "suffix" or parsed.is_hybrid) and is_adaptive(parsed, tokens=1)


def topp_limits(parsed: ParsedConfig) -> tuple[int | None, int, list[str]]:
    """`max_candidate_len` and `verify_window`, and notes on those that the user has not chosen.

    Without them ``topp`` would accept every draft of a request that names no top_p.
    """
    keys = parsed.keys
    if keys.verify_strategy != "topp":
        return keys.max_candidate_len, keys.verify_window, []
    defaults: dict[str, int] = {key: value for key, value in TOPP_DEFAULTS.items() if key not in parsed.config.values}
    candidates = defaults.get("max_candidate_len", keys.max_candidate_len)
    window = defaults.get("verify_window", keys.verify_window)
    notes = []
    if candidates == 1 and window:
        if "verify_window" not in defaults:
            notes.append(f"{parsed.setting('verify_window')} is off with max_candidate_len=1, as in FastDeploy")
        defaults.pop("verify_window", None)
        window = 0
    if defaults:
        chosen = ", ".join(setting(key, value) for key, value in defaults.items())
        system = PADDLENLP if parsed.config.system == PADDLENLP else FASTDEPLOY
        notes.append(f"{chosen}: {system}'s defaults of topp")
    return candidates, window, notes


def is_adaptive(parsed: ParsedConfig, tokens: int) -> bool:
    """Whether each step drafts what earns most: by default in a hybrid and with references alone.

    N-gram and suffix drafting mean what they mean in the systems whose keys they have, unless they are asked.
    """
    if parsed.keys.adaptive is None:
        return (parsed.is_hybrid and not parsed.keys.match_override_len) or (parsed.method == NAIVE and tokens > 0)
    return parsed.keys.adaptive


def unused_key_warnings(method: Any, mtp_strategy: str, items: Iterable[tuple[str, Any]]) -> list[str]:
    """Warnings of vLLM's own keys that vLLM accepts and never uses."""
    names = [name for name, value in items if value is not None]
    suffix = [name for name in names if name in SUFFIX_KEYS]
    ngram = [name for name in names if name in STOCK_NGRAM_KEYS]
    lines = []
    if suffix and method != "suffix" and mtp_strategy != "with_suffix":
        lines.append(
            f"{', '.join(suffix)}: suffix keys act only with method suffix or mtp_strategy "
            "with_suffix; they have no effect here"
        )
    if ngram and method not in ("ngram", "ngram_gpu", NAIVE) and mtp_strategy == "default":
        lines.append(
            f"{', '.join(ngram)}: n-gram keys act only with method ngram or naive, or mtp_strategy with_ngram or "
            "with_suffix; they have no effect here"
        )
    return lines


def unused_model_notes(method: Any, model: Any) -> list[str]:
    """A note if a model is named for a method that loads none."""
    if method in METHODS_WITHOUT_MODEL and model is not None:
        return [f"{setting('model', model)} is not used: method {method} has no draft model"]
    return []


def effect_warnings(parsed: ParsedConfig) -> list[str]:
    """Warnings of options that change the output, or that cannot act."""
    keys, tokens = parsed.keys, parsed.keys.num_speculative_tokens
    lines = []
    strategy = keys.verify_strategy
    if strategy is not None and (loss := TRAITS[strategy].loss):
        lines.append(f"{setting('verify_strategy', strategy)} is lossy: {loss}")
    if strategy == "topp" and topp_limits(parsed)[0] is None:
        lines.append(
            "max_candidate_len=null is no limit: a request without top_p, top_k and min_p has every draft accepted, "
            "however unlikely it is"
        )
    if keys.allow_force_accept:
        lines.append("allow_force_accept=true is for debugging: a request may have its drafts for its output")
    if keys.accept_policy == "accept_all":
        lines.append('accept_policy="accept_all" is for debugging: the drafts are the output')
    has_fixed_slots = not keys.match_override_len and not is_adaptive(parsed, tokens)
    if parsed.is_hybrid and parsed.num_model_steps == tokens and has_fixed_slots:
        lines.append(
            f"num_model_steps={tokens} leaves no slot for {parsed.setting('mtp_strategy')}: "
            "set num_speculative_tokens to a larger number"
        )
    window = keys.verify_window if keys.max_candidate_len != 1 else 0
    if parsed.method != NAIVE and 0 < tokens <= window:
        lines.append(
            f"{parsed.setting('verify_window')} never acts: it needs that many drafts after the one "
            f"that it saves, and num_speculative_tokens is {tokens}"
        )
    quantization = keys.quantization
    if quantization is not None and quantization not in parsed.stock.quantizations:
        lines.append(f"{parsed.setting('quantization')} is not one of vLLM's own: a plugin of vLLM's must register it")
    return lines
