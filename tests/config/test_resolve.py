"""What a config resolves to: every key, default and note."""

import json
import pickle
from typing import Any

import pytest

from tests.config.helpers import HYBRID, MTP, NGRAM, UNLIMITED, WITH_MEDUSA, options, pretend_arctic
from vllm_specplus.config import SpecPlusOptions, resolve
from vllm_specplus.config.explain import explain
from vllm_specplus.config.keys import CommonKeys
from vllm_specplus.config.stock_keys import stock_keys


@pytest.fixture(autouse=True)
def _arctic_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_arctic(monkeypatch, True)


NAIVE = {"method": "naive"}
STOCK = [
    {},
    MTP,
    {"model": "org/draft", "num_speculative_tokens": 3},
    {**MTP, "method": "deepseek_mtp", "disable_padded_drafter_batch": "False"},
    {"method": "mtp", "num_speculative_tokens": "3"},
    {**NGRAM, "prompt_lookup_max": 4},
    {"method": "suffix", "num_speculative_tokens": 15},
    {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    {"method": "suffix", "suffix_decoding_max_cached_requests": -2},
    {"method": "eagle", "model": "org/eagle", "draft-tensor-parallel-size": 1},
    {"method": "mtp", "num-speculative-tokens": 2, "num_speculative_tokens": 3},
    {"method": "not_a_method", "nonsense": [1]},
    {**MTP, "num_speculative_token": 4},
    {**MTP, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0},
    {**MTP, "parallel_drafting": True},
    {**MTP, "target_model_config": object()},
]


@pytest.mark.parametrize("config", STOCK)
def test_stock_config_comes_back_as_given(config: dict[str, Any]) -> None:
    before = dict(config)
    resolved = resolve(config)
    assert resolved.options is None
    assert resolved.vllm == before
    assert list(resolved.vllm) == list(before)
    assert all(resolved.vllm[key] is value for key, value in before.items())
    assert config == before
    assert resolved.vllm is not config


def test_hybrid_defaults() -> None:
    found = options(HYBRID)
    assert found == SpecPlusOptions(
        method="mtp", num_speculative_tokens=4, num_model_steps=1, mtp_strategy="with_ngram", adaptive=True
    )
    assert (found.max_ngram_size, found.min_ngram_size, found.match_override_len) == (5, 2, 0)
    assert found.verify_strategy is None
    assert found.accept_policy == "normal"
    assert found.is_hybrid
    assert resolve(HYBRID).vllm == MTP


WITH_EACH_KEY = pytest.mark.parametrize(
    ("key", "value", "base"),
    [
        ("method", "eagle", {**HYBRID, "model": "org/head"}),
        ("num_speculative_tokens", 7, HYBRID),
        ("num_model_steps", 2, HYBRID),
        ("mtp_strategy", "with_ngram", MTP),
        ("mtp_strategy", "with_suffix", MTP),
        ("max_ngram_size", 9, HYBRID),
        ("min_ngram_size", 4, HYBRID),
        ("match_override_len", 4, HYBRID),
        ("adaptive", False, HYBRID),
        ("suffix_decoding_max_tree_depth", 7, {**MTP, "mtp_strategy": "with_suffix"}),
        ("suffix_decoding_max_cached_requests", -1, {**MTP, "mtp_strategy": "with_suffix"}),
        ("suffix_decoding_max_spec_factor", 2.5, {**MTP, "mtp_strategy": "with_suffix"}),
        ("suffix_decoding_min_token_prob", 0.5, {**MTP, "mtp_strategy": "with_suffix"}),
        ("suffix_decoding_max_cached_tokens", 500, {"method": "suffix", "num_speculative_tokens": 3}),
        ("suffix_decoding_max_cached_tokens", -1, {**MTP, "mtp_strategy": "with_suffix"}),
        ("suffix_decoding_scope", "shared", {**MTP, "mtp_strategy": "with_suffix"}),
        ("suffix_decoding_scope", "request", {"method": "suffix", "num_speculative_tokens": 3}),
        ("verify_strategy", "topp", MTP),
        ("verify_strategy", "greedy", MTP),
        ("verify_strategy", "target_match", MTP),
        ("max_candidate_len", 3, {**MTP, "verify_strategy": "topp"}),
        ("verify_window", 1, {**MTP, "verify_strategy": "topp"}),
        ("accept_policy", "accept_all", MTP),
        ("accept_policy", "reject_all", MTP),
        ("ngram_match_order", "first", {"method": "ngram", "num_speculative_tokens": 3}),
        ("ngram_match_order", "first", HYBRID),
        ("ngram_match_order", "first", {**MTP, "mtp_strategy": "with_suffix"}),
        ("max_ngram_size", 9, {**MTP, "mtp_strategy": "with_suffix"}),
        ("max_ngram_size", 9, {**MTP, "mtp_strategy": "with_suffix", "adaptive": False}),
        ("max_ngram_size", 9, {"method": "suffix", "num_speculative_tokens": 3}),
        ("max_ngram_size", 9, {"method": "naive", "num_speculative_tokens": 3}),
        ("allow_force_accept", True, MTP),
    ],
)


@WITH_EACH_KEY
def test_each_key_reaches_the_options(key: str, value: Any, base: dict[str, Any]) -> None:
    config = {**base, key: value}
    is_required = key in ("method", "num_speculative_tokens")
    with_key = resolve(config)
    without = resolve({name: kept for name, kept in base.items() if name != key or is_required})
    assert with_key.options is not None
    assert getattr(with_key.options, key) == value
    assert with_key.options != without.options
    # The log and `vllm-specplus check` print it.
    assert json.loads(with_key.as_json())["options"][key] == value
    (line,) = [line for line in explain(config, with_key) if line.startswith(f"{key}=")]
    assert "goes to vLLM" not in line
    assert "has no effect" not in line


def test_each_key_of_the_model_is_among_them() -> None:
    _, rows = WITH_EACH_KEY.args
    assert {key for key, *_ in rows} == set(CommonKeys.model_fields)
    assert list(SpecPlusOptions.model_fields) == list(CommonKeys.model_fields)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_model_steps", None),
        ("mtp_strategy", "default"),
        ("draft_strategy", "default"),
        ("max_ngram_size", None),
        ("match_override_len", 0),
        ("verify_strategy", None),
        ("max_candidate_len", None),
        ("verify_window", 0),
        ("accept_policy", "normal"),
        ("num_model_steps", 4),
    ],
)
def test_key_that_asks_for_nothing_takes_vllms_path(key: str, value: Any) -> None:
    resolved = resolve({**MTP, key: value})
    assert resolved.options is None
    assert resolved.vllm == MTP
    assert len(resolved.notes) == 1
    assert "its own path" in resolved.notes[0]


