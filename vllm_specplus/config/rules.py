"""The rules that join several keys: which combinations cannot work, and what the user is told."""

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

from vllm_specplus.config.errors import choices, error, refusal, stated
from vllm_specplus.config.keys import (
    HYBRID_METHODS,
    MAX_DRAFT_TOKENS,
    NAIVE,
    STOCK_WINDOW,
    SUFFIX_KEYS,
    WINDOW_KEYS,
    Parsed,
)

DEFAULT_WINDOW = (5, 2)
_NEEDS_MODEL_PATH = ("eagle", "eagle3", "draft_model")
_NO_MODEL = ("ngram", "ngram_gpu", "suffix", NAIVE)
_OTHER_VERIFIERS = (
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
)


def check(parsed: Parsed) -> None:
    """Raise SpecPlusConfigError for the first combination that cannot work."""
    for rule in _RULES:
        rule(parsed)


def needs_options(parsed: Parsed) -> bool:
    """Whether anything is asked for that vLLM does not do by itself."""
    keys = parsed.keys
    return bool(
        parsed.is_hybrid
        or parsed.method == NAIVE
        or keys.verify_strategy
        or keys.accept_policy != "normal"
        or (parsed.method == "ngram" and parsed.names_window)
        or (parsed.method == "suffix" and keys.suffix_decoding_max_cached_requests == -1)
    )


def engaged(parsed: Parsed) -> list[str]:
    """The plugin's keys that ask for something, in the order of their table."""
    keys = parsed.keys
    asked = {
        "mtp_strategy": parsed.is_hybrid,
        "num_model_steps": keys.num_model_steps is not None,
        "match_override_len": keys.match_override_len > 0,
        "verify_strategy": keys.verify_strategy is not None,
        "max_candidate_len": keys.max_candidate_len is not None,
        "verify_window": keys.verify_window > 0,
        "accept_policy": keys.accept_policy != "normal",
    }
    for key in WINDOW_KEYS:
        asked[key] = bool(set(parsed.given.names(key)) - STOCK_WINDOW) and (getattr(keys, key) is not None)
    return [key for key, wanted in asked.items() if wanted]


def suffix_available() -> bool:
    """Whether arctic-inference, which holds the suffix cache, is installed."""
    try:
        return importlib.util.find_spec("arctic_inference") is not None
    except (ImportError, ValueError):
        return False


def _method_is_given(parsed: Parsed) -> None:
    asked = engaged(parsed)
    if asked and parsed.method is None:
        methods = HYBRID_METHODS if parsed.is_hybrid else (NAIVE, *parsed.stock.methods)
        raise error(f"method is required with {parsed.stated(asked[0])}: one of {choices(methods)}")


def _hybrid_has_a_model(parsed: Parsed) -> None:
    for key in ("mtp_strategy", "num_model_steps"):
        if key in engaged(parsed) and parsed.method not in HYBRID_METHODS:
            raise refusal(
                f"{parsed.stated(key)} with {parsed.stated('method')}",
                f"it needs a draft model, method must be one of {choices(HYBRID_METHODS)}",
            )


def _tokens_are_given(parsed: Parsed) -> None:
    wanted = needs_options(parsed) or parsed.keys.num_model_steps is not None
    optional = parsed.method in (NAIVE, "suffix")
    if wanted and not optional and not parsed.keys.num_speculative_tokens:
        asked = [*engaged(parsed), "method"][0]
        raise error(
            f"num_speculative_tokens is required with {parsed.stated(asked)}: an integer from 1 to {MAX_DRAFT_TOKENS}"
        )


def _model_is_given(parsed: Parsed) -> None:
    if needs_options(parsed) and parsed.method in _NEEDS_MODEL_PATH and not parsed.keys.model:
        raise error(f"model is required with {parsed.stated('method')}: the draft model's name or path")


