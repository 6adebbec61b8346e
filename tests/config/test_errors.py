"""Which configs are refused, and what the message says."""

from typing import Any

import pytest

from tests.config.helpers import HYBRID, MTP, NGRAM, UNLIMITED, WITH_MEDUSA, options, pretend_arctic, refused
from vllm_specplus.config import SpecPlusConfigError, parse_json, resolve


@pytest.fixture(autouse=True)
def _arctic_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_arctic(monkeypatch, True)


INTEGERS = {
    "num_speculative_tokens": (HYBRID, 1, 128),
    "num_model_steps": (HYBRID, 1, None),
    "max_ngram_size": (NGRAM, 1, None),
    "min_ngram_size": (NGRAM, 1, None),
    "match_override_len": (HYBRID, 0, None),
    "suffix_decoding_max_tree_depth": (HYBRID, 1, None),
    "suffix_decoding_max_cached_requests": (HYBRID, -1, None),
    "max_candidate_len": ({**MTP, "verify_strategy": "topp"}, 1, None),
    "verify_window": ({**MTP, "verify_strategy": "topp"}, 0, None),
    "prompt_lookup_max": (HYBRID, 1, None),
    "prompt_lookup_min": (HYBRID, 1, None),
}


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", ["3", 3.0, True, [3], {"a": 3}, "three"])
def test_only_integers_are_integers(key: str, value: Any) -> None:
    message = refused({**INTEGERS[key][0], key: value})
    assert message.startswith(f"speculative_config: {key}=")
    assert "an integer" in message


@pytest.mark.parametrize("key", INTEGERS)
def test_integer_bounds(key: str) -> None:
    base, low, high = INTEGERS[key]
    message = refused({**base, key: low - 1})
    assert f"{key}={low - 1} is not allowed" in message
    assert f">= {low}" in message
    if high is not None:
        assert f"<= {high}" in refused({**base, key: high + 1})
        resolve({**base, key: high})
    resolve({**base, key: low})


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("suffix_decoding_max_spec_factor", [0, 0.0, 3], [-0.1, "1", True, float("inf")]),
        ("suffix_decoding_min_token_prob", [0, 1, 0.5], [-0.1, 1.1, "0.5", None, float("nan")]),
    ],
)
def test_number_bounds(key: str, good: list[Any], bad: list[Any]) -> None:
    base = {**MTP, "mtp_strategy": "with_suffix"}
    for value in good:
        assert getattr(options({**base, key: value}), key) == value
    for value in bad:
        assert f"{key}=" in refused({**base, key: value})


@pytest.mark.parametrize(
    ("key", "value", "allowed", "hint"),
    [
        ("mtp_strategy", "with_ngam", '"default", "with_ngram", "with_suffix"', "with_ngram"),
        ("verify_strategy", "target-match", '"greedy", "target_match", "topp", "rejection"', "target_match"),
        ("verify_strategy", "standard", '"greedy", "target_match", "topp", "rejection"', None),
        ("accept_policy", "acept_all", '"normal", "accept_all", "reject_all"', "accept_all"),
        ("accept_policy", None, '"normal", "accept_all", "reject_all"', None),
        ("mtp_strategy", 1, '"default", "with_ngram", "with_suffix"', None),
        ("suffix_decoding_scope", "requests", '"shared", "salt", "request"', "request"),
        ("suffix_decoding_scope", None, '"shared", "salt", "request"', None),
    ],
)
def test_choices_are_listed(key: str, value: Any, allowed: str, hint: str | None) -> None:
    message = refused({**MTP, key: value})
    assert f"{key}=" in message
    assert allowed in message
    assert ("did you mean" in message) == (hint is not None)
    assert hint is None or f'did you mean "{hint}"?' in message