@pytest.mark.parametrize("order", ["recent", "first"])
def test_an_order_of_matches_that_is_asked_for_is_kept(order: str) -> None:
    """vLLM's own n-gram takes the first match, and nothing tells it otherwise."""
    found = options({**NGRAM, "ngram_match_order": order})
    assert (found.method, found.ngram_match_order) == ("ngram", order)


def test_shared_suffix_trees_are_vllms_own() -> None:
    """Without a key of the plugin's all requests share vLLM's trees; in the plugin's, those of one salt."""
    stock = {"method": "suffix", "num_speculative_tokens": 4}
    resolved = resolve({**stock, "suffix_decoding_scope": "shared"})
    assert (resolved.options, resolved.vllm) == (None, stock)
    for scope in ("salt", "request"):
        assert options({**stock, "suffix_decoding_scope": scope}).suffix_decoding_scope == scope
    assert options({**stock, **UNLIMITED}).suffix_decoding_scope == "salt"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"mtp_strategy": "with_suffix", **MTP}, True),
        ({"mtp_strategy": "with_suffix", **MTP, "suffix_decoding_scope": "shared"}, False),
        ({"mtp_strategy": "with_suffix", **MTP, "suffix_decoding_scope": "request"}, False),
        ({"mtp_strategy": "with_suffix", **MTP, "suffix_decoding_max_cached_requests": 0}, False),
        (HYBRID, False),
    ],
)
def test_which_engines_need_salts(config: dict[str, Any], expected: bool) -> None:
    assert options(config).needs_salts == expected


