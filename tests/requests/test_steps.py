"""Steps are counted where vLLM hands tokens to clients; an error of the count must not reach vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.requests.stand_ins import SECRET
from vllm_specplus.requests import steps
from vllm_specplus.requests.options import HANDOVER_ENTRY
from vllm_specplus.requests.steps import StepCounter


class Processor:
    """In the place of vLLM's output processor."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any, prompt: Any, parent_req: Any = None) -> None:
        self.request_states[request.request_id] = request

    def process_outputs(self, outputs: list[Any]) -> Any:
        ended = [output.request_id for output in outputs if output.is_last]
        for name in ended:
            del self.request_states[name]
        answers = [SimpleNamespace(request_id=f"of {name}", finished=True, outputs=[]) for name in ended]
        return SimpleNamespace(request_outputs=answers)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> StepCounter:
    monkeypatch.setattr(steps, "OutputProcessor", Processor)
    for name in ("add_request", "process_outputs"):
        monkeypatch.setattr(Processor, name, getattr(Processor, name))
    counter = StepCounter()
    counter.install()
    return counter


def add(processor: Processor, name: str, **extra: Any) -> None:
    request = SimpleNamespace(request_id=name, external_req_id=f"of {name}")
    request.sampling_params = SimpleNamespace(extra_args=extra)
    processor.add_request(request, None)


def step(processor: Processor, name: str, *, is_last: bool = False) -> list[Any]:
    output = SimpleNamespace(request_id=name, new_token_ids=[1, 2], is_last=is_last)
    return processor.process_outputs([output]).request_outputs


def test_steps_of_a_request(counter: StepCounter) -> None:
    processor = Processor()
    add(processor, "a", aux_info=True)
    add(processor, "b")
    step(processor, "a")
    step(processor, "b")
    (answer,) = step(processor, "a", is_last=True)
    assert answer.aux_info["iter_count"] == 2
    assert len(counter) == 0


@pytest.mark.parametrize("key", [["a"], {}, 3, None, "unknown"])
def test_a_client_may_write_anything_for_the_middlewares_key(
    key: Any, counter: StepCounter, log: pytest.LogCaptureFixture
) -> None:
    watched, processor = counter.watch("key"), Processor()
    add(processor, "a", **{HANDOVER_ENTRY: key})
    add(processor, "b", **{HANDOVER_ENTRY: "key"})
    step(processor, "a", is_last=True)
    step(processor, "b", is_last=True)
    assert watched.num_steps == 1
    assert not log.records


@pytest.mark.parametrize("name", ["_begin", "_count", "_add_aux_info"])
def test_a_fault_costs_the_counts_alone(
    name: str, counter: StepCounter, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    processor = Processor()
    add(processor, "before", aux_info=True)

    def fail(*args: Any) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(StepCounter, name, fail)
    for request in ("a", "b"):
        add(processor, request, aux_info=True)
        (answer,) = step(processor, request, is_last=True)
        assert answer.request_id == f"of {request}"
    assert not processor.request_states.keys() - {"before"}
    assert log.text.count("a fault in counting steps, RuntimeError") == 1
    assert SECRET not in log.text
