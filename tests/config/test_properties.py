"""Properties of `resolve` and `parse_json` on random configs."""

import contextlib
import copy
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing import fuzz
from vllm_specplus.config import Resolved, SpecPlusConfigError, parse_json, resolve
from vllm_specplus.config.aliases import ALIASES
from vllm_specplus.config.keys import PLUGIN_NAMES, STOCK_NGRAM_KEYS
from vllm_specplus.config.stock_keys import stock_keys

KEYS = st.sampled_from([*PLUGIN_NAMES, *ALIASES, *stock_keys().keys, "num-model-steps"])
WORDS = st.sampled_from(["mtp", "ngram", "suffix", "naive", "deepseek_mtp", "with_ngram", "topp", "normal", "wint4"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 130) | st.floats() | st.text(max_size=8) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
CONFIGS = st.dictionaries(KEYS | st.text(max_size=12), JSON, max_size=6)
PLAUSIBLE = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["mtp", "eagle", "ngram", "suffix", "naive", "deepseek_mtp"]),
        "num_speculative_tokens": st.integers(1, 6),
    },
    optional={
        "model": st.just("org/m"),
        "num_model_steps": st.integers(1, 6),
        "mtp_strategy": st.sampled_from(["default", "with_ngram", "with_suffix"]),
        "max_ngram_size": st.integers(1, 8),
        "prompt_lookup_min": st.integers(1, 8),
        "match_override_len": st.integers(0, 8),
        "suffix_decoding_max_cached_requests": st.integers(-1, 3),
        "suffix_decoding_scope": st.sampled_from(["shared", "salt", "request"]),
        "verify_strategy": st.sampled_from(["topp", "greedy", "target_match", "rejection"]),
        "verify_window": st.integers(0, 3),
        "ngram_match_order": st.sampled_from(["recent", "first"]),
        "allow_force_accept": st.booleans(),
        "dialect": st.sampled_from(["fastdeploy", "paddlenlp", "rtp_llm"]),
        "max_candidate_len": st.none() | st.integers(1, 5),
        "accept_policy": st.sampled_from(["normal", "accept_all", "reject_all"]),
    },
)


def attempt(config: dict[str, Any], strict: bool = False) -> Resolved | None:
    try:
        return resolve(config, strict=strict)
    except SpecPlusConfigError:
        return None


@fuzz
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS, st.booleans())
def test_nothing_else_is_raised_and_nothing_is_changed(config: dict[str, Any], strict: bool) -> None:
    before = copy.deepcopy(config)
    resolved = attempt(config, strict)
    assert repr(config) == repr(before)
    if resolved is not None:
        resolved.as_json()


@fuzz
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=20) | CONFIGS.map(repr))
def test_any_text_parses_or_is_refused(text: str) -> None:
    with contextlib.suppress(SpecPlusConfigError):
        assert isinstance(parse_json(text), dict)


@fuzz
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(PLAUSIBLE)
def test_resolving_the_resolved_config_changes_nothing(config: dict[str, Any]) -> None:
    resolved = attempt(config)
    if resolved is None:
        return
    assert not set(resolved.vllm) & set(PLUGIN_NAMES)
    if resolved.options is None:
        again = resolve(resolved.vllm)
        assert (again.options, again.vllm) == (None, resolved.vllm)
        return
    # What the log shows of a config can be pasted back. Its n-gram sizes have the plugin's names among the options.
    vllm = {key: value for key, value in resolved.vllm.items() if key not in STOCK_NGRAM_KEYS}
    again = resolve({**vllm, **resolved.options.in_use(), "method": vllm["method"]})
    assert again.options is not None
    assert again.options.in_use() == resolved.options.in_use()
    assert vllm.items() <= again.vllm.items()  # which may name defaults too
