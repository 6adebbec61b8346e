"""`vllm-specplus check` refuses what an engine refuses, and nothing else, also where the refusal is vLLM's own."""

import copy
import importlib
import itertools
import json
import runpy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config.parallel import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from tests.e2e.eagle_heads import make_eagle_head
from tests.e2e.families import make_medusa
from tests.engine.config_literals import ROOT, configs_in_file, configs_in_text, has_parameter, is_config
from vllm_specplus.cli import main
from vllm_specplus.engine import patch, refusals
from vllm_specplus.testing.tiny_model import make_draft_model, make_random

MTP = {"method": "mtp", "num_speculative_tokens": 4}
HYBRID = MTP | {"mtp_strategy": "with_ngram"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
DRAFT = {"method": "draft_model", "model": "P", "num_speculative_tokens": 4}
EAGLE = {"method": "eagle", "model": "P", "num_speculative_tokens": 4}
SYNTHETIC = MTP | {"rejection_sample_method": "synthetic"}
UNLIMITED = {"suffix_decoding_max_cached_requests": -1}

# What vLLM checks by itself, at both sides of each border.
REFUSED = [
    {},
    {"num_speculative_tokens": 4},
    {"method": "mtp"},
    {"method": "ngram"},
    {"method": "ngram_gpu"},
    {"method": "mtp", "model": "P"},
    {"method": "draft_model", "model": "P"},
    {"model": "ngram"},
    {"method": "mtp", "mtp_strategy": "default"},
    {"method": "draft_model", "num_speculative_tokens": 4},
    {"method": "eagle", "num_speculative_tokens": 4},
    {"method": "custom_class", "num_speculative_tokens": 4},
    {"method": "custom_class", "model": "a.B"},
    {"model": "a.B"},
    NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
    NGRAM | {"prompt_lookup_max": 0},
    NGRAM | {"prompt_lookup_max": "x"},
    SUFFIX | {"suffix_decoding_max_cached_requests": -2},
    SUFFIX | {"suffix_decoding_max_tree_depth": 0},
    SUFFIX | {"suffix_decoding_max_spec_factor": -0.5},
    SUFFIX | {"suffix_decoding_min_token_prob": 1.5},
    MTP | {"tensor_parallel_size": 1},
    HYBRID | {"tensor_parallel_size": 1},
    SYNTHETIC,
    SYNTHETIC | {"synthetic_acceptance_length": 5.5},
    SYNTHETIC | {"synthetic_acceptance_length": 0.5},
    SYNTHETIC | {"synthetic_acceptance_length": 2.0, "synthetic_acceptance_rates": [1, 1, 1, 0]},
    SYNTHETIC | {"synthetic_acceptance_rates": [0.9, 0.8]},
    SYNTHETIC | {"synthetic_acceptance_rates": [0.9, 0.8, 0.85, 0.1]},
    SYNTHETIC | {"synthetic_acceptance_rates": [1.5, 0.8, 0.5, 0.1]},
    MTP | {"synthetic_acceptance_length": 2.0},
    HYBRID | {"synthetic_acceptance_length": 2.0},
    MTP | {"use_heterogeneous_vocab": True},
    HYBRID | {"use_heterogeneous_vocab": True},
    DRAFT | {"use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"},
    NGRAM | {"index_share_for_mtp_iteration": True},
    SUFFIX | UNLIMITED | {"index_share_for_mtp_iteration": False},
    EAGLE | {"index_share_for_mtp_iteration": True},
    MTP | {"enable_adaptive_verification": True, "use_local_argmax_reduction": True},
    HYBRID | {"enable_adaptive_verification": True, "adaptive": False},
    NGRAM | {"enable_adaptive_verification": True, "adaptive": True},
    EAGLE | {"dspark_draft_topk": 3},
    MTP | {"dspark_draft_topk": 3},
    MTP | {"attention_backend": "nonsense"},
    HYBRID | {"attention_backend": "nonsense"},
    MTP | {"moe_backend": "nonsense"},
    HYBRID | {"kv_cache_dtype": "nonsense"},
    MTP | {"draft_load_config": {"nope": 1}},
    HYBRID | {"draft_load_config": {"nope": 1}},
    DRAFT | {"draft_load_config": {"nope": 1}},
    MTP | {"draft_load_config": {"load_format": 3}},
    HYBRID | {"draft_load_config": {"safetensors_load_strategy": "nonsense"}},
    MTP | {"draft_load_config": [1]},
    MTP | {"num_speculative_tokens_per_batch_size": []},
    MTP | {"num_speculative_tokens_per_batch_size": [[2, 4, 1]]},
    MTP | {"num_speculative_tokens_per_batch_size": [[1, 4, 2], [3, 8, 1]]},
    MTP | {"num_speculative_tokens_per_batch_size": [[1, 4, -1]]},
    MTP | {"num_speculative_tokens_per_batch_size": [[4, 1, 1]]},
]
ACCEPTED = [
    {"sp_type": "vanilla", "sp_checkpoint_path": "P"},
    {"sp_type": "deterministic"},
    {"speculate_method": "mtp"},
    {"method": "suffix"},
    {"model": "ngram", "num_speculative_tokens": 4},
    {"model": "a.B", "num_speculative_tokens": 4},
    {"model": "P", "num_speculative_tokens": 4},
    NGRAM | {"prompt_lookup_min": 4},
    NGRAM | {"dspark_draft_topk": 3},
    MTP | {"prompt_lookup_min": 4, "prompt_lookup_max": 2},
    MTP | {"suffix_decoding_max_cached_requests": -2},
    SUFFIX | {"suffix_decoding_max_cached_requests": 0, "suffix_decoding_min_token_prob": 1},
    SYNTHETIC | {"synthetic_acceptance_length": 5},
    SYNTHETIC | {"synthetic_acceptance_rates": [1, 0.5, 0.5, 0]},
    MTP | {"rejection_sample_method": "block"},
    MTP | {"index_share_for_mtp_iteration": True},
    MTP | {"attention_backend": "auto", "moe_backend": "triton", "kv_cache_dtype": "fp8"},
    MTP | {"attention_backend": "cpu_attn"},
    HYBRID | {"draft_load_config": {"load_format": "dummy", "model_loader_extra_config": {"any": 1}}},
    DRAFT | {"draft_load_config": {"safetensors_prefetch_num_threads": "2"}},
    MTP | {"draft_load_config": None},
    HYBRID | {"method": "medusa", "model": "org/heads"},
    MTP | {"num_speculative_tokens_per_batch_size": [[9, 16, 1], [1, 8, 9]]},
    SUFFIX | UNLIMITED | {"num_speculative_tokens_per_batch_size": [[1, 8, 2]]},
    {"method": "naive", "rejection_sample_method": "block"},
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
TEXTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.sh")))
MIGRATION = ROOT / "tests/config/migration_examples.json"
MODEL_KEYS = ("model", "draft_model_name_or_path", "sp_checkpoint_path")
# There is no tiny checkpoint for them.
NO_CHECKPOINT = ("mlp_speculator", "dflash", "dspark")
# Files without configs, or with such as other tests show.
EXCLUDED = {
    "tests/engine/test_check_agrees.py": "its own configs are the second test's",
    "tests/requests/test_middleware.py": "a method there is one of HTTP",
}

_ParameterSet = type(pytest.param())

# Only an engine finds out about these: the head's checkpoint may state the number of tokens, and a plugin of vLLM's may
# register the quantization.
NOT_KNOWN = [
    {"method": "eagle", "model": "org/eagle", "draft-tensor-parallel-size": 1},
    {"method": "medusa", "model": "draft"},
    HYBRID | {"quantization": "mine"},
]


def examples() -> Iterator[dict[str, Any]]:
    """The configs that tests, examples and documents name, each once, where JSON can hold them."""
    texts: dict[str, None] = {}
    for config in (*_written(), *_parameters(), *_of_the_demo(), *_migrated(), *_documented()):
        try:
            texts[json.dumps(config, allow_nan=False)] = None
        except (TypeError, ValueError):
            continue
    for text in texts:
        config = json.loads(text)
        if config.get("method") not in NO_CHECKPOINT and config not in NOT_KNOWN:
            yield config


def _tests() -> Iterator[Path]:
    return (path for path in TESTS if str(path.relative_to(ROOT)) not in EXCLUDED)


def _written() -> Iterator[dict[str, Any]]:
    """The configs that tests and examples write out."""
    for path in (*_tests(), *EXAMPLES):
        yield from configs_in_file(path)


def _parameters() -> Iterator[dict[str, Any]]:
    """The parameters of tests: one called `config`, or `base` with the parameters `key` and `value`, or with `keys`."""
    for path in _tests():
        if has_parameter(path, ("config", "base")):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for value in vars(module).values():
                for row in _rows(getattr(value, "pytestmark", ())):
                    if isinstance(row.get("config"), dict):
                        yield row["config"]
                    elif isinstance(row.get("base"), dict):
                        yield row["base"] | row.get("keys", {}) | ({row["key"]: row["value"]} if "key" in row else {})


def _of_the_demo() -> Iterator[dict[str, Any]]:
    configs = runpy.run_path(str(ROOT / "examples/demo.py"))["of_mtp"]().configs
    return (config for config in configs.values() if is_config(config))


def _migrated() -> Iterator[dict[str, Any]]:
    """The examples of migration, as they were given to the other system."""
    return (example["given"] for example in json.loads(MIGRATION.read_text()))


def _documented() -> Iterator[dict[str, Any]]:
    """The configs that `TEXTS` show as JSON."""
    for path in TEXTS:
        yield from configs_in_text(path.read_text())


def _rows(marks: Iterable[pytest.Mark]) -> Iterator[dict[str, Any]]:
    """Each combination of a test's parameters, by name."""
    tables = []
    for mark in marks:
        if mark.name == "parametrize":
            names, rows = mark.args
            names = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
            rows = [row.values if isinstance(row, _ParameterSet) else row if len(names) > 1 else (row,) for row in rows]
            tables.append([dict(zip(names, row, strict=False)) for row in rows])
    for parts in itertools.product(*tables):
        yield {name: value for part in parts for name, value in part.items()}


@pytest.fixture(scope="module")
def with_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Names a tiny checkpoint that suits the method wherever a config names a model."""
    draft = make_draft_model(tmp_path_factory.mktemp("draft"))
    heads = {method: make_eagle_head(draft / method, method) for method in ("eagle", "eagle3")}
    heads["medusa"] = make_medusa(draft / "medusa", draft)

    def replaced(config: dict[str, Any]) -> dict[str, Any]:
        method = next((config[key] for key in ("method", "speculate_method", "sp_type") if key in config), None)
        model = heads.get(method, draft) if isinstance(method, str) else draft
        if isinstance(method, str) and method.endswith("mtp"):
            model = make_random(tmp_path_factory.mktemp("head"))
        is_path = method != "custom_class"
        return {
            key: str(model) if key in MODEL_KEYS and is_path and value not in (3, "ngram", "a.B") else value
            for key, value in config.items()
        }

    return replaced


@pytest.fixture(scope="module")
def engine_error(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Exception | None]:
    """Why an engine refuses a config, or None."""
    target = str(make_random(tmp_path_factory.mktemp("target")))
    model_config = EngineArgs(model=target, max_model_len=256).create_model_config()
    patch.install()

    def error(config: dict[str, Any]) -> Exception | None:
        args = EngineArgs(model=target, max_model_len=256, speculative_config=copy.deepcopy(config))
        try:
            made = args.create_speculative_config(copy.copy(model_config), ParallelConfig())
            # The scheduler's part of starting an engine.
            if made is not None and made.num_speculative_tokens_per_batch_size is not None:
                validate_and_normalize_dynamic_sd_schedule(made.num_speculative_tokens_per_batch_size)
        except Exception as problem:
            return problem
        return None

    return error


@pytest.fixture(autouse=True)
def _any_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Platforms differ in what they can quantize and verify, and `check` says that it does not look."""
    monkeypatch.setattr(type(current_platform), "verify_quantization", classmethod(lambda cls, name: None))
    reasons = [reason for reason in refusals._REASONS if reason is not refusals._synthetic_error]
    monkeypatch.setattr(refusals, "_REASONS", reasons)


@pytest.mark.parametrize("config", list(examples()), ids=json.dumps)
def test_the_examples(
    config: dict[str, Any], with_models: Any, engine_error: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_models(config)
    status = main(["check", json.dumps(config)])
    said, problem = capsys.readouterr().err, engine_error(config)
    assert status == (0 if problem is None else 2), f"check: {said!r}; engine: {problem!r}"


@pytest.mark.parametrize(
    ("config", "status"), [*((config, 2) for config in REFUSED), *((config, 0) for config in ACCEPTED)], ids=json.dumps
)
def test_what_vllm_checks_by_itself(
    config: dict[str, Any], status: int, with_models: Any, engine_error: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_models(config)
    assert main(["check", json.dumps(config)]) == status
    said, problem = capsys.readouterr().err, engine_error(config)
    assert (problem is not None) == (status == 2), f"check: {said!r}; engine: {problem!r}"
    assert "Traceback" not in said
