"""Times a worker's steps, and turns the times into the prices that the arbiter works with."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.distributed.parallel_state import get_tp_group

from vllm_specplus.proposers.arbiter import Prices
from vllm_specplus.proposers.costs import CostMeter, Pace
from vllm_specplus.runners.faults import Faults

_PERIOD = 8  # drafting steps between two looks at the clock's results
_LEAST_CHANGE = 1.25  # times as many requests, or as few: the prices of another batch are no use
_MOST_POSTPONED = 3 * _PERIOD  # more than between two prices, where each step drafts
_MOST_IN_PASSES = 0.9  # of a step's time: the usual time of its passes may be more than they took


def has_no_prompts(scheduler_output: Any) -> bool:
    """Whether all requests of a step decode; takes vLLM's ``SchedulerOutput``."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if scheduler_output.scheduled_new_reqs:
        return False
    for req_id, count in scheduler_output.num_scheduled_tokens.items():
        if count > 1 and count > 1 + len(drafts.get(req_id, ())):
            return False
    return True


class StepPrices:
    """Prices from the times of this worker's steps; all workers of a tensor-parallel group use those of the first.

    A step's time runs from its begin to the next one's, so it has the scheduler's part too. Steps with prompts are not
    counted, nor those after which the worker waited for a request.

    Args:
        faults: of the worker.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._meter, self._pace = CostMeter(), Pace()
        self._group = get_tp_group()
        self._began = 0.0
        self._num_scheduled = 0  # tokens of the step that runs; 0: it is not counted
        self._num_emitted = 0
        self._passes_time = 0.0
        self._usual_passes: dict[tuple[int, int], float] = {}  # by passes and requests, kept until the next prices
        self._num_reqs = 0  # of the step that runs
        self._prompts_time = 0.0  # of passes over prompts, for each request that waited; since the last prices
        self._num_steps = 0
        self._priced_reqs = 1  # of the batch that the prices are for
        self._prices = self._pace.prices(self._meter.costs(1), 1)
        self._postponed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def is_counted(self) -> bool:
        """Whether the time of this step counts: it has no prompts."""
        return self._num_scheduled > 0

    @property
    def num_reqs(self) -> int:
        """Requests of the step that runs."""
        return self._num_reqs

    def begin_step(self, scheduler_output: Any) -> None:
        """Enter the time of the step before, and start the clock for the next one.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput``.
        """
        now = time.perf_counter()
        goes_on = scheduler_output.scheduled_cached_reqs.num_reqs > 0
        if self._num_scheduled and self._num_emitted and goes_on:
            num_drafts = self._num_scheduled - self._num_reqs
            self._postpone(
                self._enter_step, num_drafts, self._num_reqs, self._num_emitted, now - self._began, self._passes_time
            )
        if scheduler_output.scheduled_new_reqs:
            self._postpone(self._pace.begin_request, len(scheduler_output.num_scheduled_tokens))
        self._num_scheduled, self._num_reqs = 0, len(scheduler_output.num_scheduled_tokens)
        if has_no_prompts(scheduler_output):
            self._num_scheduled = scheduler_output.total_num_scheduled_tokens
        self._began, self._passes_time, self._num_emitted = now, 0.0, 0

    def add_tokens(self, num_tokens: int) -> None:
        """Count the tokens that all requests together got in this step."""
        self._num_emitted += num_tokens

    def add_passes(self, num_passes: int, seconds: float) -> None:
        """Count the draft model's passes of this step, and their time."""
        self._passes_time += seconds
        self.add_past_passes(num_passes, seconds, self._num_reqs, is_counted=self.is_counted)

    def expect_passes(self, num_passes: int) -> None:
        """Count the usual time of some passes as that of this step's, which is not known yet."""
        usual = self._usual_passes.get((num_passes, self._num_reqs), 0.0)
        if not usual:
            self._catch_up()
            usual = self._meter.passes_time(num_passes, self._num_reqs)
            self._usual_passes[num_passes, self._num_reqs] = usual
        self._passes_time += usual

    def add_past_passes(self, num_passes: int, seconds: float, num_reqs: int, *, is_counted: bool) -> None:
        """Learn from the passes of an earlier step of `num_reqs` requests, and their time.

        In a step that is not counted they have prompts. The arbiter charges the usual time of passes in each step.
        """
        if is_counted:
            self._postpone(self._meter.add_passes, num_passes, num_reqs, seconds)
        else:
            self._postpone(self._enter_prompt_passes, num_passes, num_reqs, seconds)

    def agree(self, num_reqs: int) -> Prices:
        """The prices for this step's drafts; each worker of a group has to ask in each step that drafts.

        After a fault they are those of the step before, without its charge for passes over prompts.
        """
        num_reqs = max(num_reqs, 1)
        fewer, more = sorted((num_reqs, self._priced_reqs))
        if self._num_steps % _PERIOD == 0 or more >= _LEAST_CHANGE * fewer:
            self._priced_reqs = num_reqs
            # All workers wait for the first one's prices, so it has to send some. None of them may charge twice.
            prices = replace(self._prices, prompt_passes=0.0)
            with self._faults.caught("counting"):
                prices = self._own_prices(num_reqs)
            self._prices = prices
            if self._group.world_size > 1:
                self._prices = self._group.broadcast_object(self._prices)
        self._num_steps += 1
        return self._prices

    def _own_prices(self, num_reqs: int) -> Prices:
        """The prices by this worker's clock."""
        self._catch_up()
        self._usual_passes.clear()
        costs = self._meter.costs(num_reqs)
        prices = self._pace.prices(costs, num_reqs)
        if self._meter.has_steps:
            prices = replace(prices, prompt_passes=self._prompts_time / costs.step)
            self._prompts_time = 0.0
        return prices

    def _enter_step(self, num_drafts: int, num_reqs: int, num_emitted: int, seconds: float, passes_time: float) -> None:
        in_passes = min(passes_time, _MOST_IN_PASSES * seconds)
        counted = self._meter.add_step(num_drafts, num_reqs, seconds - in_passes)
        self._pace.add(num_emitted / num_reqs, (counted + in_passes) / self._meter.step_time(num_reqs))

    def _enter_prompt_passes(self, num_passes: int, num_reqs: int, seconds: float) -> None:
        self._prompts_time += self._meter.add_prompt_passes(num_passes, num_reqs, seconds)

    def _postpone(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function later, after those before it: what a step's time tells is read with the next prices.

        Several calls in a row take about as long as one among the work of a step, as only the first finds cold caches.
        """
        self._postponed.append((function, arguments))
        if len(self._postponed) >= _MOST_POSTPONED:
            self._catch_up()

    def _catch_up(self) -> None:
        # A call that fails is not made again.
        postponed, self._postponed = self._postponed, []
        for function, arguments in postponed:
            function(*arguments)
