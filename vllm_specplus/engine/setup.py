"""An engine before vLLM builds it: its platform, its model runner, and the rule that verifies its drafts."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from vllm import envs, triton_utils
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_specplus.config import Resolved, SpecPlusOptions
from vllm_specplus.config.errors import show
from vllm_specplus.config.keys import NAIVE
from vllm_specplus.strategies import VerifyStrategy

logger = init_logger("vllm.specplus")

# The methods that vLLM runs on V1 alone; the plugin's own suffix decoding runs on both.
_METHODS_OF_V1 = ("medusa", "custom_class")
# All workers on a machine that are started together give this part of its memory to shared suffix trees.
_MEMORY_SHARE = 16
# Above what docs/limits.md says was measured.
BYTES_PER_CACHED_TOKEN = 640
"""The memory of a token in a shared suffix tree that the default limit reckons with, in bytes."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
WORKERS = {
    "cpu": "vllm_specplus.engine.cpu_worker.SpecPlusCPUWorker",
    "cuda": "vllm_specplus.engine.worker.SpecPlusWorker",
}
"""The plugin's worker for each platform it runs on."""


@dataclass(frozen=True)
class EngineSetup:
    """One engine that is about to be built with plugin keys.

    resolved: the speculative config; its options are not None. device_type: vLLM's name of the platform.
    on_v2: whether vLLM is going to choose Model Runner V2. widths: the numbers of slots that its scheduler chooses
    from, in rising order; empty where it does not choose.
    """

    args: EngineArgs
    resolved: Resolved
    model_config: ModelConfig
    parallel_config: ParallelConfig
    device_type: str
    on_v2: bool
    widths: tuple[int, ...] = ()

    @classmethod
    def read(
        cls, args: EngineArgs, resolved: Resolved, model_config: ModelConfig, parallel_config: ParallelConfig
    ) -> Self:
        """Read the platform, and work out the model runner."""
        on_v2 = _runs_on_v2(args, resolved)
        return cls(args, resolved, model_config, parallel_config, current_platform.device_type, on_v2)

    @property
    def options(self) -> SpecPlusOptions:
        """The options of `resolved`, which are not None here."""
        assert self.resolved.options is not None
        return self.resolved.options


def default_strategy(setup: EngineSetup) -> VerifyStrategy | None:
    """The strategy for an engine whose config names none; None: vLLM's own verification.

    On a CPU, vLLM's rejection sampling on Model Runner V1 reads memory that nothing wrote. So the plugin's lossless
    rule for the drafts takes its place. V2's own verification is right everywhere.
    """
    options = setup.options
    if options.verify_strategy is not None or setup.device_type != "cpu" or setup.on_v2:
        return None
    if not options.num_speculative_tokens:
        return None
    has_sampled_drafts = options.is_hybrid and setup.resolved.vllm.get("draft_sample_method") == "probabilistic"
    return "rejection" if has_sampled_drafts else "target_match"


def with_default_strategy(setup: EngineSetup) -> EngineSetup:
    """The engine with the strategy that it needs where the user named none."""
    strategy = default_strategy(setup)
    if strategy is None:
        return setup
    logger.info(
        "verify_strategy=%s is set, which is lossless: on a CPU vLLM's own rejection sampling reads memory that "
        "nothing wrote, and gives wrong tokens",
        show(strategy),
    )
    options = setup.options.model_copy(update={"verify_strategy": strategy})
    return replace(setup, resolved=replace(setup.resolved, options=options))


def with_cached_token_limit(setup: EngineSetup) -> EngineSetup:
    """The engine with a limit of the tokens in shared suffix trees, by the machine's memory where the user names none.

    A worker of a tensor-parallel group has trees of its own; all of them get the same limit, so they draft the same.
    The data-parallel engines that are started together on this machine share its memory.
    """
    options = setup.options
    if not options.caches_answers:
        return setup
    if options.suffix_decoding_max_cached_tokens == -1:
        logger.warning(
            "suffix_decoding_max_cached_tokens=-1: shared suffix trees grow without a limit of tokens; in each "
            "tensor-parallel worker they take about %d bytes a token, so %.1f GiB for a thousand answers of 4096 "
            "tokens",
            BYTES_PER_CACHED_TOKEN,
            BYTES_PER_CACHED_TOKEN * 1000 * 4096 / 2**30,
        )
        return setup
    limit = options.suffix_decoding_max_cached_tokens
    if limit is None:
        limit = default_cached_tokens(machine_memory(), _drafting_workers_of_machine(setup.parallel_config))
        options = options.model_copy(update={"suffix_decoding_max_cached_tokens": limit})
    logger.info(
        "suffix_decoding_max_cached_tokens=%d: shared suffix trees take about %.2f GiB at most in each "
        "tensor-parallel worker",
        limit,
        limit * BYTES_PER_CACHED_TOKEN / 2**30,
    )
    return replace(setup, resolved=replace(setup.resolved, options=options))


def default_cached_tokens(memory: int, num_workers: int) -> int:
    """The limit of tokens in the shared suffix trees of each of `num_workers` on a machine of `memory` bytes."""
    return max(1, memory // (_MEMORY_SHARE * num_workers * BYTES_PER_CACHED_TOKEN))


def _drafting_workers_of_machine(parallel_config: ParallelConfig) -> int:
    """The workers with suffix trees on this machine; vLLM's local size is 0 where engines are started apart."""
    return parallel_config.tensor_parallel_size * max(parallel_config.data_parallel_size_local, 1)


def machine_memory() -> int:
    """The memory of this machine in bytes, or of its container where that has less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        # No cgroup limits it.
        return memory


def _runs_on_v2(args: EngineArgs, resolved: Resolved) -> bool:
    """Whether vLLM is going to choose Model Runner V2; the worker checks that it did.

    vLLM decides later, from its whole config. That config holds the speculative config, which depends on the runner.
    """
    choice = envs.VLLM_USE_V2_MODEL_RUNNER
    if choice is not None:
        return choice
    needs_v1 = (
        resolved.vllm.get("method") in _METHODS_OF_V1,
        resolved.vllm.get("parallel_drafting"),
        resolved.vllm.get("use_heterogeneous_vocab"),
        args.distributed_executor_backend == "external_launcher" and args.pipeline_parallel_size > 1,
        args.enable_dbo,
    )
    return triton_utils.HAS_TRITON and not any(needs_v1)


def reason_for_synchronous_scheduling(setup: EngineSetup) -> str | None:
    """Why asynchronous scheduling is off where the user leaves it open; None: vLLM decides."""
    options = setup.options
    if options.drafts_from_history and setup.parallel_config.pipeline_parallel_size > 1:
        return None
    if options.drafts_from_history and not setup.on_v2:
        return "drafting needs the complete history on the host"
    if options.matches_suffixes:
        return "suffix trees are on the host and draft more with every token there"
    if options.method == NAIVE and options.num_speculative_tokens:
        return "requests without a reference draft nothing, and their slots would be run"
    return None