@pytest.mark.parametrize(
    ("keys", "sizes", "is_fitted"),
    [
        ({"max_ngram_size": 3}, (3, 2), False),
        ({"max_ngram_size": 1}, (1, 1), True),
        ({"min_ngram_size": 7}, (7, 7), True),
        ({"min_ngram_size": 5}, (5, 5), False),
        ({"max_ngram_size": 3, "min_ngram_size": 1}, (3, 1), False),
        ({"max_ngram_size": 3, "prompt_lookup_min": 1}, (3, 1), False),
        ({"max_ngram_size": 4, "prompt_lookup_max": 4}, (4, 2), False),
        ({"max_ngram_size": 4, "prompt_lookup_max": None}, (4, 2), False),
    ],
)
@pytest.mark.parametrize("base", [NGRAM, HYBRID])
def test_ngram_sizes(base: dict[str, Any], keys: dict[str, Any], sizes: tuple[int, int], is_fitted: bool) -> None:
    resolved = resolve({**base, **keys})
    assert resolved.options is not None
    assert (resolved.options.max_ngram_size, resolved.options.min_ngram_size) == sizes
    assert any("to fit" in note for note in resolved.notes) == is_fitted
    if base is NGRAM:
        expected = {**NGRAM, "prompt_lookup_max": sizes[0], "prompt_lookup_min": sizes[1]}
        assert resolved.vllm == expected


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (4, 2)),
    ],
)
def test_verifier_beside_stock_ngram_leaves_its_sizes(keys: dict[str, Any], sizes: tuple[int, int]) -> None:
    found = options({**NGRAM, **keys, "verify_strategy": "greedy"})
    assert (found.max_ngram_size, found.min_ngram_size) == sizes


def test_stock_ngram_keys_in_a_hybrid() -> None:
    resolved = resolve({**HYBRID, "prompt_lookup_max": 7})
    assert resolved.options is not None
    assert resolved.options.max_ngram_size == 7
    assert resolved.warnings == []


@pytest.mark.parametrize(
    ("config", "unused"),
    [
        (NAIVE, {"max_ngram_size", "min_ngram_size"}),
        ({**NAIVE, "verify_strategy": "topp"}, {"max_ngram_size", "verify_window", "accept_policy"}),
        ({**MTP, "verify_strategy": "topp", "accept_policy": "accept_all"}, {"verify_window"}),
        # The reference of a request is matched, and its drafts are verified.
        ({**NAIVE, "num_speculative_tokens": 3, "verify_strategy": "topp"}, set()),
    ],
)
def test_the_log_leaves_out_what_nothing_uses(config: dict[str, Any], unused: set[str]) -> None:
    shown = set(json.loads(resolve(config).as_json())["options"])
    may_be_shown = {"max_ngram_size", "min_ngram_size", "max_candidate_len", "verify_window", "accept_policy"}
    assert not shown & unused
    if not unused:
        assert may_be_shown <= shown


def test_naive() -> None:
    resolved = resolve({"method": "naive"})
    assert resolved.options == SpecPlusOptions(method="naive", num_speculative_tokens=0)
    assert resolved.vllm == {"method": "naive"}
    assert resolved.notes == []


@pytest.mark.parametrize(
    ("tokens", "width", "note"),
    [
        (7, 7, "num_speculative_tokens=7: method naive drafts from a request's reference text"),
        (0, 0, "num_speculative_tokens=0: method naive"),
        (-1, 0, "num_speculative_tokens=-1 counts as 0: method naive"),
        (1000, 128, "num_speculative_tokens=1000 counts as 128: method naive"),
    ],
)
def test_naive_takes_any_number_as_the_width_of_references(tokens: int, width: int, note: str) -> None:
    resolved = resolve({"method": "naive", "num_speculative_tokens": tokens})
    assert resolved.options == SpecPlusOptions(method="naive", num_speculative_tokens=width, adaptive=width > 0)
    assert resolved.vllm == {"method": "naive"}
    assert len(resolved.notes) == 1
    assert note in resolved.notes[0]


