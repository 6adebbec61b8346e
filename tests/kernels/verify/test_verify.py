"""The fused kernels return exactly what the specification says, under Triton's interpreter."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fuzzing import fuzz
from tests.verify.cases import (
    DRAWN_AT_INFINITY,
    HUGE_CASES,
    OPEN_CASES,
    UNDRAWN_AT_INFINITY,
    Shape,
    assert_in_range,
    assert_same,
    make_case,
    make_huge_case,
    shapes_of,
)
from tests.verify.guards import GUARD, GuardedInputs, guarded
from vllm_specplus.kernels.verify import Workspace
from vllm_specplus.kernels.verify import launch as kernels
from vllm_specplus.testing.ahead_of_time import AheadOfTime, run_without_interpreter
from vllm_specplus.verify import STRATEGIES, reference, verify_draft_tokens
from vllm_specplus.verify.checks import make_inputs
from vllm_specplus.verify.noise import gumbel_noise
from vllm_specplus.verify.types import VerifyInputs, VerifyOutput

pytestmark = pytest.mark.interpreter

KERNELS = ("row_stats_kernel", "judge_kernel", "race_kernel", "emit_kernel", "accept_greedy_kernel")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vocabularies take several blocks, and several steps of the slow paths.

    A request of more than four rows is judged in several parts, and its judges have several rows each.
    """
    for name in ("BLOCK_SIZE", "TILE_SIZE", "SCAN_SIZE", "LIST_SIZE"):
        monkeypatch.setattr(kernels, name, 512)
    monkeypatch.setattr(kernels, "JUDGED_ROWS", 4)
    monkeypatch.setattr(kernels, "JUDGES_AT_ONCE", 3)


