#!/usr/bin/env python3
"""Write docs/configuration.md, the reference of the plugin's keys, from the code that reads them.

    python ci/configuration_page.py

A test holds the page to what `lines` gives. Each sentence is that of `vllm-specplus check --explain`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_specplus.config.aliases import INPUT_LOOKUP_KEY
from vllm_specplus.config.dialects import DIALECT_KEY, DIALECTS
from vllm_specplus.config.errors import SpecPlusConfigError, choices, describe, show
from vllm_specplus.config.explain import explain
from vllm_specplus.config.keys import UserKeys
from vllm_specplus.config.resolve import resolve
from vllm_specplus.strategies import POLICIES, STRATEGIES

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HYBRID = {"method": "mtp", "num_speculative_tokens": 5, "num_model_steps": 2, "mtp_strategy": "with_ngram"}
MODEL = {"method": "mtp", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "max_ngram_size": 5, "adaptive": True}
PLAIN_NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "adaptive": True}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": -1}
TOPP = MODEL | {"verify_strategy": "topp"}
# For each key the configs that it is shown in.
SHOWN: dict[str, list[dict[str, Any]]] = {
    "method": [NGRAM, SUFFIX, HYBRID, {"method": "naive", "num_speculative_tokens": 16}],
    "num_speculative_tokens": [HYBRID],
    "num_model_steps": [HYBRID, HYBRID | {"adaptive": False}],
    "mtp_strategy": [HYBRID, HYBRID | {"mtp_strategy": "with_suffix"}, HYBRID | {"adaptive": False}],
    "max_ngram_size": [NGRAM],
    "min_ngram_size": [NGRAM | {"min_ngram_size": 2}, PLAIN_NGRAM | {"min_ngram_size": 2}],
    "ngram_match_order": [NGRAM | {"ngram_match_order": order} for order in ("recent", "first")],
    "match_override_len": [HYBRID | {"match_override_len": length} for length in (0, 4)],
    "adaptive": [HYBRID | {"adaptive": chosen} for chosen in (True, False)],
    "suffix_decoding_max_tree_depth": [SUFFIX | {"suffix_decoding_max_tree_depth": 24}],
    "suffix_decoding_max_cached_requests": [
        SUFFIX | {"suffix_decoding_max_cached_requests": number, "suffix_decoding_scope": "salt"}
        for number in (10000, 0, -1)
    ],
    "suffix_decoding_max_spec_factor": [SUFFIX | {"suffix_decoding_max_spec_factor": 1.0}],
    "suffix_decoding_min_token_prob": [SUFFIX | {"suffix_decoding_min_token_prob": 0.1}],
    "suffix_decoding_max_cached_tokens": [
        SUFFIX | {"suffix_decoding_max_cached_tokens": number} for number in (1000000, -1)
    ],
    "suffix_decoding_scope": [SUFFIX | {"suffix_decoding_scope": scope} for scope in ("salt", "shared", "request")],
    "verify_strategy": [MODEL | {"verify_strategy": strategy} for strategy in STRATEGIES],
    "max_candidate_len": [TOPP | {"max_candidate_len": number} for number in (5, 1, None)],
    "verify_window": [TOPP | {"verify_window": number} for number in (2, 0)],
    "accept_policy": [MODEL | {"accept_policy": policy} for policy in POLICIES],
    "allow_force_accept": [MODEL | {"allow_force_accept": True}],
    DIALECT_KEY: [MODEL | {DIALECT_KEY: dialect} for dialect in DIALECTS],
    INPUT_LOOKUP_KEY: [{"sp_type": "deterministic", INPUT_LOOKUP_KEY: True}],
}


INTRODUCTION = """# Configuration reference

These are the keys of `--speculative-config` that the plugin reads. vLLM's other keys stay vLLM's. The names of other
systems are in [migration](migration.md). `python ci/configuration_page.py` writes this page from the code. Each
sentence is that of `vllm-specplus check --explain`, in the config that stands above it with the key added.

- Without a key of the plugin that asks for something, vLLM drafts and verifies by itself.
- vLLM's `prompt_lookup_max` and `prompt_lookup_min` are other names of the sizes of n-grams, in hybrids too.
- vLLM's `parallel_drafting` and `num_speculative_tokens_per_batch_size` are refused in a hybrid. With `naive` the
  latter is refused too.
- vLLM's `enable_adaptive_verification: true` works in hybrids with `adaptive` on Model Runner V2. vLLM then trims
  drafts on the GPU. [Limits](limits.md#verification) tells where it is ignored. What it gains has not been measured."""
# What holds where a key is left out of a config that asks for nothing else.
NEUTRAL = {
    "mtp_strategy": '`"default"`: vLLM\'s drafter alone',
    "verify_strategy": "not set: vLLM's own rejection sampling verifies, on a CPU with V1 the plugin's lossless rule",
    "accept_policy": '`"normal"`',
    "allow_force_accept": "`false`",
    "suffix_decoding_max_cached_tokens": "a sixteenth of the machine's memory",
}


def lines() -> Iterator[str]:
    """The page's lines."""
    yield from INTRODUCTION.splitlines()
    properties = UserKeys.model_json_schema()["properties"]
    for key, configs in SHOWN.items():
        yield ""
        yield f"## `{key}`"
        yield ""
        if key == "method":
            allowed = f"{choices(config[key] for config in configs)} and vLLM's other methods"
        elif key in properties:
            allowed = describe(properties[key])
        else:
            allowed = choices(config[key] for config in configs)
        yield f"Allowed: {allowed}."
        shown_in = None
        for config in configs:
            others = {name: value for name, value in config.items() if name != key}
            if others != shown_in:
                shown_in = others
                yield ""
                yield f"In `{json.dumps(others)}`:"
                yield ""
                yield from default_line(key, others)
            sentence = next(line for line in explain(config, resolve(config)) if line.startswith(f"{key}="))
            setting, _, effect = sentence.partition(" ")
            yield f"- `{setting}` {effect}"


def default_line(key: str, others: dict[str, Any]) -> Iterator[str]:
    """A line on what holds without a key, where the others do not need it."""
    if key in NEUTRAL:
        yield f"- Left out, it is {NEUTRAL[key]}."
        return
    try:
        options = resolve(others).options
    except SpecPlusConfigError:
        return
    if key != "method" and hasattr(options, key):
        value = getattr(options, key)
        yield f"- Left out, it is {'not set' if value is None else f'`{show(value)}`'}."


if __name__ == "__main__":
    PAGE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
