"""Migration keys: every published example means what its list says, entry by entry."""

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.config.helpers import MTP, options, pretend_arctic, refused
from vllm_specplus.config import SpecPlusConfigError, SpecPlusOptions, resolve
from vllm_specplus.config.aliases import ALIASES, METHOD_ALIASES, PADDLE_QUANTIZATIONS
from vllm_specplus.config.stock_keys import stock_keys

EXAMPLES = json.loads((Path(__file__).parent / "migration_examples.json").read_text())


@dataclass(frozen=True)
class Means:
    """What one example resolves to.

    options: the plugin's options that differ from their defaults, None for vLLM's own path.
    vllm: the keys left for vLLM, None for the very config given. notes, warnings: a part of each
    line, in order. refused: parts of the message.
    """

    options: dict[str, Any] | None = None
    vllm: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


PADDLE, RTP = ["PaddleNLP options mapped: "], ["RTP-LLM options mapped: "]
MEANS = [
    Means(
        {"method": "mtp", "num_speculative_tokens": 1, "verify_strategy": "greedy"},
        {"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"},
        warnings=["argmax"],
    ),
    Means(
        {
            "method": "mtp",
            "num_speculative_tokens": 1,
            "verify_strategy": "target_match",
            "accept_policy": "accept_all",
        },
        {"method": "mtp", "num_speculative_tokens": 1},
        notes=["target_match"],
        warnings=["debugging"],
    ),
    Means(),
    Means(
        {
            "method": "mtp",
            "num_speculative_tokens": 5,
            "num_model_steps": 2,
            "mtp_strategy": "with_ngram",
            "adaptive": True,
        },
        {"method": "mtp", "num_speculative_tokens": 5, "model": "${model_path}/mtp"},
    ),
    Means(
        {
            "method": "mtp",
            "num_speculative_tokens": 5,
            "num_model_steps": 3,
            "mtp_strategy": "with_ngram",
            "adaptive": True,
            "max_ngram_size": 3,
            "min_ngram_size": 1,
        },
        {"method": "mtp", "num_speculative_tokens": 5, "model": "${model_path}/mtp"},
    ),
    Means(
        None,
        {"method": "mtp", "num_speculative_tokens": 3, "model": "${model_path}/mtp"},
        notes=["num_model_steps=3: vLLM does this by itself"],
    ),
    Means(),
    Means(
        {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "max_ngram_size": 3,
            "min_ngram_size": 1,
        },
        {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    ),
    Means(notes=['model="${mtp_model_path}" is not used']),
    Means(),
    Means(
        {
            "method": "suffix",
            "num_speculative_tokens": 4,
            "suffix_decoding_max_cached_requests": -1,
        },
        {"method": "suffix", "num_speculative_tokens": 4},
    ),
    Means(warnings=["suffix keys act only with method suffix or mtp_strategy with_suffix"]),
    Means(
        {"method": "naive", "num_speculative_tokens": 1, "adaptive": True},
        {"method": "naive"},
        notes=["num_speculative_tokens=1: method naive drafts from a request's reference text"],
    ),
    Means(refused=['quantization="wint4"', "wint4 is Paddle's", *stock_keys().quantizations]),
    Means(
        {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "max_ngram_size": 2,
            "min_ngram_size": 1,
        },
        {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        },
        notes=[*PADDLE, "min_ngram_size=1"],
    ),
    Means(
        None,
        {
            "method": "mtp",
            "model": "deepseek-ai/DeepSeek-R1-MTP",
            "quantization": "fp8",
            "num_speculative_tokens": 1,
        },
        notes=PADDLE,
    ),
    Means(None, {"method": "eagle", "model": "${eagle}", "num_speculative_tokens": 5}, notes=PADDLE),
    Means(
        {
            "method": "mtp",
            "num_speculative_tokens": 5,
            "verify_strategy": "topp",
            "verify_window": 2,
            "max_candidate_len": 5,
        },
        {"method": "mtp", "num_speculative_tokens": 5},
        notes=[*PADDLE, 'verify_strategy="topp"'],
        warnings=["lossy"],
    ),
    Means(
        None,
        {"method": "mtp", "num_speculative_tokens": 1},
        notes=[*PADDLE, "return_full_hidden_states=1 is ignored"],
    ),
    Means(),
    Means(),
    Means(),
    Means(),
    Means(
        None,
        {
            "method": "draft_model",
            "model": "Qwen/Qwen2.5-0.5B",
            "quantization": "fp8",
            "num_speculative_tokens": 5,
        },
        notes=[*RTP, 'sp_model_type="qwen" is ignored'],
    ),
    Means(
        {
            "method": "ngram",
            "num_speculative_tokens": 128,
            "max_ngram_size": 2,
            "min_ngram_size": 2,
        },
        {
            "method": "ngram",
            "num_speculative_tokens": 128,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 2,
        },
        notes=RTP,
    ),
    Means(
        None,
        {
            "method": "mtp",
            "model": "${mtp}",
            "quantization": "fp8_per_block",
            "num_speculative_tokens": 5,
        },
        notes=[*RTP, 'sp_model_type="qwen_2_mtp" is ignored'],
    ),
    Means(
        None,
        {"method": "eagle3", "model": "${eagle3}", "num_speculative_tokens": 5},
        notes=[*RTP, 'sp_model_type="qwen_3_moe_eagle3" is ignored'],
    ),
]


def test_every_example_is_covered() -> None:
    assert len(EXAMPLES) == len(MEANS) == 27
    assert [example["system"] for example in EXAMPLES] == (
        ["FastDeploy"] * 14 + ["PaddleNLP"] * 5 + ["vLLM Ascend"] * 4 + ["RTP-LLM"] * 4
    )


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("example", "means"), list(zip(EXAMPLES, MEANS, strict=False)))
def test_example(example: dict[str, Any], means: Means, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_arctic(monkeypatch, True)
    given = example["given"]
    if means.refused:
        with pytest.raises(SpecPlusConfigError) as caught:
            resolve(given, strict=strict)
        assert all(part in str(caught.value) for part in means.refused)
        return
    resolved = resolve(given, strict=strict)
    expected = None if means.options is None else SpecPlusOptions(**means.options)
    assert resolved.options == expected
    assert resolved.vllm == (given if means.vllm is None else means.vllm)
    for lines, parts in ((resolved.notes, means.notes), (resolved.warnings, means.warnings)):
        assert len(lines) == len(parts)
        for part in parts:
            assert sum(part in line for line in lines) == 1


def test_ngram_match_is_ngram() -> None:
    resolved = resolve({"method": "ngram_match", "num_speculative_tokens": 3})
    assert (resolved.options, resolved.vllm["method"]) == (None, "ngram")
    assert resolved.notes == ['speculative_config: FastDeploy options mapped: method="ngram_match" -> "ngram"']
    found = options({"method": "ngram_match", "num_speculative_tokens": 3, "max_ngram_size": 3})
    assert (found.method, found.max_ngram_size) == ("ngram", 3)


SAMPLE = {
    "speculate_method": ("inference_with_reference", "ngram"),
    "speculate_max_draft_token_num": (3, 3),
    "speculate_max_ngram_size": (3, 3),
    "speculate_verify_window": (2, 2),
    "speculate_max_candidate_len": (5, 5),
    "draft_model_name_or_path": ("org/m", "org/m"),
    "draft_model_quant_type": ("fp8", "fp8"),
    "sp_type": ("deterministic", "ngram"),
    "gen_num_per_cycle": (3, 3),
    "sp_checkpoint_path": ("org/m", "org/m"),
    "sp_quantization": ("FP8_PER_BLOCK", "fp8_per_block"),
    "sp_min_token_match": (3, 3),
    "sp_max_token_match": (3, 3),
}
BASE = {"method": "ngram", "num_speculative_tokens": 4, "verify_strategy": "topp"}


def test_the_samples_cover_the_table() -> None:
    assert set(SAMPLE) == {key for key, alias in ALIASES.items() if alias.target}


@pytest.mark.parametrize("key", SAMPLE)
def test_alias_equals_the_native_key(key: str) -> None:
    theirs, ours = SAMPLE[key]
    target = ALIASES[key].target
    base = {name: value for name, value in BASE.items() if name != target}
    native = {target: ours, **dict(ALIASES[key].implies)}
    aliased = resolve({**base, key: theirs})
    assert aliased.options == resolve({**base, **native}).options
    assert aliased.vllm == resolve({**base, **native}).vllm
    assert f"{key}=" in aliased.notes[-1] or f"{key}=" in aliased.notes[0]
    both = resolve({**base, **native, key: theirs})
    assert (both.options, both.vllm) == (aliased.options, aliased.vllm)


@pytest.mark.parametrize("key", SAMPLE)
def test_alias_conflicts_with_the_native_key(key: str) -> None:
    theirs, _ = SAMPLE[key]
    target = ALIASES[key].target
    assert target is not None
    other = {"method": "suffix", "model": "org/other", "quantization": "awq"}.get(target, 17)
    message = refused({**BASE, target: other, key: theirs})
    assert f"{target}=" in message
    assert f"{key}=" in message


def test_two_systems_conflict() -> None:
    message = refused({"speculate_method": "mtp", "sp_type": "eagle3"})
    assert 'speculate_method="mtp"' in message
    assert 'sp_type="eagle3"' in message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"speculate_method": "foo"}, ['speculate_method="foo"', "inference_with_reference"]),
        ({"speculate_method": "eagel"}, ['did you mean "eagle"?']),
        ({"speculate_method": None}, ["speculate_method=null"]),
        ({"speculate_method": ["mtp"]}, ['speculate_method=["mtp"]']),
        ({"sp_type": "none"}, ['sp_type="none"', '"vanilla", "deterministic", "mtp", "eagle3"']),
        ({"sp_quantization": "INT8"}, ['sp_quantization="INT8"', '"FP8", "FP8_PER_BLOCK"']),
        ({"draft_model_quant_type": "weight_only_int8"}, ["is Paddle's", '"fp8"']),
        ({"draft_model_quant_type": "other"}, ['"other" is none of them', '"fp8"']),
        ({**MTP, "quantization": "WINT2"}, ["WINT2 is Paddle's"]),
        ({"sp_type": "mtp", "gen_num_per_cycle": "5"}, ['gen_num_per_cycle="5"', "an integer"]),
        ({"sp_type": "mtp", "gen_num_per_cycle": 129}, ["gen_num_per_cycle=129", "<= 128"]),
        ({"sp_type": "mtp", "num-speculative-tokens": 0}, ["num_speculative_tokens=0"]),
        (
            {"sp_type": "mtp", "gen_num_per_cycle": 2, "sp_min_token_match": 2},
            ["sp_min_token_match=2", 'sp_type="mtp"'],
        ),
        (
            {**MTP, "speculate_verify_window": 2, "verify_strategy": "greedy"},
            ["speculate_verify_window=2", 'verify_strategy="greedy"'],
        ),
    ],
)
def test_alias_that_is_refused(config: dict[str, Any], said: list[str]) -> None:
    assert all(part in refused(config) for part in said)


def test_quantization_that_vllm_names_passes() -> None:
    assert resolve({**MTP, "sp_quantization": "awq"}).vllm["quantization"] == "awq"


@pytest.mark.parametrize("name", sorted(PADDLE_QUANTIZATIONS - set(stock_keys().quantizations)))
def test_paddle_quantization_is_refused_beside_plugin_keys_too(name: str) -> None:
    config = {**MTP, "quantization": name}
    assert f"{name} is Paddle's" in refused(config)
    assert refused({**config, "verify_strategy": "greedy"}) == refused(config)


def test_quantizations_that_the_table_names_are_vllms() -> None:
    names = (ALIASES["sp_quantization"].values or {}).values()
    assert set(names) <= set(stock_keys().quantizations)


def test_tables_do_not_shadow_vllms_names() -> None:
    assert not set(ALIASES) & set(stock_keys().keys)
    assert not set(METHOD_ALIASES) & set(stock_keys().methods)


def test_broken_vllm_does_not_break_stock_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    config = {**MTP, "quantization": "wint4"}
    assert resolve(config).vllm == config
    assert "no installed vLLM" in refused({**MTP, "verify_strategy": "greedy"})
