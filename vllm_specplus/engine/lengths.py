"""Whether an engine chooses how many slots each step has, and what vLLM is shown for that.

On Model Runner V2 with asynchronous scheduling every scheduled slot is verified, filled or not. So the scheduler
chooses one of a few lengths for each step (`scheduler.py`). vLLM captures full CUDA graphs for the lengths that its
schedule by batch size names, so the config names them there.
"""

from dataclasses import replace

from vllm.logger import init_logger

from vllm_specplus.engine.setup import EngineSetup, reason_for_synchronous_scheduling
from vllm_specplus.engine.speculative_config import SCHEDULE_KEY
from vllm_specplus.proposers.draft_lengths import make_lengths

logger = init_logger("vllm.specplus")

SCHEDULER = "vllm_specplus.engine.scheduler.make_scheduler"
_MAX_LENGTHS = 6  # each has graphs of its own


def with_chosen_lengths(setup: EngineSetup) -> EngineSetup:
    """The engine with the lengths that its scheduler chooses from, where it may choose; that scheduler is set too."""
    if not _adapts_asynchronously(setup):
        return setup
    reason = reason_for_fixed_length(setup)
    if reason is not None:
        logger.info("slots for drafts in a step: always %d, since %s", setup.options.num_speculative_tokens, reason)
        return setup
    setup.args.scheduler_cls = SCHEDULER
    room = _MAX_LENGTHS if setup.args.max_num_seqs is None else min(_MAX_LENGTHS, setup.args.max_num_seqs)
    return replace(setup, lengths=tuple(make_lengths(setup.options.num_speculative_tokens, room)))


def reason_for_fixed_length(setup: EngineSetup) -> str | None:
    """Why all steps of an adaptive engine with asynchronous scheduling have one length; None: its scheduler chooses."""
    args, vllm_keys, parallel = setup.args, setup.resolved.vllm, setup.parallel_config
    if args.scheduler_cls not in (None, SCHEDULER):
        return f"scheduler_cls={args.scheduler_cls!r} chooses them"
    if vllm_keys.get(SCHEDULE_KEY):
        return f"{SCHEDULE_KEY} sets them by the batch size"
    if vllm_keys.get("enable_adaptive_verification"):
        return "enable_adaptive_verification=true trims them"
    if parallel.data_parallel_size > 1:
        return f"with data_parallel_size={parallel.data_parallel_size} vLLM wants the same number on all ranks"
    if parallel.pipeline_parallel_size > 1:
        return f"with pipeline_parallel_size={parallel.pipeline_parallel_size} results come too late to choose by"
    if args.max_num_seqs == 1:
        return "with max_num_seqs=1 vLLM captures CUDA graphs for one number only"
    return None


def _adapts_asynchronously(setup: EngineSetup) -> bool:
    """Whether vLLM is going to schedule adaptive drafts asynchronously on V2, as far as can be foreseen."""
    options = setup.options
    if not (setup.on_v2 and options.adaptive and options.drafts_from_history and options.num_speculative_tokens):
        return False
    if setup.args.async_scheduling is None:
        return setup.device_type != "cpu" and reason_for_synchronous_scheduling(setup) is None
    return setup.args.async_scheduling
