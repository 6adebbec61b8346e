"""The plugin's only parser: a speculative config in, resolved options and vLLM's own keys out.

`resolve` imports neither vLLM nor torch, so ``vllm-specplus check`` and the engine share it and all its messages. A
config without a plugin key comes back unchanged.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_specplus.config import rules
from vllm_specplus.config.aliases import ALIASES, SYNONYMS, NormalisedConfig, is_foreign, meant_key, normalise
from vllm_specplus.config.errors import (
    SpecPlusConfigError,
    combined_error,
    config_error,
    not_allowed_error,
    setting,
    show,
)
from vllm_specplus.config.keys import (
    HISTORY_METHODS,
    MAX_DRAFT_TOKENS,
    NAIVE,
    NGRAM_KEYS,
    OWN_KEYS,
    PLUGIN_NAMES,
    STOCK_NGRAM_KEYS,
    CommonKeys,
    ParsedConfig,
    add_method_errors,
    add_quantization_errors,
    known_names,
    parse,
    parse_stock,
    refuse_unknown_keys,
    unknown_key_error,
)
from vllm_specplus.config.options import SpecPlusOptions
from vllm_specplus.config.stock_keys import StockKeys, stock_keys
from vllm_specplus.config.stock_rules import check_stock

_CACHED_REQUESTS = "suffix_decoding_max_cached_requests"


@dataclass(frozen=True)
class Resolved:
    """The meaning of a speculative config.

    options: the plugin's options; None where the plugin has nothing to do.
    vllm: the keys for vLLM's ``SpeculativeConfig``, without plugin and migration keys. A config that has none of these
    comes back unchanged.
    notes, warnings: lines for the log.
    """

    options: SpecPlusOptions | None
    vllm: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_json(self, indent: int | None = None) -> str:
        """``{"options": ..., "vllm": ...}`` as JSON, without options that nothing reads in this configuration.

        Options come in the order of the documentation's table, vLLM's keys sorted. A value that JSON cannot hold, such
        as an object of the engine's, is shown as its type.
        """
        options = None if self.options is None else self.options.in_use()
        content = {"options": options, "vllm": dict(sorted(self.vllm.items()))}
        return json.dumps(
            content,
            indent=indent,
            skipkeys=True,
            default=lambda value: f"<{type(value).__name__}>",
        )


def parse_json(text: str) -> dict[str, Any]:
    """Read a speculative config from JSON text.

    Raises:
        SpecPlusConfigError: `text` is not JSON (the message has line and column), is not an object, or has one key
            twice with different values. Plain JSON readers let that pass.
    """
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as problem:
        raise config_error(f"malformed JSON at line {problem.lineno} column {problem.colno}: {problem.msg}") from None
    except SpecPlusConfigError:
        raise
    except (ValueError, RecursionError) as problem:
        raise config_error(f"malformed JSON: {problem}") from None
    if not isinstance(value, dict):
        raise config_error(f"expected a JSON object, got {show(value)}")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and result[key] != value:
            raise not_allowed_error(f"{setting(key, result[key])} with {setting(key, value)}", "one key twice")
        result[key] = value
    return result


def _no_constant(name: str) -> None:
    raise config_error(f"malformed JSON: {name} is not a JSON value")


def resolve(raw: Mapping[str, Any], *, strict: bool = False) -> Resolved:
    """Work out the meaning of the speculative config `raw`, which is not changed.

    Args:
        raw: keys and values, as the user wrote them.
        strict: refuse also what vLLM would refuse in a config without plugin keys. Without it, such a config goes to
            vLLM as it is, and vLLM reports its errors itself.

    Raises:
        SpecPlusConfigError: an unknown key, a wrong value, keys that cannot work together or that vLLM would refuse,
            or an installed vLLM that cannot be read.
    """
    if not isinstance(raw, Mapping):
        raise config_error(f"expected a JSON object, got {show(raw)}")
    for key in raw:
        if not isinstance(key, str):
            raise config_error(f"every key must be a string, got {show(key)}")
    # vLLM reads num-speculative-tokens as num_speculative_tokens; so do we, for every key.
    items = [(key.replace("-", "_"), value) for key, value in raw.items()]
    if not _concerns_plugin(items):
        return _resolve_stock(raw, items, strict)
    config = normalise(items)
    if config.is_off:
        refuse_unknown_keys(config, stock_keys())
        return _resolved(None, {}, config.notes, [])
    parsed = parse(config, stock_keys())
    rules.check(parsed)
    options, notes = _options(parsed)
    vllm = _vllm_keys(parsed, options)
    _check_vllm_keys(parsed, options, vllm)
    notes = [*config.notes, *rules.unused_model_notes(parsed.method, parsed.keys.model), *notes]
    warnings = rules.effect_warnings(parsed) if options else []
    warnings += rules.unused_key_warnings(parsed.method, parsed.keys.mtp_strategy, items)
    if options is None and (idle := [key for key in OWN_KEYS if parsed.config.names(key)]):
        shown = ", ".join(parsed.setting(key) for key in idle)
        notes.append(f"{shown}: vLLM does this by itself, so its own path is taken")
    return _resolved(options, vllm, notes, warnings)


def _resolved(
    options: SpecPlusOptions | None,
    vllm: dict[str, Any],
    notes: list[str],
    warnings: list[str],
) -> Resolved:
    prefix = "speculative_config: "
    return Resolved(options, vllm, [prefix + line for line in notes], [prefix + line for line in warnings])


def _concerns_plugin(items: list[tuple[str, Any]]) -> bool:
    values = dict(items)
    if any(name in PLUGIN_NAMES or is_foreign(name, value) for name, value in items):
        return True
    unlimited = isinstance(values.get(_CACHED_REQUESTS), int) and values[_CACHED_REQUESTS] == -1
    return values.get("method") == NAIVE or (values.get("method") == "suffix" and unlimited)


def _resolve_stock(raw: Mapping[str, Any], items: list[tuple[str, Any]], strict: bool) -> Resolved:
    """A config without plugin keys, as it is; refused if one seems to be misspelt or the quantization is Paddle's."""
    values = dict(items)
    warnings = rules.unused_key_warnings(values.get("method"), "default", items)
    if strict:
        _check_stock_config(values, stock_keys())
        names = [name for name, _ in items]
        warnings += [f"{name} is set twice: vLLM takes the last one" for name in values if names.count(name) > 1]
    else:
        _check_near_misses(items)
    notes = rules.unused_model_notes(values.get("method"), values.get("model"))
    return _resolved(None, dict(raw), notes, warnings)