@pytest.mark.parametrize(
    ("config", "adaptive"),
    [
        (HYBRID, True),
        (HYBRID | {"mtp_strategy": "with_suffix"}, True),
        (HYBRID | {"adaptive": False}, False),
        (HYBRID | {"match_override_len": 4}, False),
        (NGRAM | {"max_ngram_size": 4}, False),
        (NGRAM | {"adaptive": True}, True),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, False),
        ({"method": "suffix", "adaptive": True}, True),
        ({"method": "naive"}, False),
        ({"method": "naive", "num_speculative_tokens": 4}, True),
        ({"method": "naive", "num_speculative_tokens": 4, "adaptive": False}, False),
    ],
)
def test_what_is_adaptive(config: dict[str, Any], adaptive: bool) -> None:
    assert options(config).adaptive is adaptive


def test_naive_does_not_use_a_model() -> None:
    resolved = resolve({"method": "naive", "model": "org/m"})
    assert resolved.vllm == {"method": "naive"}
    assert "not used" in resolved.notes[0]


@pytest.mark.parametrize(
    ("extra", "tokens"),
    [
        ({"num_speculative_tokens": 4}, 4),
        ({}, 24),
        ({"suffix_decoding_max_tree_depth": 64}, 64),
        ({"suffix_decoding_max_tree_depth": 200}, 128),
    ],
)
def test_suffix_unlimited(extra: dict[str, Any], tokens: int) -> None:
    resolved = resolve({"method": "suffix", **extra, **UNLIMITED})
    assert resolved.options is not None
    assert resolved.options.suffix_decoding_max_cached_requests == -1
    assert resolved.options.num_speculative_tokens == tokens
    assert resolved.vllm == {"method": "suffix", **extra, "num_speculative_tokens": tokens}
    assert len(resolved.notes) == ("num_speculative_tokens" not in extra)


def test_suffix_defaults_are_vllms() -> None:
    found = options({**MTP, "mtp_strategy": "with_suffix"})
    for key, known in stock_keys().keys.items():
        if key.startswith("suffix_decoding"):
            assert getattr(found, key) == known.default


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**MTP, "suffix_decoding_max_tree_depth": 9}, "suffix keys act only with method suffix"),
        ({**HYBRID, "suffix_decoding_max_tree_depth": 9}, "suffix keys act only with"),
        ({**MTP, "prompt_lookup_max": 9}, "n-gram keys act only with method ngram"),
        ({**MTP, "verify_strategy": "topp"}, "lossy"),
        ({**MTP, "verify_strategy": "greedy"}, "lossy: it emits the argmax"),
        ({**MTP, "accept_policy": "accept_all"}, "debugging"),
        ({**HYBRID, "num_model_steps": 4, "adaptive": False}, "leaves no slot"),
        ({**MTP, "verify_strategy": "topp", "verify_window": 4}, "never acts"),
        ({**HYBRID, "quantization": "mine"}, "a plugin of vLLM's must register it"),
    ],
)
def test_warnings(config: dict[str, Any], said: str) -> None:
    assert any(said in line for line in resolve(config).warnings)


@pytest.mark.parametrize(
    "config",
    [
        HYBRID,
        {**MTP, "verify_strategy": "target_match"},
        {"method": "suffix", **UNLIMITED},
        {**HYBRID, "num_model_steps": 4, "match_override_len": 4},
        {**MTP, "mtp_strategy": "with_suffix", "suffix_decoding_max_tree_depth": 9},
        {**HYBRID, "quantization": "fp8"},
    ],
)
def test_no_warnings(config: dict[str, Any]) -> None:
    assert resolve(config).warnings == []


def test_policy_without_strategy_runs_on_target_match() -> None:
    resolved = resolve({**MTP, "accept_policy": "reject_all"})
    assert resolved.options is not None
    assert resolved.options.verify_strategy == "target_match"
    assert any("target_match" in note for note in resolved.notes)
    kept = options({**MTP, "accept_policy": "reject_all", "verify_strategy": "greedy"})
    assert kept.verify_strategy == "greedy"


