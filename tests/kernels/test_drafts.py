"""The kernels of `kernels.drafts` against plain Python, under Triton's interpreter (TRITON_INTERPRET=1)."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.launches import Launches, OnlyTorch
from vllm_specplus.kernels import drafts as kernels
from vllm_specplus.kernels.drafts import (
    DraftCounts,
    Limits,
    continue_forecasts,
    place_drafts,
    prefer_forecasts,
    report_tokens,
    write_one_hot_rows,
)
from vllm_specplus.testing.ahead_of_time import AheadOfTime, run_without_interpreter

pytestmark = pytest.mark.interpreter

SENTINEL = -99
MAX_LEN = 40
VALUES = [0, 1, 2**31 - 1]


@dataclass
class Request:
    """One request when `continue_forecasts` is called."""

    text: list[int]
    base_len: int
    forecast: list[int]
    model: list[int]
    limit: int
    replaces: bool = False
    num_sampled: int = 1
    # Tokens behind the forecast's end; they would agree if they were read.
    unread: tuple[int, ...] = ()


def continued(request: Request, width: int) -> tuple[list[int], int]:
    """The drafts of `continue_forecasts` in plain Python, and how many of them are the model's."""
    model, limit = request.model, min(request.limit, width) if request.num_sampled else 0
    alone = model[:limit], min(len(model), limit)
    if len(request.text) < request.base_len:
        return alone
    new = request.text[request.base_len :]
    remaining = request.forecast[len(new) :]
    if request.forecast[: len(new)] != new or not remaining:
        return alone
    if request.replaces:
        return remaining[:limit], 0
    if remaining[: len(model)] != model:
        return alone
    return remaining[:limit], min(len(model), limit)