@pytest.fixture(params=["heads", "small heads"])
def _head_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small heads most rows have none, and take the slow paths."""
    if request.param == "small heads":
        monkeypatch.setattr(kernels, "HEAD_GROUPS", 2)
        monkeypatch.setattr(kernels, "HEAD_SIZE", 16)


def poisoned(inputs: VerifyInputs) -> Workspace:
    """A workspace larger than necessary, with guards; every element is wrong until it is written."""
    workspace = Workspace.allocate(
        inputs.num_rows + 3, inputs.num_reqs + 2, inputs.vocab_size, inputs.max_rows, inputs.logits.device
    )
    return replace(workspace, **{name: poisoned_tensor(tensor) for name, tensor in tensors_of(workspace).items()})


def tensors_of(workspace: Workspace) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(workspace, field.name) for field in fields(workspace)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def poisoned_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return guarded(tensor, torch.nan if tensor.is_floating_point() else -99)


def check_guards(workspace: Workspace) -> None:
    for name, tensor in tensors_of(workspace).items():
        whole = tensor._base
        assert whole is not None
        guards = torch.cat((whole[:GUARD], whole[-GUARD:]))
        assert (guards.isnan() if guards.is_floating_point() else guards == -99).all(), name


def run(inputs: VerifyInputs) -> VerifyOutput:
    workspace = poisoned(inputs)
    before = [tensor.clone() for tensor in vars(inputs).values() if isinstance(tensor, torch.Tensor)]
    output = kernels.verify(inputs, workspace)
    check_guards(workspace)
    after = [tensor for tensor in vars(inputs).values() if isinstance(tensor, torch.Tensor)]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, before, strict=True))
    assert output.token_ids.shape == (inputs.num_reqs, inputs.max_rows)
    # Rows behind the last request are not touched.
    assert (workspace.token_ids[inputs.num_reqs :] == -99).all()
    assert (workspace.num_tokens[inputs.num_reqs :] == -99).all()
    return output


def at_most_10_rows(counts: list[int]) -> list[int]:
    """Only the first request may have more."""
    return [n for i, n in enumerate(counts) if i == 0 or sum(counts[: i + 1]) <= 10]


NUM_ROWS = st.sampled_from([1, 0, 2, 3, 4, 5] * 3 + [7, 11, 17])


@pytest.mark.usefixtures("_head_size")
@pytest.mark.parametrize("num_cases", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_equals_reference(num_cases: int) -> None:
    """On cases that are others in each run of CI, and as many as one likes by ci/fuzz.sh."""

    # No shrinking: a failing case is printed whole and is small, and shrinking would take minutes.
    @fuzz
    @settings(
        max_examples=num_cases,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(shapes_of(st.lists(NUM_ROWS, min_size=1, max_size=4).map(at_most_10_rows)))
    @example(UNDRAWN_AT_INFINITY)
    @example(DRAWN_AT_INFINITY)
    def check(shape: Shape) -> None:
        inputs = make_case(shape)
        expected = reference.verify(inputs)
        longest = int(expected.num_tokens.max()) if inputs.num_reqs else 0
        event(f"{shape.strategy}, {shape.policy}, at most {min(longest, 3)} tokens")
        laid = GuardedInputs(inputs, pads_rows=shape.seed % 2 == 1)
        assert_same(run(laid.inputs), expected)
        laid.check()
        valid = expected.token_ids[expected.token_ids != -1]
        assert ((valid >= 0) & (valid < shape.vocab_size)).all()

    check()


@pytest.mark.parametrize("with_draft_logits", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_huge_logits_and_extreme_temperatures(strategy: str, with_draft_logits: bool) -> None:
    with_draft_logits = with_draft_logits and strategy == "rejection"
    for scale, temperature in HUGE_CASES:
        inputs = make_huge_case(strategy, scale, temperature, with_draft_logits=with_draft_logits)
        assert_same(run(inputs), reference.verify(inputs))
    for scale, temperature in OPEN_CASES:
        inputs = make_huge_case(strategy, scale, temperature, with_draft_logits=with_draft_logits)
        assert_in_range(run(inputs), inputs)


@pytest.mark.usefixtures("_head_size")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("counts", [[17], [1] * 64, [16, 1, 9, 0, 17], [2] * 20])
def test_long_and_wide_batches(strategy: str, counts: list[int]) -> None:
    shape = Shape(
        counts=counts,
        vocab_size=70,
        dtype=torch.bfloat16,
        strategy=strategy,
        policy="normal",
        verify_window=2,
        max_candidate_len=None,
        kinds=["peaked", "tied", "normal", "masked"],
        filters={"top_p", "top_k"},
        seed=11,
    )
    inputs = make_case(shape)
    assert_same(run(inputs), reference.verify(inputs))


def one_row(logits: torch.Tensor, **options: object) -> int:
    """The token of a request without drafts."""
    out = verify_draft_tokens(
        logits[None],
        torch.tensor([0, 1]),
        torch.tensor([-1]),
        torch.tensor([1.0]),
        seeds=torch.tensor([3]),
        positions=torch.tensor([5]),
        backend="triton",
        **options,
    )
    assert out.num_tokens.tolist() == [1]
    return int(out.token_ids[0, 0])


@pytest.mark.parametrize("vocab_size", [151_936, 262_144, 100_003])
def test_large_vocabularies(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    noise = gumbel_noise(torch.tensor([3]), torch.tensor([5]), vocab_size)[0]
    assert one_row(logits, strategy="target_match") == int((logits.float() + noise).argmax())
    best = logits.float().sort(descending=True, stable=True).indices
    assert one_row(logits, strategy="greedy") == best[0]
    expected = best[:50][(logits.float() + noise)[best[:50]].argmax()]
    assert one_row(logits, strategy="topp", top_k=torch.tensor([50])) == expected
    mass = logits.float().softmax(dim=0)[best].cumsum(dim=0)
    candidates = best[: int((mass < 0.3).sum()) + 1]
    expected = candidates[(logits.float() + noise)[candidates].argmax()]
    assert one_row(logits, strategy="rejection", top_p=torch.tensor([0.3])) == expected


@pytest.mark.usefixtures("_head_size")
def test_a_flat_row_settles_after_several_rounds() -> None:
    """The nucleus is the first 1 % of equal tokens, and the noise favours others."""
    logits = torch.zeros(1100)
    noise = gumbel_noise(torch.tensor([3]), torch.tensor([5]), 1100)[0]
    for strategy in ("target_match", "topp", "rejection"):
        assert one_row(logits, strategy=strategy, top_p=torch.tensor([11 / 1100 - 1e-5])) == int(noise[:11].argmax())


@pytest.mark.usefixtures("_head_size")
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_masses_near_the_threshold_stay_near_it(offset: float) -> None:
    """If rounding decides, each emitted or accepted token is a candidate by some top_p near the one asked for.

    Near is within 1e-6, and 2^-23 for each unit of max |z|. Here top_p is the mass above the tested token.
    """
    vocab_size, num_rows = 1000, 12
    margin = 1e-6 + 2**-23 * (offset + 5)
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(num_rows, vocab_size, generator=g) + offset
    mass = logits.double().softmax(dim=1).sort(descending=True, stable=True)
    rank = torch.randint(1, 400, (num_rows, 1), generator=g)
    above = mass.values.cumsum(dim=1).gather(1, rank - 1)[:, 0].float()
    before, draft, after = (mass.indices.gather(1, rank + step)[:, 0] for step in (-1, 0, 1))

    def verify(tokens: torch.Tensor, top_p: torch.Tensor, strategy: str = "topp") -> VerifyOutput:
        return verify_draft_tokens(
            logits.repeat_interleave(2, dim=0),
            torch.arange(num_rows + 1) * 2,
            torch.stack([tokens, torch.full_like(tokens, -1)], dim=1).flatten(),
            torch.ones(num_rows),
            top_p=top_p,
            strategy=strategy,
            backend="triton",
        )

    assert (verify(before, above - margin).num_tokens == 2).all()
    assert (verify(draft, above + margin).num_tokens == 2).all()
    assert (verify(draft, above - margin).num_tokens == 1).all()
    assert (verify(after, above - margin).num_tokens == 1).all()
    for strategy in ("topp", "target_match", "rejection"):
        emitted = verify(after, above, strategy).token_ids[:, 0]
        place = (mass.indices == emitted[:, None]).int().argmax(dim=1)
        assert (place <= rank[:, 0]).all()


def test_strides_and_dtypes() -> None:
    """Padded rows are read in place; rows that are not in one piece are copied."""
    shape = Shape([3, 2], 100, torch.float32, "topp", "normal", 0, None, ["normal"], {"top_p"}, seed=4)
    inputs = make_case(shape)
    expected = reference.verify(inputs)
    padded = torch.full((inputs.num_rows, 130), torch.inf)
    padded[:, :100] = inputs.logits
    assert_same(run(replace(inputs, logits=padded[:, :100])), expected)
    assert_same(run(replace(inputs, logits=inputs.logits.t().contiguous().t())), expected)


def test_max_rows_cuts_long_requests_and_widens_the_output() -> None:
    shape = Shape([5, 1, 3], 64, torch.float32, "greedy", "accept_all", 0, None, ["normal"], set(), seed=8)
    inputs = make_case(shape)
    for max_rows in (1, 2, 4, 5, 9):
        changed = replace(inputs, max_rows=max_rows)
        assert_same(run(changed), reference.verify(changed))


def test_workspace_is_reused_and_checked() -> None:
    shape = Shape([3, 1, 2], 80, torch.float32, "rejection", "normal", 0, None, ["normal", "peaked"], {"top_p"}, seed=1)
    inputs = make_case(shape)
    workspace = poisoned(inputs)
    for _ in range(2):
        output = kernels.verify(inputs, workspace)
        assert output.token_ids.data_ptr() == workspace.token_ids.data_ptr()
        assert output.num_tokens.data_ptr() == workspace.num_tokens.data_ptr()
        assert_same(output, reference.verify(inputs))
    with pytest.raises(ValueError, match=r"made for 4 rows.*asked for: 6"):
        kernels.verify(inputs, Workspace.allocate(4, 3, 80, 3, "cpu"))
    with pytest.raises(ValueError, match=r"vocabulary 81 .*asked for: .*80"):
        kernels.verify(inputs, Workspace.allocate(6, 3, 81, 3, "cpu"))
    with pytest.raises(ValueError, match="workspace is on meta; allowed: cpu"):
        kernels.verify(inputs, Workspace.allocate(6, 3, 80, 3, "meta"))


class NoTensorOperations(TorchDispatchMode):
    """Lets views pass, and refuses everything that launches, allocates or waits."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.is_view, f"{function} between the launches"
        return function(*args, **(kwargs or {}))


