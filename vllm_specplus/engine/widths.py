"""Whether an engine chooses how many slots each step has, and what vLLM is shown for that.

On Model Runner V2 with asynchronous scheduling every scheduled slot is verified, filled or not. So the scheduler
chooses one of a few widths for each step (`scheduler.py`). vLLM captures full CUDA graphs for the widths that its
schedule by batch size names, so the config names them there.

With `enable_adaptive_verification` vLLM trims the scheduled slots on the device instead, by the chance of each draft.
"""

from dataclasses import replace

from vllm.config.attention import AttentionConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.engine.setup import EngineSetup, reason_for_synchronous_scheduling
from vllm_specplus.engine.speculative_config import SCHEDULE_KEY
from vllm_specplus.proposers.draft_widths import make_widths

logger = init_logger("vllm.specplus")

SCHEDULER = "vllm_specplus.engine.scheduler.make_scheduler"
_MAX_WIDTHS = 6  # each has graphs of its own
ADAPTIVE_VERIFICATION_KEY = "enable_adaptive_verification"
_LEAST_LEVEL_WITH_FULL_GRAPHS = 2


def with_possible_adaptive_verification(setup: EngineSetup) -> EngineSetup:
    """The engine without vLLM's adaptive verification where it is asked for and cannot run."""
    vllm_keys = setup.resolved.vllm
    if not vllm_keys.get(ADAPTIVE_VERIFICATION_KEY):
        return setup
    reason = reason_against_adaptive_verification(setup)
    if reason is None:
        return setup
    logger.warning("%s=true is not in force, since %s", ADAPTIVE_VERIFICATION_KEY, reason)
    others = {key: value for key, value in vllm_keys.items() if key != ADAPTIVE_VERIFICATION_KEY}
    return replace(setup, resolved=replace(setup.resolved, vllm=others))


def reason_against_adaptive_verification(setup: EngineSetup) -> str | None:
    """Why vLLM cannot trim the drafts of this engine on the device, as far as can be foreseen; None: it can."""
    args = setup.args
    if not setup.on_v2:
        return "Model Runner V1 schedules no slot that holds no draft"
    if args.enable_lora:
        return "it does not work with LoRA"
    if setup.parallel_config.pipeline_parallel_size > 1:
        return f"it does not work with pipeline_parallel_size={setup.parallel_config.pipeline_parallel_size}"
    if setup.device_type == "cpu" or args.enforce_eager or not _has_full_graphs(args):
        return "it needs full CUDA graphs"
    if not _is_asynchronous(setup):
        return "scheduling is synchronous, and has slots for drafts that are worth it alone"
    backend = AttentionConfig.validate_backend_before(args.attention_backend) or args.attention_config.backend
    if backend is not None and not backend.get_class().supports_device_cpu_query_lens_mismatch():
        return f"attention backend {backend.name} cannot run it"
    return None


def _has_full_graphs(args: EngineArgs) -> bool:
    mode = args.compilation_config.cudagraph_mode
    if mode is None:
        return args.optimization_level >= _LEAST_LEVEL_WITH_FULL_GRAPHS
    return mode.has_full_cudagraphs()


def with_chosen_widths(setup: EngineSetup) -> EngineSetup:
    """The engine with the widths that its scheduler chooses from, where it may choose."""
    if not _adapts(setup.options):
        return setup
    if not _is_asynchronous(setup):
        logger.info("slots for drafts in a step: one for each draft that is worth it, since scheduling is synchronous")
        return setup
    reason = reason_for_fixed_width(setup)
    if reason is not None:
        logger.info("slots for drafts in a step: always %d, since %s", setup.options.num_speculative_tokens, reason)
        return setup
    room = _MAX_WIDTHS if setup.args.max_num_seqs is None else min(_MAX_WIDTHS, setup.args.max_num_seqs)
    return replace(setup, widths=tuple(make_widths(setup.options.num_speculative_tokens, room)))


def reason_for_fixed_width(setup: EngineSetup) -> str | None:
    """Why all steps of an adaptive engine with asynchronous scheduling have one width; None: its scheduler chooses."""
    args, vllm_keys, parallel = setup.args, setup.resolved.vllm, setup.parallel_config
    if args.scheduler_cls not in (None, SCHEDULER):
        return f"scheduler_cls={args.scheduler_cls!r} chooses them"
    if vllm_keys.get(SCHEDULE_KEY):
        return f"{SCHEDULE_KEY} sets them by the batch size"
    if vllm_keys.get(ADAPTIVE_VERIFICATION_KEY):
        return f"{ADAPTIVE_VERIFICATION_KEY}=true trims them on the device"
    if parallel.data_parallel_size > 1:
        return f"with data_parallel_size={parallel.data_parallel_size} vLLM wants the same number on all ranks"
    if parallel.pipeline_parallel_size > 1:
        return f"with pipeline_parallel_size={parallel.pipeline_parallel_size} results come too late to choose by"
    if args.distributed_executor_backend == "external_launcher":
        return "with external_launcher each rank has a scheduler and a clock of its own"
    if args.max_num_seqs == 1:
        return "with max_num_seqs=1 vLLM captures CUDA graphs for one number only"
    return None


def _adapts(options: SpecPlusOptions) -> bool:
    """Whether drafts are chosen by what they earn."""
    return options.adaptive and options.drafts_from_history and bool(options.num_speculative_tokens)


def _is_asynchronous(setup: EngineSetup) -> bool:
    """Whether vLLM is going to schedule asynchronously on V2, as far as can be foreseen."""
    if not setup.on_v2:
        return False
    if setup.args.async_scheduling is None:
        # vLLM turns it off for that key.
        is_off = setup.resolved.vllm.get("disable_padded_drafter_batch", False)
        return setup.device_type != "cpu" and not is_off and reason_for_synchronous_scheduling(setup) is None
    return setup.args.async_scheduling
