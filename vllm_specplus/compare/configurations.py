"""The configurations that are compared: read, checked, and named."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_specplus.compare.processes import RefusedError
from vllm_specplus.config import SpecPlusConfigError, parse_json, resolve
from vllm_specplus.config.keys import real_method
from vllm_specplus.config.resolve import Resolved
from vllm_specplus.config.stock_keys import stock_keys
from vllm_specplus.config.stock_rules import draft_checkpoint
from vllm_specplus.strategies import TRAITS

NONE = "none"
_STRATEGY = "mtp_strategy"
_NGRAM_METHODS = "ngram", "ngram_gpu"
_PROMPT_LOOKUP = 5  # tokens of an n-gram where a config names no bound, as in vLLM's SpeculativeConfig


@dataclass(frozen=True)
class Configuration:
    """One of the configurations.

    name: short, and unlike the others'.
    config: the speculative config; None for no speculation.
    keeps_greedy_text: whether its text at temperature 0 is the target's.
    shares_answers: whether it drafts from the answers of all other requests.
    loss: what it changes where a request samples; "" for nothing.
    draft_model: a folder or a repository's name; "" for none of its own.
    """

    name: str
    config: dict[str, Any] | None
    keeps_greedy_text: bool = True
    shares_answers: bool = False
    loss: str = ""
    draft_model: str = ""


def read_configurations(baseline: str, texts: Sequence[str]) -> list[Configuration]:
    """Read the baseline and the other configurations, in this order.

    Args:
        baseline: ``none``, or a speculative config as JSON.
        texts: the same, one for each further configuration.

    Raises:
        RefusedError: one of them is refused, or two of them mean the same.
    """
    places = ["--baseline", *(f"--config number {number}" for number in range(1, len(texts) + 1))]
    found: list[Configuration] = []
    seen: dict[str, str] = {}
    for place, text in zip(places, (baseline, *texts), strict=True):
        config = None if text.strip() == NONE else _parse(place, text)
        meaning, configuration = (NONE, Configuration("", None)) if config is None else _read(place, config)
        if meaning in seen:
            raise RefusedError(
                f"{seen[meaning]} and {place} are equal: {NONE if config is None else json.dumps(config)}"
            )
        seen[meaning] = place
        found.append(configuration)
    names = _names([each.config for each in found])
    return [replace(each, name=name) for each, name in zip(found, names, strict=True)]


def _parse(place: str, text: str) -> dict[str, Any]:
    try:
        return parse_json(text)
    except SpecPlusConfigError as problem:
        raise RefusedError(f"{place}: {problem}") from None


def _read(place: str, config: dict[str, Any]) -> tuple[str, Configuration]:
    """What a config resolves to, as text, and the configuration, still without a name."""
    try:
        resolved = resolve(config, strict=True)
    except SpecPlusConfigError as problem:
        raise RefusedError(f"{place}: {problem}") from None
    options, vllm = resolved.options, resolved.vllm
    is_synthetic = vllm.get("rejection_sample_method") == "synthetic"
    draft_model = draft_checkpoint(vllm)
    if options is None:
        shares_answers = vllm.get("method") == "suffix" and vllm.get("suffix_decoding_max_cached_requests") != 0
        found = Configuration("", config, not is_synthetic, shares_answers, draft_model=draft_model)
        return _meaning(resolved), found
    shares_answers = options.caches_answers and options.suffix_decoding_scope == "shared"
    keeps_greedy_text = options.accept_policy == "normal" and not is_synthetic
    loss = TRAITS[options.verify_strategy].loss if options.verify_strategy else ""
    return _meaning(resolved), Configuration("", config, keeps_greedy_text, shares_answers, loss, draft_model)


def _meaning(resolved: Resolved) -> str:
    """What a config means, as text that two equal ones share: with vLLM's own reading of its keys.

    Of a method with two names vLLM takes one. A key may have its default. Of vLLM's own n-grams one bound stands for
    the other. A draft model's folder may be written in several ways.
    """
    known = stock_keys()
    defaults = {name: key.default for name, key in known.keys.items()}
    vllm = {name: value for name, value in resolved.vllm.items() if name not in defaults or value != defaults[name]}
    if "method" in vllm:
        vllm["method"] = real_method(vllm["method"], known)
    if os.path.isdir(folder := draft_checkpoint(vllm)):
        vllm["model"] = os.path.realpath(folder)
    bounds = "prompt_lookup_min", "prompt_lookup_max"
    given = [vllm[name] for name in bounds if vllm.get(name) is not None]
    if resolved.options is None and vllm.get("method") in _NGRAM_METHODS and len(given) < len(bounds):
        vllm |= dict.fromkeys(bounds, given[0] if given else _PROMPT_LOOKUP)
    return replace(resolved, vllm=vllm).as_json()


def _names(configs: list[dict[str, Any] | None]) -> list[str]:
    """The method of each, with as many of its other keys as tell it from the rest."""
    names = [NONE if config is None else _method(config) for config in configs]
    for method in {name for name in names if names.count(name) > 1}:
        rivals = {i: configs[i] or {} for i, name in enumerate(names) if name == method}
        keys = dict.fromkeys(key for config in rivals.values() for key in config)
        telling = [key for key in keys if len({json.dumps(config.get(key)) for config in rivals.values()}) > 1]
        for i, config in rivals.items():
            own = [f"{key}={_short(config[key])}" for key in telling if key in config and key != _STRATEGY]
            names[i] = " ".join((method, *own))
    # Two texts may differ in a key's absence alone, or in their order.
    return [name if names.count(name) == 1 else f"{name} #{names[: i + 1].count(name)}" for i, name in enumerate(names)]


def _method(config: dict[str, Any]) -> str:
    method = str(config.get("method") or config.get("speculate_method") or "speculation")
    strategy = str(config.get(_STRATEGY) or config.get("draft_strategy") or "")
    return f"{method}+{strategy.removeprefix('with_')}" if strategy.startswith("with_") else method


def _short(value: Any) -> str:
    # Of a path the last part tells enough.
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else json.dumps(value)
