"""What `vllm-specplus check --explain` says of each key."""

from typing import Any

import pytest

from tests.config.helpers import HYBRID, MTP, NGRAM, pretend_arctic
from tests.config.test_aliases import EXAMPLES
from vllm_specplus.config import SpecPlusConfigError, SpecPlusOptions, resolve
from vllm_specplus.config.explain import explain

SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
TOPP = MTP | {"verify_strategy": "topp"}
APPEND = HYBRID | {"adaptive": False}
ALL_STEPS = APPEND | {"num_model_steps": 4}
NAIVE = {"method": "naive"}
NAIVE_TOPP = NAIVE | {"verify_strategy": "topp"}
ACCEPT_ALL = {"accept_policy": "accept_all"}


@pytest.fixture(autouse=True)
def _arctic_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_arctic(monkeypatch, True)


def sentence(config: dict[str, Any], key: str) -> str:
    lines = explain(config, resolve(config, strict=True))
    assert len(lines) == len(config)
    return lines[list(config).index(key)]


@pytest.mark.parametrize(
    ("config", "key", "says"),
    [
        (MTP, "method", "is run by vLLM alone: the model's own MTP head drafts."),
        (APPEND, "method", "fills the first slot of a request"),
        (NGRAM | {"max_ngram_size": 3}, "method", "an earlier match of the text's last tokens"),
        ({"method": "naive"}, "method", "drafts nothing."),
        ({"method": "naive", "num_speculative_tokens": 3}, "method", "reference text alone."),
        (MTP, "num_speculative_tokens", "=4 gives each request 4 slots"),
        (HYBRID, "num_speculative_tokens", "up to 4 slots"),
        ({"method": "naive", "num_speculative_tokens": 0}, "num_speculative_tokens", "no slot"),
        (
            APPEND | {"num_model_steps": 2},
            "num_model_steps",
            "runs the draft model 2 times a step, which fills the first 2 slots.",
        ),
        (MTP | {"num_model_steps": 4}, "num_model_steps", "makes anyway."),
        (APPEND, "mtp_strategy", "after the model's 1 from matches in the request's own text."),
        (MTP | {"mtp_strategy": "with_suffix"}, "mtp_strategy", "suffix trees"),
        (MTP | {"mtp_strategy": "default"}, "mtp_strategy", "as without this key."),
        (MTP | {"draft_strategy": "with_ngram"}, "draft_strategy", "is a synonym of mtp_strategy, which offers"),
        (HYBRID, "method", "chooses the drafter: the model's own MTP head drafts."),
        (HYBRID, "mtp_strategy", "offers drafts from matches in the request's own text beside the model's."),
        (HYBRID | {"num_model_steps": 2}, "num_model_steps", "runs the draft model at most 2 times a step."),
        (HYBRID | {"adaptive": True}, "adaptive", "what earns most tokens for its time"),
        (HYBRID | {"adaptive": False}, "adaptive", "appends matches to the model's drafts."),
        (NGRAM | {"adaptive": False, "max_ngram_size": 3}, "adaptive", "fills as many slots as it can."),
        (HYBRID | {"match_override_len": 2, "adaptive": False}, "adaptive", "has no effect"),
        (HYBRID | {"max_ngram_size": 7}, "max_ngram_size", "the last 7 tokens of the text."),
        (HYBRID | {"prompt_lookup_min": 3}, "prompt_lookup_min", "no match of fewer than 3 tokens."),
        (MTP | {"prompt_lookup_min": 3}, "prompt_lookup_min", "has no effect in this configuration."),
        (
            HYBRID | {"match_override_len": 4},
            "match_override_len",
            "puts a match of at least 4 tokens in place",
        ),
        (HYBRID | {"match_override_len": 0}, "match_override_len", "keeps the model's drafts"),
        (SUFFIX | {"suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests", "every past"),
        (
            SUFFIX | {"suffix_decoding_max_cached_requests": 0},
            "suffix_decoding_max_cached_requests",
            "no past answers.",
        ),
        (SUFFIX | {"suffix_decoding_max_cached_requests": 9}, "suffix_decoding_max_cached_requests", "keeps 9 past"),
        (
            SUFFIX | {"suffix_decoding_max_cached_requests": 9, "suffix_decoding_scope": "salt"},
            "suffix_decoding_max_cached_requests",
            "in trees that requests of one cache_salt share.",
        ),
        (
            SUFFIX | {"suffix_decoding_max_cached_requests": 9, "suffix_decoding_scope": "request"},
            "suffix_decoding_max_cached_requests",
            "has no effect in this configuration: no past answers are kept.",
        ),
        (
            SUFFIX | {"suffix_decoding_max_cached_tokens": 9},
            "suffix_decoding_max_cached_tokens",
            "at most 9 tokens of past answers.",
        ),
        (
            SUFFIX | {"suffix_decoding_max_cached_tokens": 1000000},
            "suffix_decoding_max_cached_tokens",
            "1000000 tokens",
        ),
        (SUFFIX | {"suffix_decoding_max_cached_tokens": -1}, "suffix_decoding_max_cached_tokens", "sets no limit"),
        (SUFFIX | {"suffix_decoding_scope": "shared"}, "suffix_decoding_scope", "lets all requests draft from"),
        (SUFFIX | {"suffix_decoding_scope": "salt"}, "suffix_decoding_scope", "only requests with the same cache_salt"),
        (SUFFIX | {"suffix_decoding_scope": "request"}, "suffix_decoding_scope", "no request draft from another's"),
        (
            SUFFIX | {"suffix_decoding_max_cached_requests": 0, "suffix_decoding_scope": "salt"},
            "suffix_decoding_scope",
            "has no effect in this configuration: no past answers are kept.",
        ),
        (HYBRID | {"suffix_decoding_max_tree_depth": 9}, "suffix_decoding_max_tree_depth", "has no effect"),
        (TOPP, "verify_strategy", "in the target's nucleus and among the 5 most likely tokens of it; lossy"),
        (TOPP | {"max_candidate_len": None}, "verify_strategy", "in the target's nucleus; lossy"),
        (MTP | {"verify_strategy": None}, "verify_strategy", "is the same as leaving it out."),
        (TOPP | {"max_candidate_len": 5}, "max_candidate_len", "the 5 most likely"),
        (TOPP | {"verify_window": 2}, "verify_window", "the next 2 drafts"),
        (MTP | {"accept_policy": "reject_all"}, "accept_policy", "accepts no draft"),
        (MTP | {"model": "org/head"}, "model", "is where vLLM finds the MTP head; this command does not look there."),
        (NGRAM | {"model": "org/m"}, "model", "has no effect in this configuration: method ngram has no draft model."),
        (MTP | {"quantization": "fp8"}, "quantization", 'as "fp8".'),
        (
            MTP | {"disable_padded_drafter_batch": True},
            "disable_padded_drafter_batch",
            "goes to vLLM as true; vLLM says of this key: Disable",
        ),
        (MTP | {"parallel_drafting": "False"}, "parallel_drafting", "goes to vLLM as false; vLLM says of this key: "),
        (ALL_STEPS, "method", "fills every slot of a request"),
        (ALL_STEPS, "num_model_steps", "runs the draft model 4 times a step, which fills every slot."),
        (ALL_STEPS, "mtp_strategy", "has no effect in this configuration: the model fills every slot."),
        (
            ALL_STEPS | {"match_override_len": 3},
            "mtp_strategy",
            "fills no slot, as the model fills every one; only match_override_len acts, with matches in the request's",
        ),
        (TOPP | {"verify_window": 3}, "verify_window", "the next 3 drafts are first choices."),
        (TOPP | {"verify_window": 4}, "verify_window", "never acts: it needs 4 drafts after the one that it saves"),
        (NAIVE_TOPP | {"num_speculative_tokens": 1, "verify_window": 1}, "verify_window", "a request has 1 slot."),
        (TOPP | ACCEPT_ALL, "verify_strategy", "is overridden by accept_policy: it only decides which token follows"),
        (MTP | {"verify_strategy": "greedy", "accept_policy": "reject_all"}, "verify_strategy", "is overridden by"),
        (MTP | {"verify_strategy": "greedy", "accept_policy": "normal"}, "verify_strategy", "the target's first"),
        (TOPP | ACCEPT_ALL | {"max_candidate_len": 5}, "max_candidate_len", "samples only the 5 most likely tokens"),
        (TOPP | ACCEPT_ALL | {"verify_window": 2}, "verify_window", "no effect in this configuration: accept_policy"),
        (
            NAIVE | {"verify_strategy": "greedy"},
            "verify_strategy",
            "only decides how tokens are sampled: nothing is drafted.",
        ),
        (NAIVE_TOPP | {"max_candidate_len": 5}, "max_candidate_len", "samples only the 5 most likely tokens"),
        (
            NAIVE_TOPP | {"verify_window": 2},
            "verify_window",
            "has no effect in this configuration: nothing is drafted.",
        ),
        (NAIVE | ACCEPT_ALL, "accept_policy", "has no effect in this configuration: nothing is drafted."),
        (MTP | {"num_speculative_tokens": 1}, "num_speculative_tokens", "each request 1 slot for"),
        (MTP | {"num_speculative_tokens": "1"}, "num_speculative_tokens", "each request 1 slot for"),
        (NAIVE | {"num_speculative_tokens": 1}, "num_speculative_tokens", "up to 1 slot for"),
        (APPEND | {"num_model_steps": 1}, "num_model_steps", "model once a step, which fills the first slot."),
        (HYBRID | {"max_ngram_size": 1}, "max_ngram_size", "the last 1 token of"),
        (HYBRID | {"min_ngram_size": 1}, "min_ngram_size", "fewer than 1 token."),
        (HYBRID | {"match_override_len": 1}, "match_override_len", "a match of at least 1 token in"),
        (TOPP | {"max_candidate_len": 1}, "max_candidate_len", "only the most likely token of"),
        (TOPP | {"verify_window": 1}, "verify_window", "if the next draft is a first choice."),
        (
            SUFFIX | {"suffix_decoding_max_cached_requests": 1},
            "suffix_decoding_max_cached_requests",
            "1 past answer in",
        ),
        (SUFFIX | {"suffix_decoding_max_spec_factor": 1.0}, "suffix_decoding_max_spec_factor", "at most 1 token for"),
        (SUFFIX | {"suffix_decoding_max_tree_depth": 1}, "suffix_decoding_max_tree_depth", "to 1 token together."),
        (
            {"sp_type": "deterministic", "gen_num_per_cycle": 3},
            "sp_type",
            "is RTP-LLM's name for method=\"naive\", which drafts from a request's reference text alone.",
        ),
        (
            {"sp_type": "deterministic", "sp_input_lookup": True},
            "sp_type",
            'is RTP-LLM\'s name for method="ngram", which chooses the drafter',
        ),
        (
            {"sp_type": "deterministic", "sp_input_lookup": True},
            "sp_input_lookup",
            "=true searches the request's own text too.",
        ),
        ({"sp_type": "mtp", "sp_min_token_match": 2}, "sp_min_token_match", "has no effect in this configuration."),
        ({"speculate_method": "None"}, "speculate_method", "asks for no speculation."),
        (MTP | {"dialect": "fastdeploy"}, "dialect", "takes FastDeploy's defaults for what is left out."),
        (MTP | {"quantization": "WINT8"}, "quantization", "is Paddle's name for quantization=\"int8_per_channel"),
        (
            MTP | {"method": "MTP", "dialect": "fastdeploy"},
            "method",
            "is FastDeploy's name for method=\"mtp\", which chooses the drafter: the model's own MTP head",
        ),
        (NGRAM, "method", "a match has exactly 5 tokens, as vLLM's default is."),
        (NGRAM | {"verify_strategy": "greedy"}, "method", "a match has exactly 5 tokens, as vLLM's default is."),
        (NGRAM | {"ngram_match_order": "first"}, "ngram_match_order", "takes the earliest occurrence, so the prompt's"),
        (HYBRID | {"ngram_match_order": "recent"}, "ngram_match_order", "takes the latest occurrence, where"),
        (TOPP | {"max_candidate_len": None}, "max_candidate_len", "sets no limit: the whole nucleus is accepted."),
        (
            TOPP | {"max_candidate_len": 1, "verify_window": 2},
            "verify_window",
            "has no effect in this configuration: max_candidate_len is 1.",
        ),
        (MTP | {"allow_force_accept": True}, "allow_force_accept", "lets a request have all of its drafts accepted."),
        (MTP | {"allow_force_accept": False}, "allow_force_accept", "lets no request have all of its drafts accepted."),
        (
            MTP | {"mtp_strategy": "with_suffix", "min_ngram_size": 3},
            "min_ngram_size",
            "no match of fewer than 3 tokens.",
        ),
        (
            MTP | {"mtp_strategy": "with_suffix", "adaptive": False, "max_ngram_size": 3},
            "max_ngram_size",
            "the last 3 tokens of the text, and acts on a request's reference alone.",
        ),
        (
            SUFFIX | {"min_ngram_size": 3},
            "min_ngram_size",
            "fewer than 3 tokens, and acts on a request's reference alone.",
        ),
        (
            {"method": "naive", "num_speculative_tokens": 4, "min_ngram_size": 3},
            "min_ngram_size",
            "fewer than 3 tokens, and acts on a request's reference alone.",
        ),
        (
            {"speculate_method": "mtp", "num_speculative_tokens": 1, "return_full_hidden_states": 1},
            "return_full_hidden_states",
            "is ignored",
        ),
    ],
)
def test_sentence(config: dict[str, Any], key: str, says: str) -> None:
    assert says in sentence(config, key)


VALUES: dict[str, list[Any]] = {
    "num_model_steps": [2],
    "max_ngram_size": [3],
    "min_ngram_size": [2],
    "ngram_match_order": ["recent", "first"],
    "match_override_len": [0, 3],
    "adaptive": [False, True],
    "suffix_decoding_max_tree_depth": [9],
    "suffix_decoding_max_cached_requests": [9],
    "suffix_decoding_max_spec_factor": [1.0],
    "suffix_decoding_min_token_prob": [0.2],
    "suffix_decoding_max_cached_tokens": [9],
    "suffix_decoding_scope": ["salt"],
    "max_candidate_len": [None, 3],
    "verify_window": [0, 2],
    "accept_policy": ["reject_all"],
    "allow_force_accept": [True],
}
OTHERS = [HYBRID, APPEND, HYBRID | {"mtp_strategy": "with_suffix"}, SUFFIX | {"verify_strategy": "greedy"}]
OTHERS += [NGRAM | {"verify_strategy": "greedy"}, NAIVE, NAIVE | {"num_speculative_tokens": 4}, TOPP, TOPP | ACCEPT_ALL]


@pytest.mark.parametrize("key", VALUES)
@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_what_nothing_reads_has_no_effect(others: dict[str, Any], key: str) -> None:
    """`in_use` says which options something reads; the sentences say the same."""
    for value in VALUES[key]:
        config = others | {key: value}
        try:
            resolved = resolve(config, strict=True)
        except SpecPlusConfigError:
            continue
        assert resolved.options is not None
        is_read = key in resolved.options.in_use()
        assert is_read != ("has no effect in this configuration" in sentence(config, key))


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_key_of_each_example_has_a_line(example: dict[str, Any]) -> None:
    config = example["given"]
    try:
        resolved = resolve(config, strict=True)
    except SpecPlusConfigError:
        return
    lines = explain(config, resolved)
    assert len(lines) == len(config)
    for key, line in zip(config, lines, strict=True):
        assert line.startswith(f"{key}=")
        assert line.endswith(".")
        assert "\n" not in line


def test_each_option_has_a_sentence_of_its_own() -> None:
    from vllm_specplus.config.explain import _EFFECTS

    assert set(SpecPlusOptions.model_fields) <= set(_EFFECTS)