@pytest.mark.parametrize("method", ["dflash", "dspark", pytest.param("medusa", marks=WITH_MEDUSA), "mtp", "ngram_gpu"])
def test_any_method_can_be_verified(method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 3, "model": "org/m"}
    found = options({**config, "verify_strategy": "greedy"})
    assert (found.method, found.num_model_steps, found.is_hybrid) == (method, None, False)


def test_standard_rejection_and_probabilistic_drafts_are_no_conflict() -> None:
    config = {
        **MTP,
        "verify_strategy": "target_match",
        "rejection_sample_method": "standard",
        "draft_sample_method": "probabilistic",
    }
    resolved = resolve(config)
    assert resolved.options is not None
    assert resolved.vllm == {k: v for k, v in config.items() if k != "verify_strategy"}


def test_deprecated_mtp_name_stays_for_vllm() -> None:
    resolved = resolve({**HYBRID, "method": "deepseek_mtp"})
    assert resolved.options is not None
    assert resolved.options.method == "mtp"
    assert resolved.vllm["method"] == "deepseek_mtp"


def test_dashes_are_underscores() -> None:
    dashed = {key.replace("_", "-"): value for key, value in HYBRID.items()}
    assert resolve(dashed).options == resolve(HYBRID).options
    assert resolve({**dashed, **HYBRID}).vllm == MTP


def test_lenient_stock_values_stay_as_written() -> None:
    config = {**MTP, "parallel_drafting": "False"}
    assert resolve({**config, "mtp_strategy": "with_ngram"}).vllm == config


def test_options_are_frozen_and_pickle() -> None:
    found = options(HYBRID)
    assert pickle.loads(pickle.dumps(found)) == found
    with pytest.raises(ValueError, match="frozen"):
        found.method = "eagle"


def test_as_json_has_a_stable_order() -> None:
    resolved = resolve({**HYBRID, "target_model_config": object()})
    assert resolved.as_json().startswith('{"options": {"method": "mtp", "num_speculative_tokens"')
    assert '"target_model_config": "<object>"' in resolved.as_json()
    reordered = resolve(dict(reversed({**HYBRID, "revision": "main"}.items())))
    assert reordered.as_json() == resolve({**HYBRID, "revision": "main"}).as_json()


TOPP = {**MTP, "verify_strategy": "topp"}


@pytest.mark.parametrize(
    ("keys", "limits", "said"),
    [
        ({}, (5, 2), "max_candidate_len=5, verify_window=2: FastDeploy's defaults of topp"),
        ({"max_candidate_len": 3}, (3, 2), "verify_window=2: FastDeploy's defaults of topp"),
        ({"verify_window": 0}, (5, 0), "max_candidate_len=5: FastDeploy's defaults of topp"),
        ({"max_candidate_len": None, "verify_window": 1}, (None, 1), "max_candidate_len=null is no limit"),
        ({"max_candidate_len": None}, (None, 2), "has every draft accepted"),
        ({"max_candidate_len": 1}, (1, 0), ""),
        ({"max_candidate_len": 1, "verify_window": 2}, (1, 0), "verify_window=2 is off with max_candidate_len=1"),
        ({"max_candidate_len": 9, "verify_window": 3}, (9, 3), ""),
    ],
)
def test_topp_is_limited_unless_asked(keys: dict[str, Any], limits: tuple[int | None, int], said: str) -> None:
    """Without a limit it accepts every draft of a request with OpenAI's defaults: temperature 1, top_p 1."""
    resolved = resolve({**TOPP, **keys})
    assert resolved.options is not None
    assert (resolved.options.max_candidate_len, resolved.options.verify_window) == limits
    assert any(said in line for line in [*resolved.notes, *resolved.warnings])
    assert ("max_candidate_len=null" in "".join(resolved.warnings)) == (limits[0] is None)


def test_the_limits_of_topp_are_topps_alone() -> None:
    found = options({**MTP, "verify_strategy": "target_match"})
    assert (found.max_candidate_len, found.verify_window) == (None, 0)