def _steps_fit(parsed: Parsed) -> None:
    steps, tokens = parsed.keys.num_model_steps, parsed.keys.num_speculative_tokens
    if steps is None:
        return
    if steps > tokens:
        raise refusal(
            parsed.stated("num_model_steps"),
            f"1 <= num_model_steps <= num_speculative_tokens ({tokens})",
        )
    if steps != tokens and not parsed.is_hybrid:
        raise refusal(
            f"{parsed.stated('num_model_steps')} with {parsed.stated('mtp_strategy')}",
            f"it must equal num_speculative_tokens ({tokens}), or mtp_strategy must be "
            f'"with_ngram" or "with_suffix" to fill the other slots',
        )


def _window_acts(parsed: Parsed) -> None:
    if parsed.method == "ngram" or parsed.keys.mtp_strategy == "with_ngram":
        return
    for key in WINDOW_KEYS:
        if key in engaged(parsed):
            raise refusal(
                f"{parsed.stated(key)} with {parsed.stated('method')} and {parsed.stated('mtp_strategy')}",
                'it acts only with method="ngram" or mtp_strategy="with_ngram"',
            )


def _window_is_ordered(parsed: Parsed) -> None:
    low, high = parsed.keys.min_ngram_size, parsed.keys.max_ngram_size
    if low is not None and high is not None and low > high:
        raise refusal(
            f"{parsed.stated('min_ngram_size')} with {parsed.stated('max_ngram_size')}",
            "the smallest window must not be above the largest",
        )


def _override_acts(parsed: Parsed) -> None:
    if parsed.keys.match_override_len and not parsed.is_hybrid:
        raise refusal(
            f"{parsed.stated('match_override_len')} with {parsed.stated('mtp_strategy')}",
            'it acts only with mtp_strategy="with_ngram" or "with_suffix"',
        )


def _override_can_be_reached(parsed: Parsed) -> None:
    override, depth = parsed.keys.match_override_len, parsed.keys.suffix_decoding_max_tree_depth
    if parsed.keys.mtp_strategy == "with_suffix" and override >= depth:
        raise refusal(
            parsed.stated("match_override_len"),
            f"a suffix match is shorter than suffix_decoding_max_tree_depth ({depth})",
        )


def _candidates_act(parsed: Parsed) -> None:
    for key in ("max_candidate_len", "verify_window"):
        if key in engaged(parsed) and parsed.keys.verify_strategy != "topp":
            raise refusal(
                f"{parsed.stated(key)} with {parsed.stated('verify_strategy')}",
                'it acts only with verify_strategy="topp"',
            )


def _one_verifier(parsed: Parsed) -> None:
    ours = [key for key in engaged(parsed) if key in ("verify_strategy", "accept_policy")]
    for key in _OTHER_VERIFIERS if ours else ():
        if parsed.values.get(key) not in (None, "standard"):
            raise refusal(
                f"{parsed.stated(key)} with {parsed.stated(ours[0])}",
                "both choose how drafts are verified, set only one of them",
            )


def _drafts_one_by_one(parsed: Parsed) -> None:
    hybrid = f"{parsed.stated('mtp_strategy')}" if parsed.is_hybrid else None
    naive = parsed.stated("method") if parsed.method == NAIVE else None
    for key, other in (
        ("parallel_drafting", hybrid),
        ("num_speculative_tokens_per_batch_size", hybrid or naive),
    ):
        if other and parsed.values.get(key):
            raise refusal(f"{parsed.stated(key)} with {other}", "they do not work together")


def _suffix_is_installed(parsed: Parsed) -> None:
    ours = parsed.method == "suffix" and (needs_options(parsed) or engaged(parsed))
    asked = "mtp_strategy" if parsed.keys.mtp_strategy == "with_suffix" else "method"
    if (ours or asked == "mtp_strategy") and not suffix_available():
        raise error(
            f"{parsed.stated(asked)} needs the package arctic-inference, which is not installed: "
            "pip install vllm-specplus[suffix]"
        )


