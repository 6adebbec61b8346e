"""The plugin's only parser: a speculative config in, resolved options and vLLM's own keys out.

`resolve` imports neither vLLM nor torch, so ``vllm-specplus check`` and the engine share it, and
with it every message. A config without a plugin key comes back as it was given.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_specplus.config import rules
from vllm_specplus.config.aliases import ALIASES, Normalised, normalise, touches
from vllm_specplus.config.errors import (
    SpecPlusConfigError,
    combine,
    error,
    nearest,
    refusal,
    show,
    stated,
)
from vllm_specplus.config.keys import (
    MAX_DRAFT_TOKENS,
    NAIVE,
    OWN_KEYS,
    PLUGIN_NAMES,
    STOCK_WINDOW,
    WINDOW_KEYS,
    Parsed,
    check_method,
    check_quantization,
    known_names,
    parse,
    parse_stock,
    refuse_unknown,
    unknown_key,
)
from vllm_specplus.config.options import SpecPlusOptions
from vllm_specplus.config.stock_keys import StockKeys, stock_keys

_CACHED_REQUESTS = "suffix_decoding_max_cached_requests"


@dataclass(frozen=True)
class Resolved:
    """What a speculative config means.

    options: the plugin's options; None when nothing is left for the plugin to do.
    vllm: the keys for vLLM's ``SpeculativeConfig``. With no plugin or migration key in the config,
    this is the config itself; else no plugin or migration key is in it.
    notes, warnings: lines for the log.
    """

    options: SpecPlusOptions | None
    vllm: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_json(self, indent: int | None = None) -> str:
        """``{"options": ..., "vllm": ...}`` as JSON, options in their table's order, vLLM's keys
        sorted. A value that JSON cannot hold (the engine's own objects) shows as its type."""
        options = None if self.options is None else self.options.model_dump()
        content = {"options": options, "vllm": dict(sorted(self.vllm.items()))}
        return json.dumps(
            content,
            indent=indent,
            skipkeys=True,
            default=lambda value: f"<{type(value).__name__}>",
        )


def parse_json(text: str) -> dict[str, Any]:
    """Read a speculative config from JSON text.

    Raises SpecPlusConfigError, with line and column, when `text` is not JSON; also when it is not
    an object, or has one key twice with different values, which plain JSON readers let pass.
    """
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as problem:
        raise error(f"malformed JSON at line {problem.lineno} column {problem.colno}: {problem.msg}") from None
    except SpecPlusConfigError:
        raise
    except (ValueError, RecursionError) as problem:
        raise error(f"malformed JSON: {problem}") from None
    if not isinstance(value, dict):
        raise error(f"expected a JSON object, got {show(value)}")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and result[key] != value:
            raise refusal(f"{stated(key, result[key])} with {stated(key, value)}", "one key twice")
        result[key] = value
    return result


def _no_constant(name: str) -> None:
    raise error(f"malformed JSON: {name} is not a JSON value")


def resolve(raw: Mapping[str, Any], *, strict: bool = False) -> Resolved:
    """Work out what the speculative config `raw` means; `raw` is not changed.

    strict: check vLLM's own keys and values too where there is no plugin key; by default such a
    config goes to vLLM as it is, which reports its errors itself.

    Raises SpecPlusConfigError for unknown keys, wrong types, values out of bounds, two names for
    one thing with different values, combinations that cannot work, and, with a plugin key, a vLLM
    whose own keys cannot be read.
    """
    if not isinstance(raw, Mapping):
        raise error(f"expected a JSON object, got {show(raw)}")
    for key in raw:
        if not isinstance(key, str):
            raise error(f"every key must be a string, got {show(key)}")
    # vLLM reads num-speculative-tokens as num_speculative_tokens; so do we, for every key.
    items = [(key.replace("-", "_"), value) for key, value in raw.items()]
    if not _concerns_us(items):
        return _resolve_stock(raw, items, strict)
    given = normalise(items)
    parsed = parse(given, stock_keys())
    rules.check(parsed)
    options, notes = _options(parsed)
    notes = [*given.notes, *rules.model_notes(parsed.method, parsed.keys.model), *notes]
    warnings = rules.effect_warnings(parsed) if options else []
    warnings += rules.idle_warnings(parsed.method, parsed.keys.mtp_strategy, items)
    if options is None and (asked := [key for key in OWN_KEYS if parsed.given.names(key)]):
        shown = ", ".join(parsed.stated(key) for key in asked)
        notes.append(f"{shown}: vLLM does this by itself, so its own path is taken")
    return _resolved(options, _vllm_keys(parsed, options), notes, warnings)


def _resolved(options: SpecPlusOptions | None, vllm: dict[str, Any], notes: list[str], warnings: list[str]) -> Resolved:
    prefix = "speculative_config: "
    return Resolved(options, vllm, [prefix + line for line in notes], [prefix + line for line in warnings])


def _concerns_us(items: list[tuple[str, Any]]) -> bool:
    given = dict(items)
    if any(name in PLUGIN_NAMES or touches(name, value) for name, value in items):
        return True
    unlimited = isinstance(given.get(_CACHED_REQUESTS), int) and given[_CACHED_REQUESTS] == -1
    return given.get("method") == NAIVE or (given.get("method") == "suffix" and unlimited)


def _resolve_stock(raw: Mapping[str, Any], items: list[tuple[str, Any]], strict: bool) -> Resolved:
    """A config with no plugin key: to vLLM as it is, unless a plugin key seems to be misspelt or
    the quantization is Paddle's."""
    if strict:
        _check_stock(items, stock_keys())
    else:
        _check_near_misses(items)
    method = dict(items).get("method")
    notes = rules.model_notes(method, dict(items).get("model"))
    return _resolved(None, dict(raw), notes, rules.idle_warnings(method, "default", items))


def _check_stock(items: list[tuple[str, Any]], stock: StockKeys) -> None:
    given = normalise(items)
    refuse_unknown(given, stock)
    problems: list[SpecPlusConfigError] = []
    # The method is judged with ours among the choices, so that a misspelt one gets its hint.
    named = isinstance(given.values.get("method"), str)
    parse_stock(given, stock, problems, skip=("method",) if named else ())
    check_method(given, stock, problems)
    check_quantization(given, stock, problems)
    if problems:
        raise combine(problems)


def _check_near_misses(items: list[tuple[str, Any]]) -> None:
    ours = (*PLUGIN_NAMES, *ALIASES)
    suspects = [(name, value) for name, value in items if nearest(name, ours)]
    suspects += [(name, value) for name, value in items if name == "quantization"]
    if not suspects:
        return
    try:
        stock = stock_keys()
    except SpecPlusConfigError:
        # No plugin key is in use, so whatever is wrong with this vLLM is not ours to report.
        return
    problems: list[SpecPlusConfigError] = []
    given = Normalised()
    for name, value in suspects:
        given.add(name, value, name, value)
        meant = nearest(name, known_names(stock))
        if name not in stock.keys and meant in ours:
            problems.append(unknown_key(stated(name, value), meant))
    check_quantization(given, stock, problems)
    if problems:
        raise combine(problems)


def _options(parsed: Parsed) -> tuple[SpecPlusOptions | None, list[str]]:
    """The resolved options, or None when vLLM does all that is asked; and notes on what was
    filled in."""
    if not rules.needs_options(parsed):
        return None, []
    keys = parsed.keys
    assert parsed.method is not None
    tokens, notes = _draft_tokens(parsed)
    high, low, fitted = rules.ngram_window(parsed)
    verify = keys.verify_strategy
    if verify is None and keys.accept_policy != "normal":
        verify = "target_match"
        notes.append(f"{parsed.stated('accept_policy')} runs on verify_strategy={show(verify)}")
    return SpecPlusOptions(
        method=parsed.method,
        num_speculative_tokens=tokens,
        num_model_steps=(keys.num_model_steps or 1) if parsed.is_hybrid else None,
        mtp_strategy=keys.mtp_strategy,
        max_ngram_size=high,
        min_ngram_size=low,
        match_override_len=keys.match_override_len,
        suffix_decoding_max_tree_depth=keys.suffix_decoding_max_tree_depth,
        suffix_decoding_max_cached_requests=keys.suffix_decoding_max_cached_requests,
        suffix_decoding_max_spec_factor=keys.suffix_decoding_max_spec_factor,
        suffix_decoding_min_token_prob=keys.suffix_decoding_min_token_prob,
        verify_strategy=verify,
        max_candidate_len=keys.max_candidate_len,
        verify_window=keys.verify_window,
        accept_policy=keys.accept_policy,
    ), [*notes, *fitted]


def _draft_tokens(parsed: Parsed) -> tuple[int, list[str]]:
    """The number of draft slots, and a note where it is not the number given."""
    tokens = parsed.keys.num_speculative_tokens
    if parsed.method == NAIVE:
        if "num_speculative_tokens" not in parsed.given.values:
            return 0, []
        window = min(max(tokens, 0), MAX_DRAFT_TOKENS)
        shown = parsed.stated("num_speculative_tokens")
        counts_as = f" counts as {window}" if window != tokens else ""
        return window, [f"{shown}{counts_as}: method naive drafts what a request's reference says, and nothing else"]
    if parsed.method == "suffix" and not tokens:
        tokens = min(parsed.keys.suffix_decoding_max_tree_depth, MAX_DRAFT_TOKENS)
        return tokens, [f"num_speculative_tokens={tokens}, taken from suffix_decoding_max_tree_depth"]
    return tokens, []


def _vllm_keys(parsed: Parsed, options: SpecPlusOptions | None) -> dict[str, Any]:
    """The keys left for vLLM: its own, as written, under its own names."""
    keys: dict[str, Any] = {}
    for key, value in parsed.given.values.items():
        if key in WINDOW_KEYS:
            keys.update((name, value) for name in parsed.given.names(key) if name in STOCK_WINDOW)
        elif key not in OWN_KEYS:
            keys[key] = value
    if keys.get(_CACHED_REQUESTS) == -1:
        # vLLM refuses -1; the options carry it.
        del keys[_CACHED_REQUESTS]
    if options is None:
        return keys
    if options.method == NAIVE:
        for key in ("num_speculative_tokens", "model", *STOCK_WINDOW):
            keys.pop(key, None)
        return keys
    keys["num_speculative_tokens"] = options.num_speculative_tokens
    if options.method == "ngram":
        keys |= {
            "prompt_lookup_max": options.max_ngram_size,
            "prompt_lookup_min": options.min_ngram_size,
        }
    return keys