class Launches:
    """Takes a kernel's place and notes its grids."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.grids.append(grid)
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("filters", [set(), {"top_p", "top_k"}], ids=["unfiltered", "filtered"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_safe_to_capture_in_a_cuda_graph(strategy: str, filters: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a workspace only the kernels run, and their grids depend on shapes, not on values."""
    grids = []
    for counts, kinds in (([4, 4, 4], ["normal"]), ([12, 0, 0], ["all_masked"])):
        shape = Shape(counts, 300, torch.bfloat16, strategy, "normal", 0, None, kinds, filters, seed=2)
        inputs = replace(make_case(shape), max_rows=12)
        launches = {name: Launches() for name in KERNELS}
        with monkeypatch.context() as patch:
            for name, launch in launches.items():
                patch.setattr(kernels, name, launch)
            workspace = poisoned(inputs)
            with NoTensorOperations():
                kernels.verify(inputs, workspace)
        grids.append({name: launch.grids for name, launch in launches.items()})
    assert grids[0] == grids[1]
    # Programs are for the twelve rows, and not for the 36 slots that three requests have.
    assert max(grid[0] for found in grids[0].values() for grid in found) == 12
    assert len(grids[0]["accept_greedy_kernel" if strategy == "greedy" else "emit_kernel"]) == 1


def test_outputs_of_a_step_are_its_own_and_scratch_is_kept() -> None:
    """vLLM still copies the last step's tokens while the next step runs."""
    kept = Workspace.allocate(12, 3, 300, 12, "cpu")
    first, second = kept.with_outputs(3, 12), kept.with_outputs(3, 12)
    for name in ("token_ids", "num_tokens"):
        assert getattr(first, name).data_ptr() != getattr(second, name).data_ptr()
    assert first.stats is second.stats is kept.stats


