"""vLLM's schedulers, with what the plugin adds.

One chooses how many slots the next step has, by what earlier ones brought. Each may tell the workers the requests'
salts.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.engine.salts import salting
from vllm_specplus.engine.scheduler_faults import FaultsMixin
from vllm_specplus.proposers.draft_widths import DraftWidths, Plan
from vllm_specplus.runners.step_prices import has_no_prompts

logger = init_logger("vllm.specplus")

_MAX_STEPS = 64  # more than vLLM ever has under way


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """Build the scheduler of an engine whose config names draft widths; arguments are those of vLLM's schedulers.

    vLLM may have turned asynchronous scheduling off after that config was made. Then its own scheduler runs, without
    the widths: drafts are cut by their value.
    """
    if vllm_config.scheduler_config.async_scheduling:
        return _build(WidthScheduler, vllm_config, **kwargs)
    logger.info("slots for drafts in a step: one for each draft that is worth it, since scheduling is synchronous")
    scheduler = _build(Scheduler, vllm_config, **kwargs)
    scheduler.dynamic_sd_lookup = None
    return scheduler


def make_salting_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """Build vLLM's own scheduler, which also tells the workers the requests' salts; arguments are those of vLLM's."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return _build(AsyncScheduler if is_async else Scheduler, vllm_config, **kwargs)


def _build(scheduler: type[Scheduler], vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    options: SpecPlusOptions = vllm_config.speculative_config.specplus
    return (salting(scheduler) if options.needs_salts else scheduler)(vllm_config=vllm_config, **kwargs)


class WidthScheduler(FaultsMixin, AsyncScheduler):
    """Sets vLLM's table of widths by batch size anew before each step."""

    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._chooser: WidthChooser | None = None
        if self.dynamic_sd_lookup is None:
            logger.info("slots for drafts in a step: always all, since vLLM has dropped the other widths")
            return
        widths = sorted(set(self.dynamic_sd_lookup[1:]))
        shown = ", ".join(map(str, widths))
        logger.info("slots for drafts in a step: %s, whichever the accepted drafts pay for", shown)
        self._tables = {width: [width] * len(self.dynamic_sd_lookup) for width in widths}
        self.dynamic_sd_lookup = self._tables[widths[-1]]
        self._chooser = WidthChooser(widths)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Choose the width of the next step, then schedule as vLLM does; returns vLLM's ``SchedulerOutput``."""
        self._ask(self._choose)
        output = super().schedule(*args, **kwargs)
        self._ask(lambda chooser: chooser.note_step(output))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Note what a step's slots brought, then update as vLLM does."""
        self._ask(lambda chooser: chooser.note_output(scheduler_output, model_runner_output, self.requests))
        return super().update_from_output(scheduler_output, model_runner_output)

    def _choose(self, chooser: "WidthChooser") -> None:
        self.dynamic_sd_lookup = self._tables[chooser.choose(self.running)]

    def _ask(self, question: Callable[["WidthChooser"], None]) -> None:
        """Ask the chooser, if there is one; an error of it ends the choice, and nothing else."""
        if self._chooser is None:
            return
        with self._faults.caught("scheduling"):
            question(self._chooser)
            return
        self._chooser, self.dynamic_sd_lookup = None, self._tables[max(self._tables)]


class WidthChooser:
    """Follows a scheduler's steps, so that `DraftWidths` learns what their slots brought and cost.

    A width is chosen when a step is scheduled. In that step the drafts are made, and in the next one verified.

    Args:
        widths: the widths to choose from, in rising order.
    """

    def __init__(self, widths: list[int]) -> None:
        self.draft_widths = DraftWidths(widths)
        self._plan = self._next_plan = Plan(widths[-1])
        # Of steps under way: vLLM's output, the plan of their slots, and when they were scheduled.
        self._steps: deque[tuple[Any, Plan, float]] = deque(maxlen=_MAX_STEPS)
        self._last_end = 0.0

    def choose(self, running: list[Any]) -> int:
        """The width of the step after the one that is about to be scheduled; takes vLLM's running requests."""
        req_ids = [request.request_id for request in running if not request.is_prefill_chunk]
        self._next_plan = self.draft_widths.choose(req_ids)
        return self._next_plan.width

    def note_step(self, output: Any) -> None:
        """Take note of a step that was scheduled; takes vLLM's ``SchedulerOutput``."""
        self.draft_widths.end(output.finished_req_ids)
        # vLLM runs no step without tokens, but reports it too.
        if output.total_num_scheduled_tokens:
            self._steps.append((output, self._plan, time.perf_counter()))
            self._plan = self._next_plan

    def note_output(self, output: Any, result: Any, requests: dict[str, Any]) -> None:
        """Learn from a step that has ended.

        Args:
            output: the ``SchedulerOutput`` of the step.
            result: its ``ModelRunnerOutput``.
            requests: vLLM's requests by id; those that have ended meanwhile are left out.
        """
        if not output.total_num_scheduled_tokens:
            return
        now = time.perf_counter()
        while self._steps:
            noted, plan, begin = self._steps.popleft()
            if noted is output:
                break
        else:
            return
        # A step begins when the one before has ended, or when it was scheduled, if that was later.
        seconds, self._last_end = now - max(begin, self._last_end), now
        drafts = output.scheduled_spec_decode_tokens
        if has_no_prompts(output):
            num_reqs = len(output.num_scheduled_tokens)
            self.draft_widths.add_step(output.total_num_scheduled_tokens, num_reqs, seconds)
        sampled = result.sampled_token_ids
        if not sampled:
            return
        for req_id, slots in drafts.items():
            request = requests.get(req_id)
            if request is None or request.is_finished() or not slots:
                continue
            num_tokens = len(sampled[result.req_id_to_index[req_id]])
            # A step without a token was discarded.
            if num_tokens:
                self.draft_widths.add_result(req_id, len(slots), min(num_tokens - 1, len(slots)), plan)
