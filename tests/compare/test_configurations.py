"""Configurations as the command reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_specplus.compare.configurations import Configuration, read_configurations
from vllm_specplus.compare.processes import RefusedError

MTP = {"method": "mtp", "num_speculative_tokens": 2}
HYBRID = MTP | {"num_speculative_tokens": 5, "mtp_strategy": "with_ngram"}


def read(*configs: dict[str, Any], baseline: str = "none") -> list[Configuration]:
    return read_configurations(baseline, [json.dumps(config) for config in configs])


def test_names_are_short_and_tell_configurations_apart() -> None:
    found = read(MTP, HYBRID, MTP | {"num_speculative_tokens": 3}, {"method": "ngram", "num_speculative_tokens": 4})
    names = [configuration.name for configuration in found]
    assert names == ["none", "mtp num_speculative_tokens=2", "mtp+ngram", "mtp num_speculative_tokens=3", "ngram"]
    assert [configuration.config for configuration in found[:3]] == [None, MTP, HYBRID]


def test_names_differ_where_only_the_absence_of_a_key_does() -> None:
    names = [configuration.name for configuration in read(HYBRID, HYBRID | {"adaptive": False})]
    assert names == ["none", "mtp+ngram", "mtp+ngram adaptive=false"]


def test_a_config_may_be_the_baseline() -> None:
    found = read(HYBRID, baseline=json.dumps(MTP))
    assert [configuration.name for configuration in found] == ["mtp", "mtp+ngram"]


@pytest.mark.parametrize(
    ("more", "keeps"),
    [
        ({}, True),
        ({"verify_strategy": "topp"}, True),  # at temperature 0 every strategy gives the greedy text
        ({"accept_policy": "accept_all"}, False),
        ({"accept_policy": "reject_all"}, False),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.5]}, False),
    ],
)
def test_what_keeps_the_greedy_text(more: dict[str, Any], keeps: bool) -> None:
    assert read(MTP | more)[1].keeps_greedy_text == keeps


def test_what_is_known_of_a_configuration_beside_its_config() -> None:
    draft_model = {"method": "draft_model", "model": "/drafts", "num_speculative_tokens": 2}
    found = read(
        draft_model,
        draft_model | {"verify_strategy": "topp"},
        MTP,
        {"method": "ngram", "model": "ngram", "num_speculative_tokens": 2},
    )
    assert [bool(each.loss) for each in found] == [False, False, True, False, False]
    assert [each.draft_model for each in found] == ["", "/drafts", "/drafts", "", ""]
    of_vllm = [{"model": "ngram"}, {"model": "pkg.module.Proposer"}, {"model": "some/head"}]
    found = read(*(config | {"num_speculative_tokens": 2} for config in of_vllm))
    assert [each.draft_model for each in found] == ["", "", "", "some/head"]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            [json.dumps(MTP), json.dumps(dict(reversed(MTP.items())))],
            "--config number 1 and --config number 2 are equal",
        ),
        # A key at its neutral value changes nothing.
        ([json.dumps(MTP), json.dumps(MTP | {"mtp_strategy": "default"})], "number 1 and --config number 2 are equal"),
        (
            [
                '{"method": "suffix", "num_speculative_tokens": 4}',
                '{"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 10000}',
            ],
            "number 1 and --config number 2 are equal",
        ),
        (["none"], "--baseline and --config number 1 are equal"),
        # Of a method with two names vLLM takes one, with the plugin's keys and without.
        ([json.dumps(MTP), json.dumps(MTP | {"method": "mimo_mtp"})], "number 1 and --config number 2 are equal"),
        ([json.dumps(HYBRID), json.dumps(HYBRID | {"method": "mimo_mtp"})], "number 1 and --config number 2 are equal"),
        (["{"], "--config number 1: .*malformed JSON"),
        ([json.dumps(MTP), '{"method": "mtp", "nonsense": 1}'], "--config number 2: .*unknown key nonsense=1"),
    ],
)
def test_what_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(RefusedError, match=said) as refused:
        read_configurations("none", texts)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("more", [{}, {"verify_strategy": "topp"}])
def test_a_draft_models_folder_is_the_same_however_it_is_written(more: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    eagle = {"method": "eagle3", "num_speculative_tokens": 2, "model": str(tmp_path / "head")} | more
    with pytest.raises(RefusedError, match="are equal"):
        read(eagle, eagle | {"model": f"{tmp_path}/./head/"})
    # What is no folder here may be a repository of this name.
    read(*(eagle | {"model": name} for name in ("a/head", "b/head", "~nobody/head", "long" * 100)))
