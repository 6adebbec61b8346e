"""Migration keys: what every published example means, entry by entry."""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.config.helpers import MTP, options, pretend_arctic, refused
from vllm_specplus.cli import main
from vllm_specplus.config import SpecPlusConfigError, SpecPlusOptions, resolve
from vllm_specplus.config.aliases import ALIASES, METHOD_ALIASES, OTHER_SPELLINGS
from vllm_specplus.config.dialects import DIALECTS
from vllm_specplus.config.quantizations import INT8, QUANTIZATIONS
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
    Means(refused=['quantization="wint4"', "wint4 is Paddle's", "AWQ or GPTQ", INT8, *stock_keys().quantizations]),
    Means(
        {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "max_ngram_size": 2,
            "min_ngram_size": 1,
            "ngram_match_order": "first",
        },
        {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        },
        notes=[*PADDLE, 'min_ngram_size=1, ngram_match_order="first": PaddleNLP\'s defaults'],
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
            "method": "naive",
            "num_speculative_tokens": 128,
            "max_ngram_size": 2,
            "min_ngram_size": 2,
            "adaptive": False,
        },
        {"method": "naive"},
        notes=[*RTP, "adaptive=false: RTP-LLM's defaults", "drafts from a request's reference text alone"],
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


@pytest.mark.parametrize(("example", "means"), list(zip(EXAMPLES, MEANS, strict=True)))
def test_the_command_checks_each_example(
    example: dict[str, Any], means: Means, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_arctic(monkeypatch, True)
    status = main(["check", json.dumps(example["given"])])
    out, err = capsys.readouterr()
    assert status == (2 if means.refused else 0)
    assert all(part in err for part in (*means.notes, *means.warnings, *means.refused))
    assert bool(out) == (not means.refused)


def test_ngram_match_is_ngram() -> None:
    """It is FastDeploy's alone, so FastDeploy's way of matching comes with it; its way of verifying does not."""
    resolved = resolve({"method": "ngram_match"})
    assert resolved.options == SpecPlusOptions(method="ngram", num_speculative_tokens=1, ngram_match_order="first")
    assert resolved.notes == [
        'speculative_config: FastDeploy options mapped: method="ngram_match" -> "ngram"',
        "speculative_config: num_speculative_tokens=1, max_ngram_size=5, min_ngram_size=2, "
        'ngram_match_order="first": FastDeploy\'s defaults',
    ]
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
    "sp_type": ("deterministic", "naive"),
    "gen_num_per_cycle": (3, 3),
    "sp_checkpoint_path": ("org/m", "org/m"),
    "sp_quantization": ("FP8_PER_BLOCK", "fp8_per_block"),
    "sp_min_token_match": (1, 1),
    "sp_max_token_match": (3, 3),
}
BASE = {"method": "ngram", "num_speculative_tokens": 4, "verify_strategy": "topp"}


def test_the_samples_cover_the_table() -> None:
    assert set(SAMPLE) == {key for key, alias in ALIASES.items() if alias.target}


@pytest.mark.parametrize("key", SAMPLE)
def test_alias_equals_the_native_key(key: str) -> None:
    theirs, ours = SAMPLE[key]
    target = ALIASES[key].target
    dialect = next(name for name, found in DIALECTS.items() if found.system == ALIASES[key].system)
    base = {name: value for name, value in BASE.items() if name != target}
    native = {target: ours, **dict(ALIASES[key].implies)}
    aliased = resolve({**base, key: theirs})
    assert aliased.options == resolve({**base, **native, "dialect": dialect}).options
    assert aliased.vllm == resolve({**base, **native, "dialect": dialect}).vllm
    assert any(f"{key}=" in line for line in aliased.notes)
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
        ({"speculate_method": ["mtp"]}, ['speculate_method=["mtp"]']),
        ({"sp_type": "other"}, ['sp_type="other"', '"vanilla", "deterministic", "mtp", "eagle", "eagle3", "dspark"']),
        ({"sp_quantization": "W4A8"}, ['sp_quantization="W4A8"', "W4A8 is Paddle's"]),
        ({"draft_model_quant_type": "weight_only_int4"}, ["is Paddle's", "AWQ or GPTQ", INT8, '"fp8"']),
        ({"draft_model_quant_type": "other"}, ['"other" is none of them', '"fp8"']),
        ({**MTP, "quantization": "WINT2"}, ["WINT2 is Paddle's"]),
        ({**MTP, "dialect": "vllm"}, ['dialect="vllm"', '"fastdeploy", "paddlenlp", "rtp_llm"']),
        ({**MTP, "dialect": "fastdeply"}, ['did you mean "fastdeploy"?']),
        ({"dialect": "fastdeploy", "sp_type": "mtp"}, ['dialect="fastdeploy" with sp_type="mtp"', "rtp_llm"]),
        ({"sp_type": "mtp", "sp_input_lookup": True}, ["sp_input_lookup=true", 'only with sp_type="deterministic"']),
        ({"sp_type": "deterministic", "sp_input_lookup": 1}, ["sp_input_lookup=1", "true or false"]),
        ({"speculate_method": "None", "method": "mtp"}, ["both set method"]),
        ({"method": "MTP", "num_speculative_tokens": 2, "adaptive": True}, ['did you mean "mtp"?']),
        ({"SPECULATE_VERIFY_USE_TOPK": 1, "speculate_method": "mtp"}, ['did you mean verify_strategy="greedy"?']),
        ({"SP_WEIGHT_TYPE": "INT8", "sp_type": "mtp"}, ["did you mean sp_quantization?"]),
        ({"sp_type": "mtp", "gen_num_per_cycle": "5"}, ['gen_num_per_cycle="5"', "an integer"]),
        ({"sp_type": "mtp", "gen_num_per_cycle": 129}, ["gen_num_per_cycle=129", "<= 128"]),
        ({"sp_type": "mtp", "num-speculative-tokens": 0}, ["num_speculative_tokens=0"]),
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