def run(
    requests: list[Request],
    *,
    width: int,
    num_columns: int | None = None,
    rows: list[int] | None = None,
    dtype: torch.dtype = torch.int32,
) -> list[tuple[list[int], int]]:
    """Drafts and number of model drafts of each request; `rows` are their places among unused ones.

    Rows are strided. Unused rows hold tokens of texts and a possible length. Outputs hold a sentinel at first.
    """
    num_reqs, num_steps = len(requests), len(requests[0].model)
    num_columns = max(1, *(len(request.forecast) for request in requests)) if num_columns is None else num_columns
    rows = list(range(num_reqs)) if rows is None else rows
    token_ids = torch.full((2 * num_reqs, MAX_LEN + 3), VALUES[0], dtype=torch.int32)[:, :MAX_LEN]
    num_tokens = torch.full((2 * num_reqs,), MAX_LEN, dtype=torch.int32)
    drafts, model = torch.full((2, num_reqs, width + 2), SENTINEL)
    by_state = DraftCounts(*torch.full((2, 2 * num_reqs), SENTINEL, dtype=torch.int32))
    forecast = torch.full((num_reqs, num_columns), -1, dtype=torch.int32)
    for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
        token_ids[row, : len(request.text)] = torch.tensor(request.text, dtype=torch.int32)
        num_tokens[row] = len(request.text)
        model[i, :num_steps] = torch.tensor(request.model)
        there = [*request.forecast, *request.unread][:num_columns]
        forecast[i, : len(there)] = torch.tensor(there, dtype=torch.int32)

    def per_request(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    inputs = token_ids, num_tokens, forecast
    before = [t.clone() for t in inputs]
    num_drafts, num_model = continue_forecasts(
        token_ids,
        num_tokens,
        torch.tensor(rows, dtype=dtype),
        drafts[:, :width],
        forecast,
        per_request([len(request.forecast) for request in requests]),
        per_request([request.base_len for request in requests]),
        per_request([int(request.replaces) for request in requests]),
        model_drafts=model[:, :num_steps] if num_steps else None,
        limits=Limits(*(per_request([getattr(r, name) for r in requests]) for name in ("limit", "num_sampled"))),
        by_state=by_state,
    )
    assert all(torch.equal(t, copy) for t, copy in zip(inputs, before, strict=True))
    assert torch.all(drafts[:, width:] == SENTINEL)
    assert num_drafts.dtype == num_model.dtype == torch.int32
    for noted, counts in zip(by_state, (num_drafts, num_model), strict=True):
        assert torch.equal(noted[rows], counts)
        assert torch.sum(noted != SENTINEL) == num_reqs
    found = []
    for row, count, of_model in zip(drafts[:, :width].tolist(), num_drafts.tolist(), num_model.tolist(), strict=True):
        assert of_model <= count <= width
        assert row[count:] == [0] * (width - count)
        found.append((row[:count], of_model))
    return found


@st.composite
def batches(draw):
    """Arguments of `run`. A forecast is the new tokens, the model's drafts and more, with at most one wrong token."""
    width = draw(st.integers(1, 6))
    num_steps = draw(st.integers(0, width))
    num_columns = draw(st.just(2 * width + 1) | st.integers(1, 2 * width + 1))
    num_reqs = draw(st.integers(1, 3))

    def tokens(count):
        return draw(st.lists(st.sampled_from(VALUES), min_size=count, max_size=count))

    requests = []
    for _ in range(num_reqs):
        base_len, num_new = draw(st.integers(0, 20)), draw(st.integers(0, width + 1))
        text, model = tokens(base_len + num_new), tokens(num_steps)
        agreeing = text[base_len:] + model
        future = agreeing + tokens(max(0, num_columns - len(agreeing)))
        ends = st.sampled_from([num_new - 1, num_new, num_new + 1, num_new + num_steps, num_new + num_steps + 1])
        count = min(max(draw(st.just(num_columns) | ends | st.integers(0, num_columns)), 0), num_columns)
        places = st.sampled_from([0, num_new - 1, num_new, num_new + num_steps - 1, num_new + num_steps])
        at = draw(st.none() | places | st.integers(0, num_columns - 1))
        if at is not None and 0 <= at < count:
            future[at] = VALUES[VALUES.index(future[at]) - 1]
        requests.append(
            Request(
                text=text,
                base_len=base_len,
                forecast=future[:count],
                model=model,
                limit=draw(st.just(width) | st.integers(0, width + 2)),
                replaces=draw(st.booleans()),
                unread=tuple(future[count:]),
            )
        )
    return {
        "requests": requests,
        "width": width,
        "num_columns": num_columns,
        "rows": draw(st.permutations(range(2 * num_reqs)))[:num_reqs],
        "dtype": draw(st.sampled_from([torch.int32, torch.int64])),
    }


@settings(max_examples=150)
@given(batches())
def test_equals_plain_python(batch):
    assert run(**batch) == [continued(request, batch["width"]) for request in batch["requests"]]


@pytest.mark.parametrize(
    ("forecast", "model", "options", "expected"),
    [
        pytest.param([5, 6, 7, 8, 9], [], {}, ([7, 8, 9], 0), id="goes on"),
        pytest.param([5, 6, 7, 8, 9], [7], {}, ([7, 8, 9], 1), id="goes on from the model's draft"),
        pytest.param([5, 6, 7, 8, 9], [7, 8, 9], {}, ([7, 8, 9], 3), id="ends with the model's drafts"),
        pytest.param([5, 6, 7, 8, 9], [7, 8, 9, 1], {}, ([7, 8, 9, 1], 4), id="ends among the model's drafts"),
        pytest.param([5, 6, 7, 8, 9], [7, 1], {}, ([7, 1], 2), id="the model says something else"),
        pytest.param([5, 6, 1, 8, 9], [7, 8], {}, ([7, 8], 2), id="the model says something else at once"),
        pytest.param([5, 1, 7, 8, 9], [7], {}, ([7], 1), id="something else came"),
        pytest.param([5, 1, 7, 8, 9], [7], {"replaces": True}, ([7], 1), id="nor does it replace then"),
        pytest.param([5, 6], [], {}, ([], 0), id="at its end"),
        pytest.param([5, 6], [7], {"replaces": True}, ([7], 1), id="at its end, it replaces nothing"),
        pytest.param([5], [7], {}, ([7], 1), id="past its end"),
        pytest.param([], [7], {"replaces": True}, ([7], 1), id="no forecast"),
        pytest.param([5, 6, 8], [7, 1], {"replaces": True}, ([8], 0), id="shorter than what it replaces"),
        pytest.param([5, 6, *range(9)], [], {}, ([0, 1, 2, 3], 0), id="more than the slots"),
        pytest.param([5, 6, *range(9)], [0], {"limit": 9}, ([0, 1, 2, 3], 1), id="limited to more than the slots"),
        pytest.param([5, 6, 7, 8, 9], [7], {"limit": 2}, ([7, 8], 1), id="limited"),
        pytest.param([5, 6, 7, 8, 9], [7, 8], {"limit": 1}, ([7], 1), id="limited to some of the model's"),
        pytest.param([5, 6, 8], [7, 8], {"limit": 0, "replaces": True}, ([], 0), id="limited to none"),
        pytest.param([5, 6, 7], [7, 8], {"num_sampled": 0}, ([], 0), id="in its prompt"),
        pytest.param([5, 6], [7], {"base_len": 4}, ([7], 1), id="made of more tokens than there are"),
    ],
)
def test_expected_drafts(forecast, model, options, expected):
    request = Request(**{"text": [1, 5, 6], "base_len": 1, "forecast": forecast, "model": model, "limit": 4} | options)
    assert run([request], width=4) == [expected]
    assert continued(request, 4) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab_size", "block"), [(37, 16), (16, 16), (5000, None)])
def test_only_drafts_that_no_model_made_get_a_one_hot_row(monkeypatch, vocab_size, block, dtype):
    """Drafts lie in every block of the vocabulary; the first and the last token are among them."""
    if block is not None:
        monkeypatch.setattr(kernels, "_BLOCK", block)
    width, rows = 3, [4, 0, 3, 1]
    counts = [(0, 3), (1, 2), (2, 2), (0, 0)]  # the model's, all
    drafts = torch.full((4, width + 2), -1)
    drafts[0, :3] = torch.tensor([0, vocab_size - 1, vocab_size // 2])
    drafts[1, :2] = torch.tensor([3, 15])
    drafts[2, :2] = torch.tensor([1, 2])
    logits = torch.randn(6, width, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = logits.clone()
    for i, (row, (num_model, num_drafts)) in enumerate(zip(rows, counts, strict=True)):
        for slot in range(num_model, num_drafts):
            expected[row, slot] = float("-inf")
            expected[row, slot, drafts[i, slot]] = 0
    write_one_hot_rows(
        logits,
        torch.tensor(rows, dtype=torch.int32),
        drafts[:, :width],
        torch.tensor([num_drafts for _, num_drafts in counts], dtype=torch.int32),
        torch.tensor([num_model for num_model, _ in counts], dtype=torch.int32),
    )
    assert torch.equal(logits, expected)


def arguments(num_reqs=2, width=4, **changes):
    """Valid arguments of `continue_forecasts`, with `changes`."""

    def per_request(value):
        return torch.full((num_reqs,), value, dtype=torch.int32)

    return {
        "token_ids": torch.zeros(num_reqs, 16, dtype=torch.int32),
        "num_tokens": per_request(10),
        "idx_mapping": torch.arange(num_reqs),
        "drafts": torch.zeros(num_reqs, width, dtype=torch.int64),
        "forecast": torch.zeros(num_reqs, 2 * width + 1, dtype=torch.int32),
        "num_forecast": per_request(2 * width + 1),
        "base_len": per_request(8),
        "replaces_model": per_request(0),
        "model_drafts": torch.zeros(num_reqs, 1, dtype=torch.int64),
        "limits": Limits(per_request(width), per_request(1)),
        "by_state": DraftCounts(per_request(0), per_request(0)),
    } | changes


def one_hot_arguments(num_reqs=2, width=4, vocab_size=5000, dtype=torch.float32, num_drafts=3):
    """Valid arguments of `write_one_hot_rows`."""
    return {
        "draft_logits": torch.zeros(num_reqs, width, vocab_size, dtype=dtype),
        "idx_mapping": torch.arange(num_reqs),
        "drafts": torch.zeros(num_reqs, width, dtype=torch.int64),
        "num_drafts": torch.full((num_reqs,), num_drafts, dtype=torch.int32),
        "num_model": torch.ones(num_reqs, dtype=torch.int32),
    }


def test_no_requests():
    num_drafts, num_model = continue_forecasts(**arguments(0))
    assert num_drafts.shape == num_model.shape == (0,)
    write_one_hot_rows(**one_hot_arguments(0))


def test_safe_to_capture_in_a_cuda_graph(monkeypatch):
    """A call is one launch whose grid depends on shapes alone, and waits for nothing."""
    goes_on, one_hot = Launches(), Launches()
    monkeypatch.setattr(kernels, "_continue_kernel", goes_on)
    monkeypatch.setattr(kernels, "_one_hot_kernel", one_hot)
    calls = [arguments(3), arguments(3, num_forecast=torch.zeros(3, dtype=torch.int32))]
    one_hot_calls = [one_hot_arguments(3), one_hot_arguments(3, num_drafts=0)]
    # A capture may allocate memory.
    with OnlyTorch(torch.ops.aten.empty, torch.ops.aten.empty_like):
        for call in calls:
            continue_forecasts(**call)
        for call in one_hot_calls:
            write_one_hot_rows(**call)
    assert goes_on.grids == [(3,)] * 2
    assert one_hot.grids == [(2, 4, 3)] * 2


def compile_ahead_of_time():
    """Run in a process of its own: compile the kernels as they are launched."""
    names = ("_report_kernel", "_place_kernel", "_prefer_kernel")
    around = {name: AheadOfTime(getattr(kernels, name)) for name in names}
    for name, kernel in around.items():
        setattr(kernels, name, kernel)
    drafts, rows, ints = torch.zeros(3, 5, dtype=torch.int64), torch.arange(3), torch.zeros(3, dtype=torch.int32)
    limits, by_state = Limits(ints, ints), DraftCounts(ints, ints)
    report_tokens(torch.zeros(4, 9, dtype=torch.int32), ints, rows, limits, drafts[:, :2], 5, ints.new_zeros(40))
    place_drafts(drafts, drafts.int(), ints, ints, rows, by_state)
    prefer_forecasts(drafts, ints, ints, drafts, ints, ints, rows, ints, 1, 2, by_state)
    assert all(kernel.compiled for kernel in around.values())
    goes_on, one_hot = AheadOfTime(kernels._continue_kernel), AheadOfTime(kernels._one_hot_kernel)
    kernels._continue_kernel, kernels._one_hot_kernel = goes_on, one_hot
    continue_forecasts(**arguments())
    continue_forecasts(**arguments(width=5, model_drafts=None, idx_mapping=torch.arange(2, dtype=torch.int32)))
    continue_forecasts(**arguments(width=1, forecast=torch.zeros(2, 1, dtype=torch.int32)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        write_one_hot_rows(**one_hot_arguments(vocab_size=151_936, dtype=dtype))
    continue_forecasts(**arguments(agreed=ints[:2], by_state=None, model_drafts=None))
    print("compiled", len(goes_on.compiled), len(one_hot.compiled))


def test_kernels_compile_for_a_gpu(tmp_path):
    code = "from tests.kernels import test_drafts; test_drafts.compile_ahead_of_time()"
    assert "compiled 4 3" in run_without_interpreter(code, tmp_path)


@pytest.mark.parametrize("num_steps", [0, 2, 5])
def test_report(num_steps: int) -> None:
    token_ids = torch.arange(100, 160, dtype=torch.int32).reshape(4, 15)[:, :12]
    num_tokens = torch.tensor([12, 0, 1, 4], dtype=torch.int32)
    rows, most = torch.tensor([3, 0, 2], dtype=torch.int32), torch.tensor([5, 4, 2], dtype=torch.int32)
    limits = Limits(most, torch.tensor([1, 0, 3, 7], dtype=torch.int32))
    drafts = torch.arange(21).reshape(3, 7)[:, :5]
    memory = torch.full((50,), SENTINEL, dtype=torch.int32)
    num_columns = report_tokens(token_ids, num_tokens, rows, limits, drafts[:, :num_steps], 5, memory)
    assert num_columns == 8 + num_steps
    report, rest = memory[: 3 * num_columns].view(3, num_columns).tolist(), memory[3 * num_columns :]
    assert torch.all(rest == SENTINEL)
    for i, row in enumerate(rows.tolist()):
        length = int(num_tokens[row])
        latest = [int(token_ids[row, max(length - 1 - back, 0)]) for back in range(6)]
        assert report[i] == [length, [5, 0, 2][i], *latest, *drafts[i, :num_steps].tolist()]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_place(dtype: torch.dtype) -> None:
    drafts = torch.full((2, 5), SENTINEL)
    token_ids = torch.tensor([[7, -1, 3, 8], [0, 2**31 - 1, 5, 8]], dtype=dtype)
    counts, by_state = torch.tensor([[1, 2], [0, 1]], dtype=torch.int32), torch.full((2, 4), SENTINEL).int()
    rows = torch.tensor([3, 1], dtype=torch.int32)
    place_drafts(drafts[:, :3], token_ids, *counts, rows, DraftCounts(*by_state))
    assert drafts.tolist() == [[7, 0, 0, SENTINEL, SENTINEL], [0, 2**31 - 1, 0, SENTINEL, SENTINEL]]
    assert by_state.tolist() == [[SENTINEL, 2, SENTINEL, 1], [SENTINEL, 1, SENTINEL, 0]]


def test_prefer() -> None:
    """A forecast that tokens speak for comes first, and one that none does only where there are no drafts."""
    drafts, forecast = torch.full((4, 3), 7), torch.arange(12).reshape(4, 3)
    counts = torch.tensor([[2, 0, 3, 3], [1, 0, 2, 2]], dtype=torch.int32)
    about = torch.tensor([[3, 2, 0, 1], [1, -1, 5, 0]], dtype=torch.int32)
    sources, rows = torch.full((6,), SENTINEL, dtype=torch.int32), torch.tensor([5, 1, 0, 2])
    by_state = DraftCounts(*torch.full((2, 6), SENTINEL, dtype=torch.int32))
    num_drafts, num_model = prefer_forecasts(drafts, *counts, forecast, *about, rows, sources, 10, 20, by_state)
    assert drafts.tolist() == [[0, 1, 2], [3, 4, 5], [7, 7, 7], [7, 7, 7]]
    assert num_drafts.tolist() == [3, 2, 3, 3]
    assert num_model.tolist() == [0, 0, 2, 2]
    assert sources.tolist() == [20, 10, 20, SENTINEL, SENTINEL, 10]
    for noted, new in zip(by_state, (num_drafts, num_model), strict=True):
        assert torch.equal(noted[rows], new)
        assert torch.sum(noted == SENTINEL) == 2