class Addresses:
    """Runs a kernel, and notes the addresses of all vectors that it gets."""

    def __init__(self, kernel: Any, found: list[int]) -> None:
        self._kernel = kernel
        self._found = found

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args: Any, **named: Any) -> None:
            groups = [arg if isinstance(arg, tuple) else (arg,) for arg in args]
            tensors = [x for group in groups for x in group if isinstance(x, torch.Tensor) and x.ndim == 1]
            self._found += [tensor.data_ptr() for tensor in tensors]
            self._kernel[grid](*args, **named)

        return launch


def moved_by_one(tensor: Any) -> Any:
    """A vector with the same elements, at an address that 16 does not divide; anything else as it is."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 1:
        return tensor
    moved = torch.cat([tensor[:1], tensor])[1:]
    assert moved.data_ptr() % 16
    return moved


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slice_compiles_no_kernel(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles anew for an address that 16 does not divide, as slices have; so no kernel gets one."""
    filters, sampled = {"top_p", "top_k", "min_p"}, strategy == "rejection"
    shape = Shape([3, 1, 2], 80, torch.float32, strategy, "normal", 0, None, ["normal"], filters, 5, sampled, sampled)
    inputs = make_case(shape)
    found: list[int] = []
    for name in KERNELS:
        monkeypatch.setattr(kernels, name, Addresses(getattr(kernels, name), found))
    slices = replace(inputs, **{field.name: moved_by_one(getattr(inputs, field.name)) for field in fields(inputs)})
    assert_same(run(slices), reference.verify(inputs))
    assert found
    assert not [address for address in found if address % 16]


def compile_ahead_of_time(*, compiles_all: bool) -> None:
    """Run in a process of its own: compile the kernels as they are launched, or some of these."""
    taken = {name: AheadOfTime(getattr(kernels, name)) for name in KERNELS}
    for name, kernel in taken.items():
        setattr(kernels, name, kernel)
    num_rows, num_reqs = 10, 2

    def launch(
        strategy: str,
        filters: str = "",
        dtype: torch.dtype = torch.bfloat16,
        vocab_size: int = 151_936,
        with_draft_logits: bool = False,
        **options: object,
    ) -> None:
        def per_request(letter: str, dtype: torch.dtype) -> torch.Tensor | None:
            return torch.ones(num_reqs, dtype=dtype) if letter in filters else None

        inputs = make_inputs(
            logits=torch.empty(num_rows, vocab_size, dtype=dtype),
            cu_num_rows=torch.tensor([0, 5, 10]),
            draft_token_ids=torch.zeros(num_rows, dtype=torch.int64),
            temperature=torch.ones(num_reqs),
            top_p=per_request("p", torch.float32),
            top_k=per_request("k", torch.int64),
            min_p=per_request("m", torch.float32),
            seeds=torch.zeros(num_reqs, dtype=torch.int64),
            positions=torch.zeros(num_rows, dtype=torch.int64),
            strategy=strategy,
            draft_logits=torch.empty(num_rows, vocab_size, dtype=torch.bfloat16) if with_draft_logits else None,
            **{"policy": "normal", "verify_window": 0, "max_candidate_len": None, "max_rows": 5} | options,
        )
        kernels.verify(inputs)

    launch("greedy")
    launch("target_match", "pkm", dtype=torch.float32)
    launch("topp", "pk", verify_window=2, max_candidate_len=5)
    launch("rejection", "pk", with_draft_logits=True)
    if compiles_all:
        launch("target_match")
        launch("topp", "p", policy="accept_all", dtype=torch.float16)
        launch("rejection")
        launch("rejection", "p", policy="reject_all")
        launch("rejection", with_draft_logits=True, draft_rows=torch.zeros(num_rows, dtype=torch.int64))
        # One warp sums up what the blocks left, and then one thread.
        launch("rejection", "p", vocab_size=128_256, with_draft_logits=True)
        launch("target_match", "pk", vocab_size=128_256)
        launch("topp", "pk", vocab_size=4000, verify_window=1, max_candidate_len=1)
    print("compiled", *(len(kernel.compiled) for kernel in taken.values()))


@pytest.mark.parametrize(
    ("compiles_all", "counts"),
    [(False, "4 3 3 3 1"), pytest.param(True, "12 11 11 11 1", marks=pytest.mark.slow)],  # of launches by kernel
)
def test_kernels_compile_for_a_gpu(compiles_all: bool, counts: str, tmp_path: Path) -> None:
    module = "from tests.kernels.verify import test_verify"
    code = f"{module}; test_verify.compile_ahead_of_time(compiles_all={compiles_all})"
    assert f"compiled {counts}" in run_without_interpreter(code, tmp_path)