_RULES: tuple[Callable[[Parsed], None], ...] = (
    _method_is_given,
    _hybrid_has_a_model,
    _window_acts,
    _window_is_ordered,
    _override_acts,
    _override_can_be_reached,
    _candidates_act,
    _one_verifier,
    _drafts_one_by_one,
    _tokens_are_given,
    _steps_fit,
    _model_is_given,
    _suffix_is_installed,
)


def ngram_window(parsed: Parsed) -> tuple[int, int, list[str]]:
    """The n-gram window in effect: (largest, smallest, notes on what was fitted).

    For method ``ngram`` under vLLM's own names the rest is filled as vLLM fills it, so that
    another plugin key beside them does not change what is drafted.
    """
    if parsed.method != "ngram" and parsed.keys.mtp_strategy != "with_ngram":
        return *DEFAULT_WINDOW, []
    high, low = parsed.keys.max_ngram_size, parsed.keys.min_ngram_size
    if parsed.method == "ngram" and not parsed.names_window:
        vllm_default = 5
        return high or low or vllm_default, low or high or vllm_default, []
    default_high, default_low = DEFAULT_WINDOW
    if high is not None and low is None and high < default_low:
        return high, high, [f"min_ngram_size={high}, to fit {parsed.stated('max_ngram_size')}"]
    if low is not None and high is None and low > default_high:
        return low, low, [f"max_ngram_size={low}, to fit {parsed.stated('min_ngram_size')}"]
    return high or default_high, low or default_low, []


def idle_warnings(method: Any, mtp_strategy: str, items: Iterable[tuple[str, Any]]) -> list[str]:
    """What to say of vLLM's own keys that vLLM takes without a word and never uses."""
    names = [name for name, value in items if value is not None]
    suffix = [name for name in names if name in SUFFIX_KEYS]
    window = [name for name in names if name in STOCK_WINDOW]
    lines = []
    if suffix and method != "suffix" and mtp_strategy != "with_suffix":
        lines.append(
            f"{', '.join(suffix)}: suffix keys act only with method suffix or mtp_strategy "
            "with_suffix; they have no effect here"
        )
    if window and method not in ("ngram", "ngram_gpu") and mtp_strategy != "with_ngram":
        lines.append(
            f"{', '.join(window)}: n-gram keys act only with method ngram or mtp_strategy "
            "with_ngram; they have no effect here"
        )
    return lines


def model_notes(method: Any, model: Any) -> list[str]:
    """One line where a model is given to a method that loads none."""
    if method in _NO_MODEL and model is not None:
        return [f"{stated('model', model)} is not used: method {method} has no draft model"]
    return []


def effect_warnings(parsed: Parsed) -> list[str]:
    """Warnings on what the resolved options do to the output, or cannot do."""
    keys, tokens = parsed.keys, parsed.keys.num_speculative_tokens
    lines = []
    if keys.verify_strategy == "topp":
        lines.append('verify_strategy="topp" is lossy: it changes the output distribution')
    if keys.verify_strategy == "greedy":
        lines.append('verify_strategy="greedy" emits the argmax whatever the temperature of a request')
    if keys.accept_policy == "accept_all":
        lines.append('accept_policy="accept_all" is for debugging: the output is the drafts\'')
    if parsed.is_hybrid and (keys.num_model_steps or 1) == tokens and not keys.match_override_len:
        lines.append(
            f"num_model_steps={tokens} leaves no slot for {parsed.stated('mtp_strategy')}: "
            "num_speculative_tokens should be larger"
        )
    if parsed.method != NAIVE and 0 < tokens <= keys.verify_window:
        lines.append(
            f"{parsed.stated('verify_window')} never acts: it needs as many drafts after the one "
            f"it saves, and num_speculative_tokens is {tokens}"
        )
    quantization = keys.quantization
    if quantization is not None and quantization not in parsed.stock.quantizations:
        lines.append(f"{parsed.stated('quantization')} is not one of vLLM's own: a plugin must register it")
    return lines