def _check_stock_config(values: Mapping[str, Any], stock: StockKeys) -> None:
    config = normalise(values.items())
    refuse_unknown_keys(config, stock)
    problems: list[SpecPlusConfigError] = []
    # The plugin's methods are among the choices here, so that a misspelt one gets its hint.
    is_named = isinstance(config.values.get("method"), str)
    parse_stock(config, stock, problems, skip=("method",) if is_named else ())
    add_method_errors(config, stock, problems)
    add_quantization_errors(config, stock, problems)
    if problems:
        raise combined_error(problems)
    check_stock(values, stock, lambda key: setting(key, values.get(key)))


def _check_near_misses(items: list[tuple[str, Any]]) -> None:
    plugin_names = (*PLUGIN_NAMES, *ALIASES)
    suspects = [(name, value) for name, value in items if meant_key(name, plugin_names)]
    suspects += [(name, value) for name, value in items if name == "quantization"]
    if not suspects:
        return
    try:
        stock = stock_keys()
    except SpecPlusConfigError:
        # No plugin key is in use, so what is wrong with this vLLM is not the plugin's to report.
        return
    problems: list[SpecPlusConfigError] = []
    config = NormalisedConfig()
    for name, value in suspects:
        config.add(name, value, name, value)
        meant = meant_key(name, known_names(stock))
        if name not in stock.keys and meant and meant.partition("=")[0] in plugin_names:
            problems.append(unknown_key_error(setting(name, value), meant))
    add_quantization_errors(config, stock, problems)
    if problems:
        raise combined_error(problems)