REFUSED = [name for name, known in QUANTIZATIONS.items() if known.target is None]
TAKEN = [name for name, known in QUANTIZATIONS.items() if known.target is not None]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("case", [str.lower, str.upper])
def test_quantization_without_a_counterpart_is_refused_with_a_way_out(name: str, case: Callable[[str], str]) -> None:
    config = {**MTP, "quantization": case(name)}
    message = refused(config)
    assert f"{case(name)} is " in message
    assert QUANTIZATIONS[name].says in message
    assert refused({**config, "verify_strategy": "greedy"}) == message


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("case", [str.lower, str.upper])
@pytest.mark.parametrize("key", ["quantization", "draft_model_quant_type", "sp_quantization"])
def test_quantization_is_translated(name: str, case: Callable[[str], str], key: str) -> None:
    config = {**MTP, key: case(name)}
    resolved = resolve(config)
    assert (resolved.options, resolved.vllm["quantization"]) == (None, QUANTIZATIONS[name].target)
    if QUANTIZATIONS[name].target != case(name):
        assert any("mapped" in line and f'{key}="{case(name)}"' in line for line in resolved.notes)
    assert sum(QUANTIZATIONS[name].says in line for line in resolved.notes) >= bool(QUANTIZATIONS[name].says)


def test_quantizations_that_the_table_names_are_vllms() -> None:
    assert {known.target for known in QUANTIZATIONS.values()} - {None} <= set(stock_keys().quantizations)


def test_quantization_that_an_older_vllm_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    older = replace(stock_keys(), quantizations=("fp8",))
    monkeypatch.setattr(sys.modules["vllm_specplus.config.resolve"], "stock_keys", lambda: older)
    assert f"it stands for {INT8}, which this vLLM lacks" in refused({**MTP, "quantization": "WINT8"})


@pytest.mark.parametrize("config", [{"speculate_method": None}, {"speculate_method": "None"}, {"sp_type": "none"}])
@pytest.mark.parametrize("strict", [False, True])
def test_no_speculation(config: dict[str, Any], strict: bool) -> None:
    name, value = next(iter(config.items()))
    for more in ({}, {"speculate_max_draft_token_num": 1}):
        resolved = resolve({**config, **more}, strict=strict)
        assert (resolved.options, resolved.vllm) == (None, {})
        assert any(f"{name}={json.dumps(value)} asks for no speculation" in line for line in resolved.notes)
    assert "did you mean speculate_method?" in refused({**config, "speculate_metod": "mtp"})


