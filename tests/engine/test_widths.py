"""Which engines choose the number of slots of each step, and what vLLM is shown for that."""

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode, SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from vllm_specplus.config import resolve
from vllm_specplus.engine import build, widths
from vllm_specplus.engine.setup import EngineSetup
from vllm_specplus.runners.v2.speculator import HybridMixin
from vllm_specplus.testing.tiny_model import make_random

HYBRID = {"method": "mtp", "num_speculative_tokens": 12, "mtp_strategy": "with_ngram", "num_model_steps": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 12, "max_ngram_size": 4, "adaptive": True}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": -1, "adaptive": True}
ALL = [0, 1, 2, 4, 8, 12]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def on_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM chooses Model Runner V2."""
    for module in ("vllm.triton_utils", "vllm.config.vllm"):
        monkeypatch.setattr(f"{module}.HAS_TRITON", True)


def engine_args(model: Path, config: dict[str, object], **more: Any) -> EngineArgs:
    defaults = {"max_model_len": 256, "enforce_eager": True, "async_scheduling": True}
    return EngineArgs(model=str(model), speculative_config=dict(config), **defaults | more)


def read(config: dict[str, object], **changes: Any) -> EngineSetup:
    """An engine on a GPU."""
    parallel = {"data_parallel_size": 1, "pipeline_parallel_size": 1} | changes.pop("parallel", {})
    device_type, is_on_v2 = changes.pop("device_type", "cuda"), changes.pop("on_v2", True)
    defaults = {"async_scheduling": None, "scheduler_cls": None, "max_num_seqs": None, "enable_lora": False}
    defaults |= {"distributed_executor_backend": None}
    defaults |= {"enforce_eager": False, "optimization_level": 2, "attention_backend": None}
    args = SimpleNamespace(**defaults | changes)
    args.compilation_config = SimpleNamespace(cudagraph_mode=changes.get("cudagraph_mode"))
    args.attention_config = SimpleNamespace(backend=None)
    return EngineSetup(args, resolve(config), None, SimpleNamespace(**parallel), device_type, is_on_v2)  # type: ignore[arg-type]


def shown(speculative_config: SpeculativeConfig, max_num_seqs: int) -> list[int]:
    """The widths that vLLM captures graphs for, and its scheduler knows."""
    return sorted(
        set(
            build_dynamic_sd_schedule_lookup(
                speculative_config.num_speculative_tokens_per_batch_size,
                vllm_max_batch_size=max_num_seqs,
                vllm_num_speculative_tokens=speculative_config.num_speculative_tokens,
            )[1:]
        )
    )


@pytest.mark.parametrize("config", [HYBRID, NGRAM], ids=["hybrid", "ngram"])
def test_vllm_is_shown_each_width(config: dict[str, object], tiny: Path) -> None:
    args = engine_args(tiny, config)
    made = args.create_engine_config()
    assert args.scheduler_cls == made.scheduler_config.scheduler_cls == widths.SCHEDULER
    assert shown(made.speculative_config, made.scheduler_config.max_num_seqs) == ALL
    # The arguments are used again for an engine that does not draft by value.
    args.speculative_config = config | {"adaptive": False}
    made = args.create_engine_config()
    assert made.scheduler_config.scheduler_cls is None
    assert not made.speculative_config.uses_dynamic_speculative_decoding()


def test_a_stock_config_has_vllms_scheduler(tiny: Path) -> None:
    made = engine_args(tiny, {"method": "mtp", "num_speculative_tokens": 4}).create_engine_config()
    assert made.scheduler_config.scheduler_cls is None
    assert not made.speculative_config.uses_dynamic_speculative_decoding()


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"), [(2, [0, 12]), (3, [0, 1, 12]), (4, [0, 1, 4, 12]), (6, ALL), (900, ALL)]
)
def test_small_batches_have_fewer_widths(max_num_seqs: int, expected: list[int], tiny: Path) -> None:
    made = engine_args(tiny, HYBRID, max_num_seqs=max_num_seqs).create_engine_config()
    assert shown(made.speculative_config, max_num_seqs) == expected


def test_large_batches_have_graphs_of_every_width(tiny: Path) -> None:
    """vLLM captures the graphs of a width up to the largest batch size that has it."""
    schedule = engine_args(tiny, HYBRID).create_engine_config().speculative_config.num_speculative_tokens_per_batch_size
    for max_num_seqs in (6, 64, 1000):
        largest = {width: start for start, _, width in schedule if start <= max_num_seqs}
        assert set(largest) == set(ALL)
        assert min(largest.values()) > max_num_seqs - len(ALL)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (HYBRID, {"scheduler_cls": "mine.Scheduler"}, "scheduler_cls='mine.Scheduler' chooses"),
        (HYBRID, {"parallel": {"data_parallel_size": 2}}, "data_parallel_size=2"),
        (HYBRID, {"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2"),
        (HYBRID, {"distributed_executor_backend": "external_launcher"}, "a clock of its own"),
        (HYBRID, {"max_num_seqs": 1}, "max_num_seqs=1"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 4, 2]]}, {}, "by the batch size"),
    ],
    ids=["scheduler", "data", "pipeline", "launcher", "one", "schedule"],
)
def test_where_the_width_is_fixed_one_line_says_why(
    config: dict[str, object], changes: dict[str, Any], words: str, log: pytest.LogCaptureFixture
) -> None:
    engine = read(config, **changes)
    assert widths.with_chosen_widths(engine) is engine
    build.set_scheduler(engine)
    assert engine.args.scheduler_cls == changes.get("scheduler_cls")
    (line,) = [line for line in log.messages if "slots for drafts" in line]
    assert line.startswith("slots for drafts in a step: always 12, since ")
    assert words in line


ON_THE_DEVICE = HYBRID | {"enable_adaptive_verification": True}


def test_adaptive_verification_chooses_by_itself(log: pytest.LogCaptureFixture) -> None:
    engine = widths.with_chosen_widths(widths.with_possible_adaptive_verification(read(ON_THE_DEVICE)))
    assert engine.resolved.vllm["enable_adaptive_verification"]
    assert not engine.widths
    (line,) = [line for line in log.messages if "slots for drafts" in line or "adaptive_verification" in line]
    assert line.endswith("always 12, since enable_adaptive_verification=true trims them on the device")


def test_a_key_that_turns_asynchronous_scheduling_off_turns_adaptive_verification_off(
    log: pytest.LogCaptureFixture,
) -> None:
    engine = widths.with_possible_adaptive_verification(read(ON_THE_DEVICE | {"disable_padded_drafter_batch": True}))
    assert "enable_adaptive_verification" not in engine.resolved.vllm
    (line,) = log.messages
    assert "not in force, since scheduling is synchronous" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2"),
        ({"enforce_eager": True}, "needs full CUDA graphs"),
        ({"optimization_level": 1}, "needs full CUDA graphs"),
        ({"cudagraph_mode": CUDAGraphMode.PIECEWISE}, "needs full CUDA graphs"),
        ({"attention_backend": "FLASHINFER"}, "attention backend FLASHINFER"),
        ({"device_type": "cpu"}, "needs full CUDA graphs"),
        ({"on_v2": False}, "Model Runner V1"),
        ({"async_scheduling": False}, "scheduling is synchronous"),
    ],
)
def test_where_adaptive_verification_cannot_run_one_line_says_why(
    changes: dict[str, Any], words: str, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its module needs a package that only GPUs have.
    plans_on_host = SimpleNamespace(supports_device_cpu_query_lens_mismatch=lambda: False)
    monkeypatch.setattr(AttentionBackendEnum, "get_class", lambda backend: plans_on_host)
    engine = widths.with_possible_adaptive_verification(read(ON_THE_DEVICE, **changes))
    assert "enable_adaptive_verification" not in engine.resolved.vllm
    (line,) = log.messages
    assert line.startswith("enable_adaptive_verification=true is not in force, since ")
    assert words in line
    # What else can be done is done.
    chosen = widths.with_chosen_widths(engine)
    assert bool(chosen.widths) == (not changes.keys() & {"parallel", "device_type", "on_v2", "async_scheduling"})


@pytest.mark.parametrize(
    ("scope", "changes", "expected"),
    [
        ("salt", {}, build.SALTING_SCHEDULER),
        ("request", {}, None),
        ("shared", {}, None),
        ("salt", {"async_scheduling": True}, widths.SCHEDULER),
        ("salt", {"on_v2": False}, build.SALTING_SCHEDULER),
        ("request", {"scheduler_cls": "mine.Scheduler"}, "mine.Scheduler"),
    ],
)
def test_which_scheduler_tells_salts(scope: str, changes: dict[str, Any], expected: str | None) -> None:
    engine = widths.with_chosen_widths(read(SUFFIX | {"suffix_decoding_scope": scope}, **changes))
    build.set_scheduler(engine)
    assert engine.args.scheduler_cls == expected


def test_where_nobody_tells_salts_one_line_says_what_follows(log: pytest.LogCaptureFixture) -> None:
    engine = read(SUFFIX, scheduler_cls="mine.Scheduler")
    build.set_scheduler(engine)
    assert engine.args.scheduler_cls == "mine.Scheduler"
    (line,) = log.messages
    assert line.startswith("suffix trees are not shared between requests: scheduler_cls='mine.Scheduler'")


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (HYBRID, {}, ALL),
        (NGRAM, {}, ALL),
        (HYBRID, {"async_scheduling": True}, ALL),
        (HYBRID, {"async_scheduling": False}, []),
        (HYBRID | {"disable_padded_drafter_batch": True}, {}, []),
        (HYBRID | {"adaptive": False}, {}, []),
        (HYBRID | {"match_override_len": 4}, {}, []),
        # Suffix trees turn asynchronous scheduling off unless it is asked for.
        (SUFFIX, {}, []),
        (SUFFIX, {"async_scheduling": True}, [0, 1, 2, 4]),
    ],
)
def test_only_asynchronous_adaptive_engines_choose(
    config: dict[str, object], changes: dict[str, Any], expected: list[int], log: pytest.LogCaptureFixture
) -> None:
    engine = read(config, **changes)
    chosen = widths.with_chosen_widths(engine)
    assert list(chosen.widths) == expected
    build.set_scheduler(chosen)
    others = build.SALTING_SCHEDULER if config is SUFFIX else None
    assert engine.args.scheduler_cls == (widths.SCHEDULER if expected else others)
    # The scheduler tells its widths when it begins.
    adapts = engine.options.adaptive
    only_drafts = "slots for drafts in a step: one for each draft that is worth it, since scheduling is synchronous"
    assert log.messages == [only_drafts] * (adapts and not expected)
    v1 = dataclasses.replace(engine, on_v2=False)
    log.clear()
    assert widths.with_chosen_widths(v1) is v1
    assert log.messages == [only_drafts] * adapts


def test_the_hybrids_first_draft_has_graphs_of_every_width(tiny: Path) -> None:
    """Its graphs run over the target's batch, whatever the draft model's passes are."""
    config = engine_args(tiny, HYBRID).create_engine_config().speculative_config
    made: list[SpeculatorCudaGraphManager] = []

    class Speculator:
        draft_logits = None
        # As a hybrid shows it to vLLM's speculator.
        vllm_config = SimpleNamespace(speculative_config=config, num_speculative_tokens=2)
        num_speculative_steps = 2

        def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
            manager = SpeculatorCudaGraphManager.__new__(SpeculatorCudaGraphManager)
            manager.vllm_config = self.vllm_config
            manager.compilation_config = SimpleNamespace(
                cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24, 32, 40, 48, 56], max_cudagraph_capture_size=64
            )
            manager.cudagraph_mode, manager.varlen_decode, manager.ubatch_runner = cudagraph_mode, False, None
            manager.max_num_reqs, manager.decode_query_len = 8, self.num_speculative_steps + 1
            manager.lora_capture_cases, manager._capture_descs, manager._candidates = [0], {}, {}
            manager._init_candidates()
            made.append(manager)

    class Hybrid(HybridMixin, Speculator):
        pass

    hybrid = Hybrid()
    of_slots = SimpleNamespace(speculative_config=config, num_speculative_tokens=12)
    hybrid.set_drafting(SimpleNamespace(width=12, confidences=None), of_slots, writes_one_hot=False)
    hybrid.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    (manager,) = made
    captured = {desc.uniform_token_count for desc in manager._capture_descs[CUDAGraphMode.FULL]}
    assert captured == {width + 1 for width in ALL}


def test_vllm_does_not_warn_of_the_plugins_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    vllm_logger = logging.getLogger(SchedulerConfig.__module__)
    vllm_logger.addHandler(caplog.handler)
    try:
        vllm_logger.warning("Using custom scheduler class %s.", widths.SCHEDULER)
        vllm_logger.warning("Using custom scheduler class %s.", "mine.Scheduler")
    finally:
        vllm_logger.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"Using custom scheduler class mine.Scheduler."}
