"""Counting drafts on the device against plain Python, under Triton's interpreter (TRITON_INTERPRET=1)."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.launches import Launches, OnlyTorch
from vllm_specplus.kernels import counts as kernels
from vllm_specplus.kernels.counts import Counted, count_drafts, count_steps, mark_padding
from vllm_specplus.runners.request_counts import count_drafts as count_on_host
from vllm_specplus.sources import MODEL, NGRAM, REFERENCE, SOURCES, SUFFIX, UNFILLED
from vllm_specplus.testing.ahead_of_time import AheadOfTime, run_without_interpreter

pytestmark = pytest.mark.interpreter

MAX_NUM_REQS = 6


@dataclass
class Request:
    """A request's step: `num_slots` are verified, and the first `num_drafts` of them hold drafts."""

    num_slots: int
    num_sampled: int = 1
    num_drafts: int = 0
    num_model: int = 0
    fill_source: int = NGRAM
    invalid: set[int] = field(default_factory=set)


def reference(counts: np.ndarray, request_counts: np.ndarray, requests: dict[int, Request]) -> None:
    """Count a step in plain Python; `requests`: by row."""
    for row, request in requests.items():
        if request.num_sampled == 0:
            continue
        for slot in range(request.num_slots):
            if slot in request.invalid:
                continue
            source = MODEL if slot < request.num_model else request.fill_source
            if slot >= request.num_drafts:
                source = UNFILLED
            is_accepted = slot < request.num_sampled - 1
            counts[:, source, slot] += [1, is_accepted]
            if source == REFERENCE:
                request_counts[row, 1:] += [1, is_accepted]


def new_counts(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    request_counts = torch.arange(3 * MAX_NUM_REQS).reshape(-1, 3)
    return torch.zeros(2, len(SOURCES), width, dtype=torch.int64), request_counts


def run(
    counts: torch.Tensor,
    request_counts: torch.Tensor,
    requests: dict[int, Request],
    *,
    masked: bool = True,
    dtype: torch.dtype = torch.int32,
) -> None:
    """Count a step on the device. Rows of no request would count if they were read."""
    width = counts.shape[2]
    by_row = [requests.get(row, Request(width, width, width, 1, REFERENCE)) for row in range(MAX_NUM_REQS)]
    # The first row of a request holds no draft.
    invalid = [
        slot == 0 or slot - 1 in request.invalid
        for request in requests.values()
        for slot in range(request.num_slots + 1)
    ]

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    # vLLM's buffers hold more values behind the batch.
    num_sampled = int32([*(request.num_sampled for request in requests.values()), width + 1])
    ends = np.cumsum([request.num_slots + 1 for request in requests.values()], dtype=np.int32).tolist()
    counted = Counted(
        counts,
        request_counts,
        num_sampled[: len(requests)],
        int32([0, *ends]),
        int32([request.num_drafts for request in by_row]),
        int32([request.num_model for request in by_row]),
        int32([request.fill_source for request in by_row]),
        torch.tensor(invalid, dtype=torch.bool) if masked else None,
    )
    count_drafts(counted, torch.tensor(list(requests), dtype=dtype))


@st.composite
def steps(draw):
    """The width, the requests of several steps by row, and the dtype of `idx_mapping`."""
    width = draw(st.integers(1, 6))

    def request(row):
        num_slots = draw(st.integers(0, width))
        num_drafts = draw(st.just(num_slots) | st.integers(0, width))
        return Request(
            num_slots,
            num_sampled=draw(st.integers(0, num_slots + 1)),
            num_drafts=num_drafts,
            num_model=draw(st.integers(0, num_drafts)),
            fill_source=draw(st.sampled_from([NGRAM, SUFFIX, REFERENCE])),
            invalid=draw(st.sets(st.integers(0, width - 1), max_size=2)),
        )

    rows = st.lists(st.integers(0, MAX_NUM_REQS - 1), unique=True, max_size=4)
    batches = [{row: request(row) for row in draw(rows)} for _ in range(draw(st.integers(1, 3)))]
    return width, batches, draw(st.sampled_from([torch.int32, torch.int64]))


@settings(max_examples=80)
@given(steps())
def test_equals_plain_python(case):
    width, batches, dtype = case
    counts, request_counts = new_counts(width)
    expected_counts, expected_request_counts = counts.numpy().copy(), request_counts.numpy().copy()
    for requests in batches:
        run(counts, request_counts, requests, dtype=dtype)
        reference(expected_counts, expected_request_counts, requests)
    assert counts.tolist() == expected_counts.tolist()
    assert request_counts.tolist() == expected_request_counts.tolist()


@pytest.mark.parametrize("masked", [True, False])
def test_equals_the_count_on_the_host(masked):
    """All slots are filled and all drafts are valid."""
    rng = np.random.default_rng(0)
    width = 5
    counts, request_counts = new_counts(width)
    expected = counts.numpy().copy()
    for _ in range(10):
        requests = {}
        for row in rng.permutation(MAX_NUM_REQS)[:3].tolist():
            num_drafts = int(rng.integers(0, width + 1))
            num_model, num_accepted = rng.integers(0, num_drafts + 1, 2).tolist()
            fill_source = int(rng.choice([NGRAM, REFERENCE]))
            requests[row] = Request(num_drafts, num_accepted + 1, num_drafts, num_model, fill_source)
            count_on_host(expected, *map(np.array, ([num_model], [fill_source], [num_drafts], [num_accepted])))
        run(counts, request_counts, requests, masked=masked)
    assert counts.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("request_", "drafted", "accepted", "request_count"),
    [
        pytest.param(Request(3, 0, 3, 1, REFERENCE), {}, {}, [0, 0], id="being prefilled"),
        pytest.param(Request(0, 1, 3, 1, REFERENCE), {}, {}, [0, 0], id="no slot"),
        pytest.param(
            Request(3, 3, 3, 1, SUFFIX), {MODEL: [0], SUFFIX: [1, 2]}, {MODEL: [0], SUFFIX: [1]}, [0, 0], id="a hybrid"
        ),
        pytest.param(Request(3, 4, 3, 0, REFERENCE), {REFERENCE: [0, 1, 2]}, {REFERENCE: [0, 1, 2]}, [3, 3], id="all"),
        pytest.param(
            Request(3, 2, 1, 0, REFERENCE), {REFERENCE: [0], UNFILLED: [1, 2]}, {REFERENCE: [0]}, [1, 1], id="unfilled"
        ),
        pytest.param(Request(2, 1, 0, 0, REFERENCE), {UNFILLED: [0, 1]}, {}, [0, 0], id="no drafts"),
        pytest.param(Request(2, 3, 3, 0, REFERENCE), {REFERENCE: [0, 1]}, {REFERENCE: [0, 1]}, [2, 2], id="cut"),
        pytest.param(
            Request(3, 2, 3, 1, REFERENCE, {1}), {MODEL: [0], REFERENCE: [2]}, {MODEL: [0]}, [1, 0], id="invalid"
        ),
        pytest.param(Request(2, 1, 2, 2, REFERENCE), {MODEL: [0, 1]}, {}, [0, 0], id="the model's only"),
    ],
)
def test_expected_counts(request_, drafted, accepted, request_count):
    counts, request_counts = new_counts(3)
    before = request_counts.clone()
    run(counts, request_counts, {4: request_})
    found = [{source: row.nonzero()[:, 0].tolist() for source, row in enumerate(rows) if row.any()} for rows in counts]
    assert found == [drafted, accepted]
    assert counts.max() <= 1
    before[4, 1:] += torch.tensor(request_count)
    assert torch.equal(request_counts, before)