def test_several_wrong_values_have_a_line_each() -> None:
    lines = refused({**HYBRID, "num_model_steps": 0, "verify_window": -1}).split("\n")
    assert [line.split("=")[0] for line in lines] == [
        "speculative_config: num_model_steps",
        "speculative_config: verify_window",
    ]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {**HYBRID, "num_model_steps": 5},
            ["num_model_steps=5 is not allowed: 1 <= num_model_steps <= num_", "tokens (4)"],
        ),
        ({**MTP, "num_model_steps": 2}, ["num_model_steps=2", "with_ngram", "with_suffix", "(4)"]),
        ({**NGRAM, "num_model_steps": 2}, ["num_model_steps=2", 'method="ngram"', '"mtp"']),
        ({"method": "suffix", "num_model_steps": 1}, ["num_model_steps=1", 'method="suffix"']),
        ({"method": "naive", "num_model_steps": 1}, ["num_model_steps=1", 'method="naive"']),
        ({"method": "mtp", "num_model_steps": 1}, ["num_speculative_tokens is required"]),
        ({"method": "mtp", "verify_strategy": "greedy"}, ["num_speculative_tokens is required"]),
        ({**NGRAM, "mtp_strategy": "with_ngram"}, ['method="ngram"', '"draft_model"']),
        pytest.param(
            {**NGRAM, "method": "mlp_speculator", "draft_strategy": "with_suffix"},
            ["draft_strategy", "mtp"],
            marks=WITH_MEDUSA,
        ),
        pytest.param({**HYBRID, "method": "medusa"}, ["model is required", 'method="medusa"'], marks=WITH_MEDUSA),
        ({"method": "naive", "mtp_strategy": "with_ngram"}, ['method="naive"', "draft model"]),
        ({"num_speculative_tokens": 4, "verify_strategy": "greedy"}, ["method is required"]),
        (
            {"model": "x", "num_speculative_tokens": 4, "mtp_strategy": "with_ngram"},
            ["method is required", '"mtp", "eagle", "eagle3", "draft_model", "medusa"'],
        ),
        ({**HYBRID, "method": "eagle"}, ["model is required", 'method="eagle"']),
        ({**MTP, "max_ngram_size": 3}, ["max_ngram_size=3", 'method="mtp"', '"with_ngram"']),
        ({**MTP, "ngram_match_order": "first"}, ['ngram_match_order="first"', 'method="ngram"', "with_ngram"]),
        ({**NGRAM, "ngram_match_order": "last"}, ['ngram_match_order="last"', '"recent", "first"']),
        (
            {**MTP, "mtp_strategy": "with_suffix", "adaptive": False, "ngram_match_order": "first"},
            ['ngram_match_order="first"', 'mtp_strategy="with_suffix"', "adaptive=true"],
        ),
        ({**MTP, "suffix_decoding_scope": "request"}, ['scope="request"', 'method="mtp"', 'method="suffix"']),
        ({**HYBRID, "suffix_decoding_scope": "salt"}, ['scope="salt"', "with_ngram", "with_suffix"]),
        ({"suffix_decoding_scope": "request"}, ["method is required"]),
        ({"method": "naive", "ngram_match_order": "first"}, ['ngram_match_order="first"', 'method="naive"']),
        ({**MTP, "allow_force_accept": 1}, ["allow_force_accept=1", "true or false"]),
        (
            {**MTP, "allow_force_accept": True, "rejection_sample_method": "synthetic"},
            ['rejection_sample_method="synthetic"', "allow_force_accept=true"],
        ),
        ({**NGRAM, "method": "ngram_gpu", "max_ngram_size": 3}, ["max_ngram_size=3", "ngram_gpu"]),
        (
            {**NGRAM, "min_ngram_size": 4, "max_ngram_size": 3},
            ["min_ngram_size=4 with max_ngram_size=3"],
        ),
        (
            {**HYBRID, "prompt_lookup_min": 4, "max_ngram_size": 3},
            ["prompt_lookup_min=4 with max_ngram_size=3"],
        ),
        ({**MTP, "match_override_len": 4}, ["match_override_len=4", "mtp_strategy"]),
        ({**NGRAM, "match_override_len": 4}, ["match_override_len=4", "mtp_strategy"]),
        ({**HYBRID, "match_override_len": 4, "adaptive": True}, ["adaptive=true", "match_override_len=4", "only one"]),
        ({**MTP, "adaptive": True}, ["adaptive=true", 'method="mtp"', "with_suffix", "naive"]),
        (
            {**HYBRID, "mtp_strategy": "with_suffix", "match_override_len": 24},
            ["match_override_len=24", "suffix_decoding_max_tree_depth (24)"],
        ),
        ({**MTP, "max_candidate_len": 5}, ["max_candidate_len=5", "verify_strategy=null", "topp"]),
        (
            {**MTP, "verify_window": 2, "verify_strategy": "greedy"},
            ["verify_window=2", 'verify_strategy="greedy"', "topp"],
        ),
        (
            {**MTP, "verify_strategy": "greedy", "rejection_sample_method": "block"},
            ['rejection_sample_method="block"', 'verify_strategy="greedy"'],
        ),
        (
            {**MTP, "accept_policy": "reject_all", "synthetic_acceptance_length": 2.0},
            ["synthetic_acceptance_length=2.0", 'accept_policy="reject_all"'],
        ),
        (
            {**MTP, "verify_strategy": "topp", "synthetic_acceptance_rates": [0.5]},
            ["synthetic_acceptance_rates=[0.5]", 'verify_strategy="topp"'],
        ),
        ({**HYBRID, "parallel_drafting": True}, ["parallel_drafting=true", "mtp_strategy"]),
        (
            {**HYBRID, "num_speculative_tokens_per_batch_size": [[1, 4, 2]]},
            ["num_speculative_tokens_per_batch_size", "mtp_strategy"],
        ),
        (
            {"method": "naive", "num_speculative_tokens_per_batch_size": [[1, 4, 2]]},
            ["num_speculative_tokens_per_batch_size", 'method="naive"'],
        ),
        ({**HYBRID, "draft_strategy": "with_suffix"}, ["mtp_strategy=", "draft_strategy="]),
        (
            {**HYBRID, "max_ngram_size": 3, "prompt_lookup_max": 4},
            ["max_ngram_size=3", "prompt_lookup_max=4"],
        ),
        (
            {**NGRAM, "prompt_lookup_min": 1, "min_ngram_size": 2},
            ["prompt_lookup_min=1", "min_ngram_size=2"],
        ),
        ({**HYBRID, "num-speculative-tokens": 5}, ["num_speculative_tokens=4", "=5"]),
        ({**HYBRID, "num_speculative_token": 5}, ["did you mean num_speculative_tokens?"]),
        ({**HYBRID, "zzz": 5}, ["unknown key zzz=5", "verify_strategy", "SpeculativeConfig"]),
        ({**HYBRID, "method": "mpt"}, ['method="mpt"', 'did you mean "mtp"?', '"naive"']),
        ({**HYBRID, "method": 3}, ["method=3", "a string"]),
        ({**HYBRID, "model": 3}, ["model=3", "a string"]),
        ({**HYBRID, "quantization": 3}, ["quantization=3", "a string"]),
        ({**HYBRID, "draft_tensor_parallel_size": 0}, ["draft_tensor_parallel_size=0", ">= 1"]),
        ({**HYBRID, "disable_padded_drafter_batch": "maybe"}, ["true or false"]),
        ({**HYBRID, "draft_sample_method": "wild"}, ['"greedy", "probabilistic"']),
        ({"method": "naive", "num_speculative_tokens": "1"}, ['num_speculative_tokens="1"']),
    ],
)
def test_combination_that_cannot_work(config: dict[str, Any], said: list[str]) -> None:
    message = refused(config)
    assert message.startswith("speculative_config: ")
    assert "\n" not in message
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("config", "name", "meant"),
    [
        ({**MTP, "mtp_stategy": "with_ngram"}, "mtp_stategy", "mtp_strategy"),
        ({**MTP, "verify-strateg": "topp"}, "verify_strateg", "verify_strategy"),
        ({**MTP, "num_model_step": 2}, "num_model_step", "num_model_steps"),
        ({"speculate_methods": "mtp"}, "speculate_methods", "speculate_method"),
    ],
)
def test_misspelt_plugin_key_alone(config: dict[str, Any], name: str, meant: str) -> None:
    message = refused(config)
    assert f"unknown key {name}=" in message
    assert f"did you mean {meant}?" in message
    with pytest.raises(SpecPlusConfigError) as strict:
        resolve(config, strict=True)
    assert str(strict.value) == message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**MTP, "num_speculative_token": 3}, "did you mean num_speculative_tokens?"),
        ({**MTP, "zzz": 3}, "unknown key zzz=3"),
        ({**MTP, "method": "niave"}, 'did you mean "naive"?'),
        ({**MTP, "method": 3}, "method=3"),
        ({**MTP, "quantization": 3}, "quantization=3"),
        ({**MTP, "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
    ],
)
def test_strict_checks_stock_configs_too(config: dict[str, Any], said: str) -> None:
    assert resolve(config).vllm == config
    with pytest.raises(SpecPlusConfigError, match="speculative_config: ") as caught:
        resolve(config, strict=True)
    assert said in str(caught.value)