def _check_vllm_keys(parsed: ParsedConfig, options: SpecPlusOptions | None, vllm: Mapping[str, Any]) -> None:
    """Raise SpecPlusConfigError where vLLM would refuse the keys that are left for it."""
    if options is not None and options.method in HISTORY_METHODS:
        # vLLM runs these methods as a custom class, with one slot at least.
        tokens = max(options.num_speculative_tokens, 1)
        vllm = {**vllm, "method": "custom_class", "model": "plugin.Drafter", "num_speculative_tokens": tokens}
    check_stock(vllm, parsed.stock, lambda key: parsed.setting(SYNONYMS.get(key, key)))


def _options(parsed: ParsedConfig) -> tuple[SpecPlusOptions | None, list[str]]:
    """The resolved options and notes on their defaults; None for the options where vLLM does it all."""
    if not rules.needs_options(parsed):
        return None, []
    keys = parsed.keys
    tokens, notes = _draft_tokens(parsed)
    high, low, ngram_notes = rules.ngram_sizes(parsed)
    candidates, window, topp_notes = rules.topp_limits(parsed)
    verify = keys.verify_strategy
    # vLLM's own verification knows neither.
    policies = [key for key in ("accept_policy", "allow_force_accept") if key in rules.active_keys(parsed)]
    if verify is None and policies:
        verify = "target_match"
        notes.append(f"{parsed.setting(policies[0])} runs on verify_strategy={show(verify)}")
    values = {key: getattr(keys, key) for key in CommonKeys.model_fields} | {
        "method": parsed.method,
        "num_speculative_tokens": tokens,
        "num_model_steps": parsed.num_model_steps,
        "max_ngram_size": high,
        "min_ngram_size": low,
        "adaptive": rules.is_adaptive(parsed, tokens),
        "verify_strategy": verify,
        "max_candidate_len": candidates,
        "verify_window": window,
    }
    return SpecPlusOptions(**values), [*notes, *ngram_notes, *topp_notes]


def _draft_tokens(parsed: ParsedConfig) -> tuple[int, list[str]]:
    """The number of slots, and a note where it is not the user's."""
    tokens = parsed.keys.num_speculative_tokens
    if parsed.method == NAIVE:
        if "num_speculative_tokens" not in parsed.config.values:
            return 0, []
        width = min(max(tokens, 0), MAX_DRAFT_TOKENS)
        shown = parsed.setting("num_speculative_tokens")
        counts_as = f" counts as {width}" if width != tokens else ""
        return width, [f"{shown}{counts_as}: method naive drafts from a request's reference text alone"]
    if parsed.method == "suffix" and not tokens:
        tokens = min(parsed.keys.suffix_decoding_max_tree_depth, MAX_DRAFT_TOKENS)
        return tokens, [f"num_speculative_tokens={tokens}, taken from suffix_decoding_max_tree_depth"]
    return tokens, []


def _vllm_keys(parsed: ParsedConfig, options: SpecPlusOptions | None) -> dict[str, Any]:
    """The keys for vLLM: its own, under its own names, with the user's values."""
    keys: dict[str, Any] = {}
    for key, value in parsed.config.values.items():
        if key in NGRAM_KEYS:
            keys.update((name, value) for name in parsed.config.names(key) if name in STOCK_NGRAM_KEYS)
        elif key not in OWN_KEYS:
            keys[key] = value
    if keys.get(_CACHED_REQUESTS) == -1:
        # vLLM refuses -1; the plugin's options have it.
        del keys[_CACHED_REQUESTS]
    if options is None:
        return keys
    if options.method == NAIVE:
        for key in ("num_speculative_tokens", "model", *STOCK_NGRAM_KEYS):
            keys.pop(key, None)
        return keys
    keys["num_speculative_tokens"] = options.num_speculative_tokens
    if options.method == "ngram":
        keys |= {
            "prompt_lookup_max": options.max_ngram_size,
            "prompt_lookup_min": options.min_ngram_size,
        }
    return keys