def arguments(num_reqs=2, width=4, idx_mapping=None, **changes):
    """Valid arguments of `count_drafts`, with `changes` in what is counted."""

    def per_request(value):
        return torch.full((num_reqs,), value, dtype=torch.int32)

    counted = Counted(
        counts=torch.zeros(2, len(SOURCES), width, dtype=torch.int64),
        request_counts=torch.zeros(num_reqs, 3, dtype=torch.int64),
        num_sampled=per_request(2),
        cu_num_rows=torch.arange(num_reqs + 1, dtype=torch.int32) * (width + 1),
        num_drafts=per_request(width),
        num_model=per_request(1),
        fill_source=per_request(REFERENCE),
    )
    return counted._replace(**changes), torch.arange(num_reqs) if idx_mapping is None else idx_mapping


def test_no_requests():
    counted, nobody = arguments(0)
    count_drafts(counted, nobody)
    assert not counted.counts.any()


def test_a_call_is_one_launch_that_waits_for_nothing(monkeypatch):
    launches = Launches()
    monkeypatch.setattr(kernels, "_count_kernel", launches)
    calls = [arguments(3), arguments(3, invalid=torch.zeros(15, dtype=torch.bool))]
    with OnlyTorch():
        for call in calls:
            count_drafts(*call)
    assert launches.grids == [(3,)] * 2


def compile_ahead_of_time():
    """Run in a process of its own: compile the kernel as it is launched."""
    kernels._count_kernel = kernel = AheadOfTime(kernels._count_kernel)
    count_drafts(*arguments())
    count_drafts(*arguments(width=5, idx_mapping=torch.arange(2, dtype=torch.int32)))
    count_drafts(*arguments(width=1, invalid=torch.zeros(4, dtype=torch.bool)))
    kernels._padding_kernel = padding = AheadOfTime(kernels._padding_kernel)
    ints = torch.zeros(300, dtype=torch.int32)
    mark_padding(ints, ints, ints)
    mark_padding(ints, ints, ints, ints.bool())
    kernels._steps_kernel = steps = AheadOfTime(kernels._steps_kernel)
    count_steps(ints.long()[:3, None].expand(3, 3).contiguous(), ints[:4], ints[:3])
    print("compiled", len(kernel.compiled), len(padding.compiled), len(steps.compiled))


def test_the_kernel_compiles_for_a_gpu(tmp_path):
    code = "from tests.kernels import test_counts; test_counts.compile_ahead_of_time()"
    assert "compiled 3 2 1" in run_without_interpreter(code, tmp_path)


@pytest.mark.parametrize("masked", [True, False])
def test_padding(masked: bool) -> None:
    num_drafts = torch.tensor([0, 3, 1], dtype=torch.int32)
    states = torch.arange(600, dtype=torch.int32) % 3
    positions = torch.arange(600, dtype=torch.int32) // 3 % 5
    invalid = torch.arange(600) % 7 == 0 if masked else None
    expected = positions > num_drafts[states]
    if invalid is not None:
        expected |= invalid
    assert torch.equal(mark_padding(positions, states, num_drafts, invalid), expected)
    assert mark_padding(positions[:0], states[:0], num_drafts).shape == (0,)


def test_steps_count_for_requests_that_got_tokens(monkeypatch):
    monkeypatch.setattr(kernels, "_BLOCK", 2)
    counts, rows = torch.full((6, 3), 10), torch.tensor([4, 0, 2], dtype=torch.int32)
    count_steps(counts, torch.tensor([2, 0, 1, 9], dtype=torch.int32), rows)
    assert counts[:, 0].tolist() == [10, 10, 11, 10, 11, 10]
    assert (counts[:, 1:] == 10).all()
    count_steps(counts, rows, rows[:0])
