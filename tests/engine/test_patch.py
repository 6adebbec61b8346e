"""The one patch: what installing it costs, and what goes through it."""

import dataclasses
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm.logger
from vllm import SamplingParams
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

import vllm_specplus
from tests.e2e.families import make_family, make_medusa, make_two_layers
from vllm_specplus import compat
from vllm_specplus.config import SpecPlusConfigError, resolve
from vllm_specplus.engine import patch as engine
from vllm_specplus.engine import refusals, setup
from vllm_specplus.engine.worker import SpecPlusWorker, SpecPlusWorkerMixin
from vllm_specplus.requests import shown_params
from vllm_specplus.testing.tiny_model import make_random

HYBRID = {"method": "mtp", "num_speculative_tokens": 3, "mtp_strategy": "with_ngram"}
STOCK = {"method": "mtp", "num_speculative_tokens": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": -1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def on_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM builds the config of a machine where Triton runs, and so chooses Model Runner V2 by itself."""
    for module in ("vllm.triton_utils", "vllm.config.vllm"):
        monkeypatch.setattr(f"{module}.HAS_TRITON", True)


def engine_args(model: Path, config: dict[str, object], **more: object) -> EngineArgs:
    return EngineArgs(model=str(model), speculative_config=config, max_model_len=256, enforce_eager=True, **more)


def create(model: Path, config: dict[str, object]) -> object:
    return engine_args(model, config).create_engine_config().speculative_config


def test_register_twice_patches_once() -> None:
    vllm_specplus.register()
    patched = EngineArgs.create_speculative_config
    vllm_specplus.register()
    assert EngineArgs.create_speculative_config is patched


def test_vllm_finds_the_plugin() -> None:
    """In a fresh process vLLM's own plugin loading installs the patch."""
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "assert hasattr(EngineArgs.create_speculative_config, 'specplus_original')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_register_loads_next_to_nothing() -> None:
    """On top of vLLM's own import: our few modules, and nothing of torch, vLLM or a matcher."""
    code = (
        "import sys, vllm.engine.arg_utils\n"
        "before = set(sys.modules)\n"
        "import vllm_specplus; vllm_specplus.register()\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.PIPE)
    loaded = done.stdout.decode().split()
    ours = {name for name in loaded if name.startswith("vllm_specplus")}
    assert ours
    assert not any(name.split(".")[1] in ("proposers", "verify", "runners") for name in ours if "." in name)
    assert {name.partition(".")[0] for name in set(loaded) - ours} <= set(sys.stdlib_module_names)


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise AttributeError("EngineArgs has no create_speculative_config")

    monkeypatch.setattr(engine, "install", broken)
    vllm_specplus.register()
    assert "cannot attach" in caplog.text


def test_a_lost_seam_stops_plugin_configs_only(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = compat.Seam("vllm.v1.worker.gpu_model_runner", "NoSuchProposer", "replaced")
    monkeypatch.setattr(compat.check, "LEDGER", (*compat.LEDGER, gone))
    monkeypatch.setattr(engine, "check_vllm", compat.check_vllm.__wrapped__)
    with pytest.raises(compat.SpecPlusCompatError, match="NoSuchProposer is gone"):
        create(tiny, dict(HYBRID))
    assert type(create(tiny, dict(STOCK))) is SpeculativeConfig


@pytest.mark.parametrize(
    ("config", "shown_to_v1", "shown_to_v2"),
    [
        (HYBRID, "mtp", "mtp"),
        ({"method": "naive"}, "custom_class", "ngram_gpu"),
        ({"method": "ngram", "num_speculative_tokens": 3, "max_ngram_size": 4}, "custom_class", "ngram_gpu"),
        (SUFFIX, "custom_class", "ngram_gpu"),
    ],
    ids=["hybrid", "naive", "ngram", "suffix"],
)
def test_what_each_model_runner_is_shown(
    config: dict[str, object],
    shown_to_v1: str,
    shown_to_v2: str,
    tiny: Path,
    on_v2: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(shown: str) -> None:
        made = create(tiny, dict(config))
        assert made.method == shown
        # Logs show the real one.
        assert f"method={config['method']!r}" in repr(made)
        assert "ngram_gpu" not in repr(made)

    check(shown_to_v2)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    check(shown_to_v1)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "max_ngram_size": 4}
SAMPLED_DRAFTS = {"draft_sample_method": "probabilistic"}


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        (HYBRID, "target_match"),
        (NGRAM, "target_match"),
        (SUFFIX, "target_match"),
        ({"method": "naive", "num_speculative_tokens": 8}, "target_match"),
        (HYBRID | SAMPLED_DRAFTS, "rejection"),
        # These drafts are not sampled, whatever a model's would be.
        (NGRAM | SAMPLED_DRAFTS, "target_match"),
        (HYBRID | {"rejection_sample_method": "standard"}, "target_match"),
        # vLLM has this verifier on V2 alone; on V1 it runs the standard one.
        (HYBRID | {"rejection_sample_method": "block"}, "target_match"),
        # The user has chosen.
        (HYBRID | {"verify_strategy": "topp"}, "topp"),
        # Nothing is verified.
        ({"method": "naive"}, None),
    ],
)
def test_the_strategy_on_a_cpu_without_one(
    config: dict[str, object],
    strategy: str | None,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert create(tiny, dict(config)).specplus.verify_strategy == strategy
    lines = [line for line in log.messages if "on a CPU" in line]
    assert len(lines) == (strategy is not None and "verify_strategy" not in config)
    assert all(f'verify_strategy="{strategy}" is set' in line for line in lines)


def test_synthetic_acceptance_on_a_cpu(tiny: Path, on_v2: None, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic = HYBRID | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    assert create(tiny, dict(synthetic)).specplus.verify_strategy is None
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(SpecPlusConfigError, match='="synthetic" is not allowed on a CPU on Model Runner V1'):
        create(tiny, dict(synthetic))


def test_on_v2_and_off_a_cpu_verification_stays_vllms(tiny: Path, on_v2: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert create(tiny, dict(HYBRID)).specplus.verify_strategy is None
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    args = engine_args(tiny, dict(HYBRID))
    read = setup.EngineSetup.read(args, resolve(HYBRID), None, None)
    assert setup.default_strategy(read) == "target_match"
    assert setup.default_strategy(dataclasses.replace(read, device_type="cuda")) is None


def test_the_carrier_of_a_method_brings_no_warning(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM calls its custom class experimental; a user who asked for `ngram` never heard of one."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    create(tiny, dict(NGRAM))  # in its first call vLLM sets its logging up anew, without this handler
    vllm.logger._print_warning_once.cache_clear()  # it says a line once in a process
    vllm_logger = logging.getLogger(SpeculativeConfig.__module__)
    vllm_logger.addHandler(caplog.handler)
    try:
        create(tiny, dict(NGRAM))
        assert not [line for line in caplog.messages if "custom class" in line]
        vllm_logger.warning("a custom class of the user's own")
        assert "a custom class of the user's own" in caplog.messages
    finally:
        vllm_logger.removeHandler(caplog.handler)


NAIVE = {"method": "naive"}
PIPELINE = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.parametrize("config", [HYBRID, NAIVE | {"num_speculative_tokens": 8}, SUFFIX])
def test_a_pipeline_needs_asynchronous_scheduling(
    config: dict[str, object], tiny: Path, on_v2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = engine_args(tiny, config, **PIPELINE)
    made = args.create_engine_config()
    assert args.async_scheduling is None
    worker = SpecPlusWorker.__new__(SpecPlusWorker)
    worker.vllm_config = made
    made.scheduler_config.async_scheduling = True
    worker._check_scheduling()
    made.scheduler_config.async_scheduling = False
    with pytest.raises(compat.SpecPlusCompatError, match="pipeline_parallel_size=2 is not allowed here"):
        worker._check_scheduling()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(SpecPlusConfigError, match="pipeline_parallel_size=2 is not allowed on Model Runner V1"):
        args.create_engine_config()


def test_a_draft_model_has_no_pipeline(tiny: Path, on_v2: None) -> None:
    config = HYBRID | {"method": "draft_model", "model": str(tiny)}
    with pytest.raises(SpecPlusConfigError, match='method="draft_model" is not allowed with pipeline_parallel_size=2'):
        engine_args(tiny, config, **PIPELINE).create_engine_config()


@pytest.mark.parametrize(
    ("config", "stays_on"),
    [(HYBRID, True), (NAIVE, True), (NAIVE | {"num_speculative_tokens": 8}, False), (SUFFIX, False)],
)
def test_asynchronous_scheduling_on_v2(config: dict[str, object], stays_on: bool, tiny: Path, on_v2: None) -> None:
    for asked in (None, True, False):
        args = engine_args(tiny, dict(config), async_scheduling=asked)
        args.create_engine_config()
        assert args.async_scheduling is (False if asked is None and not stays_on else asked)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (
            HYBRID | {"enable_adaptive_verification": True, "adaptive": False},
            {},
            "enable_adaptive_verification=true with keys",
        ),
        (HYBRID | {"verify_strategy": "topp"}, {"use_fp64_gumbel": True}, "not allowed with use_fp64_gumbel=True"),
        (HYBRID | {"verify_strategy": "topp"}, {"watermark_config": {}}, "not allowed with a watermark"),
        (HYBRID, {"watermark_config": {}}, "not allowed with a watermark"),
        (HYBRID, {"enable_batch_sharded_sampling": True}, "enable_batch_sharded_sampling=True is not allowed"),
        (HYBRID, PIPELINE | {"async_scheduling": False}, "async_scheduling=False is not allowed with pipeline_par.*=2"),
    ],
)
def test_what_v2_cannot_combine(
    config: dict[str, object], changes: dict[str, object], words: str, tiny: Path, on_v2: None
) -> None:
    args = engine_args(tiny, config, **changes)
    with pytest.raises(SpecPlusConfigError, match=words):
        args.create_engine_config()


@pytest.mark.parametrize("runner", ["0", "1"])
def test_expert_parallel_workers_on_a_cpu(
    runner: str, tmp_path: Path, on_v2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    mixture = make_family(tmp_path / "mixture", "ernie")
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with pytest.raises(SpecPlusConfigError, match="enable_expert_parallel=True is not allowed on a CPU"):
        engine_args(mixture, HYBRID, enable_expert_parallel=True, **two).create_engine_config()
    # One worker has all experts, and without plugin keys the choice is vLLM's.
    engine_args(mixture, HYBRID, enable_expert_parallel=True).create_engine_config()
    engine_args(mixture, None, enable_expert_parallel=True, **two).create_engine_config()


@pytest.mark.parametrize("runner", ["0", "1"])
def test_linear_attention_on_a_cpu(runner: str, tmp_path: Path, on_v2: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    model = make_family(tmp_path / "model", "qwen3_next")
    for config in (HYBRID, SUFFIX, NAIVE):
        monkeypatch.setattr(refusals, "version", lambda name: "0.32.0+cpu")
        with pytest.raises(SpecPlusConfigError, match="a model with linear attention is not allowed on a CPU"):
            engine_args(model, config).create_engine_config()
        monkeypatch.setattr(refusals, "version", lambda name: "0.33.0+cpu")
        engine_args(model, config).create_engine_config()
    # A strategy alone drafts nothing.
    engine_args(model, STOCK | {"verify_strategy": "topp"}).create_engine_config()


@pytest.mark.parametrize("runner", ["0", "1"])
def test_data_parallel_engines_that_share_experts_on_a_cpu(
    runner: str, tiny: Path, tmp_path: Path, on_v2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    mixture = make_family(tmp_path / "mixture", "ernie")
    for rank in ({}, {"data_parallel_rank": 1}):
        with pytest.raises(SpecPlusConfigError, match="data_parallel_size=2 is not allowed for a mixture of experts"):
            engine_args(mixture, HYBRID, data_parallel_size=2, **rank).create_engine_config()
        engine_args(mixture, None, data_parallel_size=2, **rank).create_engine_config()
    # Engines of a dense model share nothing.
    engine_args(tiny, HYBRID, data_parallel_size=2).create_engine_config()


@pytest.mark.parametrize(
    ("changes", "rust", "words"),
    [
        ({}, "0", None),
        ({"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}, "0", "with return_sampling_mask=True"),
        ({}, "1", "by vLLM's Rust front end"),
    ],
)
def test_requests_that_are_not_checked(
    changes: dict[str, object],
    rust: str,
    words: str | None,
    tiny: Path,
    on_v2: None,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    engine_args(tiny, HYBRID, **changes).create_engine_config()
    said = [line for line in log.messages if "what requests ask of vllm-specplus is ignored" in line]
    assert len(said) == (words is not None)
    assert all(words in line for line in said)


def test_references_are_hidden_where_nothing_checks_requests(
    tiny: Path, on_v2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the server nor a process of its engine, to which the config travels, shows one in its log."""
    original = getattr(SamplingParams.__repr__, shown_params._ORIGINAL, SamplingParams.__repr__)
    params = SamplingParams(extra_args={"sp_advice_prompt": "secret"})
    unchecked = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
    monkeypatch.setattr(SamplingParams, "__repr__", original)
    config = engine_args(tiny, HYBRID, **unchecked).create_engine_config().speculative_config
    assert "secret" not in repr(params)
    sent = pickle.dumps(config)
    monkeypatch.setattr(SamplingParams, "__repr__", original)
    assert "secret" in repr(params)
    arrived = pickle.loads(sent)
    assert "secret" not in repr(params)
    assert arrived.specplus == config.specplus


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose MTP heads have two layers: vLLM runs both of the first, and the first one of the second."""
    folder = tmp_path_factory.mktemp("two")
    return {"glm": make_two_layers(folder / "glm", "glm"), "mimo": make_two_layers(folder / "mimo", "mimo")}


@pytest.mark.parametrize(
    ("kind", "steps", "allowed"),
    [("glm", 2, r"must be 1 or num_speculative_tokens=4"), ("mimo", 2, "must be 1;"), ("mimo", 4, "must be 1;")],
)
def test_several_mtp_layers_on_v2(
    kind: str, steps: int, allowed: str, two_layers: dict[str, Path], on_v2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's speculator for them goes back over as many refused drafts as it makes, and a hybrid refuses more."""
    model, wide = two_layers[kind], HYBRID | {"num_speculative_tokens": 4}
    more = {"num_model_steps": steps} | ({"match_override_len": 3} if steps == 4 else {})
    assert create(model, wide | {"num_model_steps": 1}).num_speculative_tokens == 4
    with pytest.raises(
        SpecPlusConfigError, match=rf"num_model_steps={steps} is not allowed on Model Runner V2.*{allowed}"
    ):
        create(model, wide | more)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert create(model, wide | more).num_speculative_tokens == 4


def test_all_mtp_layers_on_v2(two_layers: dict[str, Path], on_v2: None) -> None:
    config = HYBRID | {"num_speculative_tokens": 4, "num_model_steps": 4, "match_override_len": 3}
    assert create(two_layers["glm"], config).num_speculative_tokens == 4


@pytest.mark.parametrize("method", ["medusa", "custom_class"])
def test_methods_that_vllm_runs_on_v1_alone(method: str, tiny: Path, tmp_path: Path, on_v2: None) -> None:
    model = str(make_medusa(tmp_path / "heads", tiny)) if method == "medusa" else "package.Drafter"
    config = {"method": method, "model": model, "num_speculative_tokens": 2, "verify_strategy": "target_match"}
    vllm_config = engine_args(tiny, config).create_engine_config()
    assert not vllm_config.use_v2_model_runner
    assert not vllm_config.speculative_config.made_for_v2


def test_the_worker_sees_to_it_that_the_runner_was_foreseen(tiny: Path, on_v2: None) -> None:
    worker = SpecPlusWorker.__new__(SpecPlusWorker)
    worker.vllm_config = SimpleNamespace(speculative_config=create(tiny, {"method": "naive"}))
    worker.use_v2_model_runner = True
    assert worker._import_runner_module().__name__ == "vllm_specplus.runners.v2.install"
    worker.use_v2_model_runner = False
    with pytest.raises(compat.SpecPlusCompatError, match=r"vLLM chose Model Runner V1.*set VLLM_USE_V2_MODEL_RUNNER=0"):
        worker._import_runner_module()


@pytest.mark.parametrize(("drafts", "times"), [(True, 1), (False, 0)])
def test_the_first_warm_up_is_forgotten(drafts: bool, times: int) -> None:
    forgotten: list[object] = []

    class VllmsWorker:
        def compile_or_warm_up_model(self) -> str:
            assert not forgotten or self.is_again
            return "times"

    class Worker(SpecPlusWorkerMixin, VllmsWorker):
        is_again = False
        model_runner = "runner"
        _tracker = "tracker" if drafts else None
        _runner_module = SimpleNamespace(forget_warm_up=forgotten.append)

    worker = Worker()
    assert worker.compile_or_warm_up_model() == "times"
    assert forgotten == ["runner"] * times
    # As an engine grows, with requests of its own in the trees.
    worker.is_again = True
    worker.compile_or_warm_up_model()
    assert forgotten == ["runner"] * times


def test_a_stock_config_reaches_vllm_untouched(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(STOCK)
    seen = []

    def spy(self: EngineArgs, model_config: object, parallel_config: object) -> None:
        assert self.speculative_config is given
        seen.append(dict(given))

    monkeypatch.setattr(EngineArgs, "create_speculative_config", spy)
    engine.install()
    args = EngineArgs(model=str(tiny), speculative_config=given)
    args.create_speculative_config(target_model_config=None, target_parallel_config=None)
    assert seen == [STOCK]


def test_engine_args_used_again_are_as_before(tiny: Path) -> None:
    args = engine_args(tiny, dict(HYBRID))
    args.create_engine_config()
    args.speculative_config = None
    args.create_engine_config()
    assert args.async_scheduling is None


def test_another_systems_keys_and_a_flag(tiny: Path) -> None:
    """What is left for vLLM is passed on once, as its own keys."""
    args = engine_args(tiny, {"speculate_method": "mtp"}, spec_tokens=2)
    made = args.create_engine_config().speculative_config
    assert type(made) is SpeculativeConfig
    assert (made.method, made.num_speculative_tokens) == ("mtp", 2)


@pytest.mark.parametrize(("limit", "line"), [(None, "take about"), (77, "=77: "), (-1, "without a limit of tokens")])
def test_limit_of_suffix_trees_is_logged(
    limit: int | None, line: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "machine_memory", lambda: 2**34)
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(setup.logger, level, lambda text, *values: lines.append(text % values))
    keys = {} if limit is None else {"suffix_decoding_max_cached_tokens": limit}
    built = create(tiny, SUFFIX | keys)
    assert built.specplus.suffix_decoding_max_cached_tokens == (2**30 // 640 if limit is None else limit)
    lines = [text for text in lines if text.startswith("suffix_decoding_max_cached_tokens=")]
    assert len(lines) == 1
    assert line in lines[0]


@pytest.mark.parametrize(
    ("parallel", "num_workers"),
    [
        ({"tensor_parallel_size": 2}, 2),
        ({"data_parallel_size": 4}, 4),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, 2),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, 4),
    ],
)
def test_workers_of_a_machine_share_the_limit(
    parallel: dict[str, int], num_workers: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "machine_memory", lambda: 2**34)
    built = engine_args(tiny, SUFFIX, **parallel).create_engine_config().speculative_config
    assert built.specplus.suffix_decoding_max_cached_tokens == 2**30 // num_workers // 640


def test_the_limit_comes_from_the_memory() -> None:
    assert setup.default_cached_tokens(2**34, 4) == 2**28 // 640
    assert setup.machine_memory() > 2**28