def test_strict_warns_of_a_key_in_two_spellings() -> None:
    config = {**MTP, "num-speculative-tokens": 5}
    assert resolve(config).warnings == []
    resolved = resolve(config, strict=True)
    assert resolved.vllm == config
    assert resolved.warnings == ["speculative_config: num_speculative_tokens is set twice: vLLM takes the last one"]


def test_strict_accepts_what_vllm_reads_leniently() -> None:
    config = {**MTP, "num_speculative_tokens": "3", "disable_padded_drafter_batch": "False"}
    assert resolve(config, strict=True).vllm == config


@pytest.mark.parametrize(
    "config",
    [
        {**MTP, "mtp_strategy": "with_suffix"},
        {"method": "suffix", **UNLIMITED},
        {"method": "suffix", "num_speculative_tokens": 3, "verify_strategy": "greedy"},
    ],
)
def test_suffix_without_arctic(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(config)
    pretend_arctic(monkeypatch, False)
    message = refused(config)
    assert "arctic-inference" in message
    assert "docs/index.md" in message


def test_stock_suffix_without_arctic_is_vllms_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_arctic(monkeypatch, False)
    resolve({"method": "suffix", "num_speculative_tokens": 3})


@pytest.mark.parametrize("raw", [None, [], "mtp", 3, {1: 2}])
def test_not_an_object_with_string_keys(raw: Any) -> None:
    assert refused(raw).startswith("speculative_config: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"method": "mtp",}', "line 1 column 18"),
        ('{\n "method" "mtp"}', "line 2 column 11"),
        ("", "line 1 column 1"),
        ("[1]", "expected a JSON object, got [1]"),
        ("null", "expected a JSON object, got null"),
        ('{"a": NaN}', "NaN is not a JSON value"),
        ('{"a": 1, "a": 2}', "a=1 with a=2"),
        ("[" * 100_000, "malformed JSON"),
        ('{"a": ' + "9" * 5000 + "}", "malformed JSON"),
    ],
)
def test_bad_json(text: str, said: str) -> None:
    with pytest.raises(SpecPlusConfigError) as caught:
        parse_json(text)
    assert said in str(caught.value)
    assert str(caught.value).startswith("speculative_config: ")
    assert "\n" not in str(caught.value)


def test_good_json() -> None:
    assert parse_json('{"method": "mtp", "a": 1, "a": 1}') == {"method": "mtp", "a": 1}


def test_error_is_a_value_error_on_one_line_for_any_key() -> None:
    message = refused({**HYBRID, "a\nb\udcff": "x" * 500})
    assert "\n" not in message
    assert "x" * 100 not in message