PADDLE_NGRAM = {"speculate_method": "inference_with_reference"}
DEFAULTS = [
    # (config, the options that differ from the plugin's defaults)
    (
        PADDLE_NGRAM,
        {"method": "ngram", "num_speculative_tokens": 1, "max_ngram_size": 1, "min_ngram_size": 1}
        | {"ngram_match_order": "first"},
    ),
    (
        {"speculate_method": "mtp", "speculate_verify_window": 3},
        {"method": "mtp", "num_speculative_tokens": 1, "verify_strategy": "topp", "max_candidate_len": 5}
        | {"verify_window": 3},
    ),
    (
        {"speculate_method": "mtp", "speculate_max_candidate_len": 3},
        {"method": "mtp", "num_speculative_tokens": 1, "verify_strategy": "topp", "max_candidate_len": 3}
        | {"verify_window": 2},
    ),
    (
        {"sp_type": "deterministic"},
        {"method": "naive", "num_speculative_tokens": 5, "max_ngram_size": 2, "min_ngram_size": 2, "adaptive": False},
    ),
    (
        {"sp_type": "deterministic", "sp_input_lookup": True, "gen_num_per_cycle": 8},
        {"method": "ngram", "num_speculative_tokens": 8, "max_ngram_size": 2, "min_ngram_size": 2}
        | {"ngram_match_order": "first"},
    ),
    (
        {"dialect": "fastdeploy", "method": "MTP"},
        {"method": "mtp", "num_speculative_tokens": 1, "verify_strategy": "topp", "max_candidate_len": 5}
        | {"verify_window": 2},
    ),
    (
        {"dialect": "fastdeploy", "method": "mtp", "num_speculative_tokens": 5, "num_model_steps": 2}
        | {"mtp_strategy": "WITH_NGRAM", "verify_strategy": "TARGET_MATCH"},
        {"method": "mtp", "num_speculative_tokens": 5, "num_model_steps": 2, "mtp_strategy": "with_ngram"}
        | {"adaptive": False, "verify_strategy": "target_match", "ngram_match_order": "first"},
    ),
    (
        {"dialect": "fastdeploy", "method": "Ngram_Match", "accept_policy": "REJECT_ALL"},
        {"method": "ngram", "num_speculative_tokens": 1, "ngram_match_order": "first", "verify_strategy": "topp"}
        | {"max_candidate_len": 5, "verify_window": 2, "accept_policy": "reject_all"},
    ),
    (
        {"dialect": "fastdeploy", "method": "suffix", "num_speculative_tokens": 4, "verify_strategy": "TOPP"},
        {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64}
        | {"suffix_decoding_max_cached_requests": -1, "verify_strategy": "topp"}
        | {"max_candidate_len": 5, "verify_window": 2},
    ),
    (
        {"dialect": "paddlenlp", "speculate_method": "mtp"},
        {"method": "mtp", "num_speculative_tokens": 1, "verify_strategy": "topp", "max_candidate_len": 5}
        | {"verify_window": 2},
    ),
]


@pytest.mark.parametrize(("config", "expected"), DEFAULTS)
def test_what_is_left_out_is_the_systems_default(
    config: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_arctic(monkeypatch, True)
    resolved = resolve(config)
    assert resolved.options == SpecPlusOptions(**expected)
    assert any("'s defaults" in line for line in resolved.notes)


def test_a_default_does_not_replace_what_the_user_wrote() -> None:
    found = options({**PADDLE_NGRAM, "max_ngram_size": 4, "min_ngram_size": 3, "ngram_match_order": "recent"})
    assert (found.max_ngram_size, found.min_ngram_size, found.ngram_match_order) == (4, 3, "recent")
    found = options({"dialect": "fastdeploy", **MTP, "max_candidate_len": None, "verify_window": 0})
    assert (found.max_candidate_len, found.verify_window) == (None, 0)


def test_keys_of_two_systems_bring_the_defaults_of_neither() -> None:
    resolved = resolve({"speculate_method": "mtp", "gen_num_per_cycle": 3})
    assert (resolved.options, resolved.vllm) == (None, {"method": "mtp", "num_speculative_tokens": 3})
    assert "num_speculative_tokens is required" in refused(
        {"speculate_method": "mtp", "sp_quantization": "FP8", "verify_strategy": "greedy"}
    )


def test_match_lengths_beside_a_draft_model_are_ignored_as_rtp_llm_does() -> None:
    """Its documents set them for `mtp`."""
    resolved = resolve({"sp_type": "mtp", "sp_min_token_match": 2, "sp_max_token_match": 2})
    assert (resolved.options, resolved.vllm) == (None, {"method": "mtp", "num_speculative_tokens": 5})
    assert sum('acts only with sp_type="deterministic"' in line for line in resolved.notes) == 2
    assert resolved.notes[0] == 'speculative_config: RTP-LLM options mapped: sp_type="mtp" -> method="mtp"'


@pytest.mark.parametrize("name", OTHER_SPELLINGS)
def test_names_of_the_environment_hint_at_the_key(name: str) -> None:
    assert f"did you mean {OTHER_SPELLINGS[name]}?" in refused({**MTP, name: "x"})
    with pytest.raises(SpecPlusConfigError, match=f"did you mean {OTHER_SPELLINGS[name]}"):
        resolve({**MTP, name: "x"}, strict=True)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("speculate_model_path", "draft_model_name_or_path"),
        ("speculate_model_quant_type", "draft_model_quant_type"),
        ("VERIFY_STRATEGY", "verify_strategy"),
        ("NUM_MODEL_STEPS", "num_model_steps"),
    ],
)
def test_other_spellings_hint_at_the_key(name: str, meant: str) -> None:
    assert f"did you mean {meant}?" in refused({**MTP, name: "x"})


def test_tables_do_not_shadow_vllms_names() -> None:
    assert not set(ALIASES) & set(stock_keys().keys)
    assert not set(METHOD_ALIASES) & set(stock_keys().methods)


def test_broken_vllm_does_not_break_stock_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    config = {**MTP, "quantization": "wint4"}
    assert resolve(config).vllm == config
    assert "no installed vLLM" in refused({**MTP, "verify_strategy": "greedy"})
