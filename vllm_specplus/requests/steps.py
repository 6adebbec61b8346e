"""Counts the steps of single requests where vLLM hands their tokens to clients: for `aux_info` where vLLM drafts.

vLLM's output processor gets one message for each request and step. Two of its methods are wrapped when the first
request asks, and stay wrapped. Requests that do not ask cost one look into a dict.
"""

import functools
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine.output_processor import OutputProcessor

from vllm_specplus.requests.faults import request_faults
from vllm_specplus.requests.options import HANDOVER_ENTRY

_ORIGINAL = "specplus_original"


@dataclass
class Steps:
    """The steps of one client's request, which may have several choices and prompts.

    name: vLLM's name of the answer that is to have `aux_info`; None where the middleware adds it.
    """

    name: str | None = None
    num_steps: int = 0
    arrival: float = field(default_factory=time.perf_counter)

    def aux_info(self, num_tokens: int) -> dict[str, Any]:
        """RTP-LLM's fields for an answer of `num_tokens` tokens; `cost_time` is in milliseconds."""
        return {
            "iter_count": self.num_steps,
            "output_len": num_tokens,
            "avg_tokens_per_iter": num_tokens / self.num_steps if self.num_steps else 0.0,
            "cost_time": (time.perf_counter() - self.arrival) * 1000,
        }


class StepCounter:
    """The steps of the requests that ask for them, in this process."""

    def __init__(self) -> None:
        # By the middleware's key, and by vLLM's internal request id.
        self._by_key: dict[str, Steps] = {}
        self._by_request: dict[str, Steps] = {}

    def __len__(self) -> int:
        return len(self._by_key) + len(self._by_request)

    def watch(self, key: str) -> Steps:
        """Count the steps of the requests that bring this key."""
        self.install()
        return self._by_key.setdefault(key, Steps())

    def forget(self, key: str) -> None:
        """Count no longer for this key."""
        gone = self._by_key.pop(key, None)
        self._by_request = {name: steps for name, steps in self._by_request.items() if steps is not gone}

    def install(self) -> None:
        """Wrap vLLM's output processor; a second call changes nothing."""
        if hasattr(OutputProcessor.add_request, _ORIGINAL):
            return
        add_request, process_outputs = OutputProcessor.add_request, OutputProcessor.process_outputs

        @functools.wraps(add_request)
        def noting_add_request(
            processor: Any, request: Any, prompt: Any, parent_req: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            with self._caught():
                self._begin(request, (parent_req or request).external_req_id)
            add_request(processor, request, prompt, parent_req, *args, **kwargs)

        @functools.wraps(process_outputs)
        def counting_process_outputs(processor: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._by_request:
                return process_outputs(processor, engine_core_outputs, *args, **kwargs)
            by_name: dict[str | None, Steps] = {}
            with self._caught():
                by_name = self._count(engine_core_outputs)
            result = process_outputs(processor, engine_core_outputs, *args, **kwargs)
            with self._caught():
                self._add_aux_info(by_name, result.request_outputs)
                for name in [name for name in self._by_request if name not in processor.request_states]:
                    del self._by_request[name]
            return result

        setattr(noting_add_request, _ORIGINAL, add_request)
        OutputProcessor.add_request = noting_add_request
        OutputProcessor.process_outputs = counting_process_outputs

    @staticmethod
    def _caught() -> AbstractContextManager[None]:
        """Catch an exception of the block. vLLM would take it for the engine's death."""
        return request_faults.caught("counting steps", "counts are incomplete")

    def _begin(self, request: Any, name: str) -> None:
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        key = extra.get(HANDOVER_ENTRY)
        # A client may write anything there.
        steps = self._by_key.get(key) if isinstance(key, str) else None
        if steps is None and extra.get("aux_info"):
            # Each choice of a request is a request to vLLM.
            steps = next((known for known in self._by_request.values() if known.name == name), None) or Steps(name)
        if steps is not None:
            self._by_request[request.request_id] = steps

    def _count(self, engine_core_outputs: Iterable[Any]) -> dict[str | None, Steps]:
        """Count a step of the requests that got tokens; return the steps by the name of the answer that shows them."""
        for output in engine_core_outputs:
            if output.new_token_ids and (steps := self._by_request.get(output.request_id)):
                steps.num_steps += 1
        # vLLM forgets a request that ends in the call.
        return {steps.name: steps for steps in self._by_request.values()}

    @staticmethod
    def _add_aux_info(by_name: dict[str | None, Steps], answers: Iterable[Any]) -> None:
        for answer in answers:
            steps = by_name.get(answer.request_id)
            if steps is not None and answer.finished:
                answer.aux_info = steps.aux_info(sum(len(choice.token_ids) for choice in answer.outputs))


step_counter = StepCounter()
