"""The public function: what it takes, what it refuses, what it leaves alone."""

import dataclasses

import pytest
import torch

from vllm_specplus.verify import STRATEGIES, VerifyOutput, reference, verify_draft_tokens
from vllm_specplus.verify.checks import make_inputs


def arguments(**changes: object) -> dict:
    """Two requests, of two drafts and of none, over six tokens."""
    g = torch.Generator().manual_seed(0)
    return {
        "logits": torch.randn(4, 6, generator=g),
        "cu_num_rows": torch.tensor([0, 3, 4], dtype=torch.int32),
        "draft_token_ids": torch.tensor([1, 2, -1, -1]),
        "temperature": torch.tensor([0.8, 1.0]),
        "seeds": torch.tensor([5, 6]),
        "positions": torch.tensor([10, 11, 12, 3]),
        "strategy": "target_match",
    } | changes


def test_output() -> None:
    args = arguments(policy="accept_all")
    before = args["logits"].clone()
    out = verify_draft_tokens(**args)
    assert isinstance(out, VerifyOutput)
    assert out.token_ids.dtype == torch.int64
    assert out.num_tokens.dtype == torch.int32
    assert out.token_ids.shape == (2, 3)
    assert out.num_tokens.tolist() == [3, 1]
    assert out.token_ids[0, :2].tolist() == [1, 2]
    assert out.token_ids[1, 1:].tolist() == [-1, -1]
    assert torch.equal(args["logits"], before)
    with pytest.raises(dataclasses.FrozenInstanceError):
        out.token_ids = before  # type: ignore[misc]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_drafts_it_samples(strategy: str) -> None:
    args = arguments(
        cu_num_rows=torch.arange(5),
        draft_token_ids=torch.full((4,), -1),
        temperature=torch.tensor([0.0, 0.5, 1.0, 2.0]),
        seeds=torch.arange(4),
        strategy=strategy,
    )
    out = verify_draft_tokens(**args)
    assert out.num_tokens.tolist() == [1] * 4
    assert out.token_ids.shape == (4, 1)
    assert out.token_ids[0, 0] == args["logits"][0].argmax()


def test_no_requests_and_requests_without_rows() -> None:
    nothing = arguments(
        logits=torch.zeros(0, 6),
        cu_num_rows=torch.tensor([0]),
        draft_token_ids=torch.zeros(0, dtype=torch.int64),
        temperature=torch.zeros(0),
        seeds=None,
        positions=None,
    )
    out = verify_draft_tokens(**nothing)
    assert out.token_ids.shape == (0, 0)
    assert out.num_tokens.shape == (0,)
    some = arguments(
        cu_num_rows=torch.tensor([0, 0, 4, 4]),
        temperature=torch.zeros(3),
        seeds=torch.zeros(3).int(),
    )
    out = verify_draft_tokens(**some)
    assert out.num_tokens.tolist()[::2] == [0, 0]
    assert out.token_ids[0].tolist() == [-1] * 4
    assert verify_draft_tokens(**nothing | {"max_rows": 5}).token_ids.shape == (0, 5)


@pytest.mark.parametrize("name", ["draft_token_ids", "temperature", "top_p", "seeds", "positions"])
def test_arguments_may_be_strided(name: str) -> None:
    """The kernels read vectors as they lie, so these are made contiguous before any backend sees them."""
    values = arguments(strategy="topp", top_p=torch.tensor([0.7, 0.9]))
    strided = torch.stack([values[name], torch.zeros_like(values[name])], dim=1)[:, 0]
    assert not strided.is_contiguous()
    full = {"top_p": None, "top_k": None, "min_p": None, "seeds": None, "positions": None, "policy": "normal"}
    full |= {"verify_window": 0, "max_candidate_len": None, "max_rows": None}
    inputs = make_inputs(**full | values | {name: strided})
    assert getattr(inputs, name).is_contiguous()
    assert torch.equal(getattr(inputs, name).double(), values[name].double())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("has_filters", [False, True])
def test_arguments_may_require_gradients(strategy: str, temperature: float, has_filters: bool) -> None:
    args = arguments(strategy=strategy, temperature=torch.tensor([temperature, 1.0]))
    if has_filters:
        args |= {"top_p": torch.tensor([0.7, 0.9]), "min_p": torch.tensor([0.1, 0.0])}
    if strategy == "rejection":
        args["draft_logits"] = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    expected = verify_draft_tokens(**args)
    leaves = {
        name: value.clone().requires_grad_()
        for name, value in args.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    # Like the outputs of a model, which are no leaves.
    outputs = {name: value * 1 for name, value in leaves.items()}
    for with_gradients in (leaves, outputs):
        found = verify_draft_tokens(**args | with_gradients)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.num_tokens, expected.num_tokens)
        assert not found.token_ids.requires_grad


def test_same_arguments_same_tokens() -> None:
    for strategy in STRATEGIES:
        args = arguments(strategy=strategy, top_p=torch.tensor([0.7, 0.9]))
        first, again = verify_draft_tokens(**args), verify_draft_tokens(**args)
        assert torch.equal(first.token_ids, again.token_ids)


def test_without_seeds_noise_is_fresh_and_follows_the_torch_generator() -> None:
    args = arguments(
        logits=torch.zeros(64, 50),
        cu_num_rows=torch.arange(65),
        draft_token_ids=torch.full((64,), -1),
        temperature=torch.ones(64),
        seeds=None,
        positions=None,
    )
    torch.manual_seed(3)
    first, second = (verify_draft_tokens(**args).token_ids for _ in range(2))
    torch.manual_seed(3)
    again = verify_draft_tokens(**args).token_ids
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    # Rows of one call differ as well: 64 draws among 50 equal tokens give about 36 of them.
    assert len(set(first.flatten().tolist())) > 20


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dtypes_and_strides_do_not_matter(strategy: str) -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    filters = {
        "top_p": torch.tensor([0.75, 0.5]),
        "top_k": torch.tensor([4, 0]),
        "min_p": torch.tensor([0.0, 0.125]),
    }
    args = arguments(strategy=strategy, logits=logits.float(), **filters)
    expected = verify_draft_tokens(**args)
    changed = {
        name: value.to(torch.int32)
        for name, value in args.items()
        if isinstance(value, torch.Tensor) and value.dtype == torch.int64
    }
    changed |= {name: args[name].double() for name in ("temperature", "top_p", "min_p")}
    changed["cu_num_rows"] = args["cu_num_rows"].long()
    wide = torch.zeros(4, 12, dtype=torch.bfloat16)
    wide[:, ::2] = logits
    for view in (logits, logits.t().contiguous().t(), wide[:, ::2], logits.float()):
        out = verify_draft_tokens(**args | changed | {"logits": view})
        assert torch.equal(out.token_ids, expected.token_ids)
        assert torch.equal(out.num_tokens, expected.num_tokens)


def test_max_rows_sets_the_width() -> None:
    args = arguments(policy="accept_all")
    narrow, wide = verify_draft_tokens(**args), verify_draft_tokens(**args, max_rows=5)
    assert wide.token_ids.shape == (2, 5)
    assert torch.equal(wide.token_ids[:, :3], narrow.token_ids)
    assert (wide.token_ids[:, 3:] == -1).all()


def test_all_nan_is_harmless() -> None:
    for strategy in STRATEGIES:
        for policy in ("normal", "accept_all"):
            args = arguments(logits=torch.full((4, 6), torch.nan), strategy=strategy, policy=policy)
            out = verify_draft_tokens(**args, top_p=torch.tensor([0.5, 1.0]))
            assert out.num_tokens.tolist() == [1, 1]
            assert out.token_ids[:, 0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"strategy": "top-p"}, ValueError, ["strategy", "'top-p'", "'topp'", "'greedy'"]),
        ({"policy": "accept"}, ValueError, ["policy", "'accept'", "'accept_all'"]),
        ({"backend": "cuda"}, ValueError, ["backend", "'cuda'", "'auto', 'numba', 'torch', 'triton'"]),
        ({"backend": "numba", "policy": "reject_all"}, ValueError, ["backend", "'reject_all'", "policy 'normal'"]),
        (
            {"backend": "numba", "draft_logits": torch.zeros(4, 6), "strategy": "rejection"},
            ValueError,
            ["backend", "drafts are sampled", "no draft_logits"],
        ),
        ({"backend": "triton"}, ValueError, ["'triton'", "cpu", "TRITON_INTERPRET=1"]),
        ({"workspace": object()}, ValueError, ["workspace", "'auto'", "'triton'"]),
        ({"workspace": object(), "backend": "numba"}, ValueError, ["workspace", "'numba'", "'triton'"]),
        ({"draft_logits": torch.zeros(4, 6)}, ValueError, ["draft_logits", "'target_match'", "'rejection'"]),
        (
            {"draft_logits": torch.zeros(3, 6), "strategy": "rejection"},
            ValueError,
            ["draft_logits", "(3, 6)", "(4, 6)"],
        ),
        ({"draft_logits": 1, "strategy": "rejection"}, TypeError, ["draft_logits", "int", "torch.Tensor"]),
        ({"draft_rows": torch.zeros(4, dtype=torch.int64)}, ValueError, ["draft_rows", "without draft_logits"]),
        (
            {"draft_logits": torch.zeros(2, 6), "draft_rows": torch.tensor([0, 1, -1, 2]), "strategy": "rejection"},
            ValueError,
            ["draft_rows holds 2"],
        ),
        (
            {"draft_logits": torch.zeros(0, 6), "draft_rows": torch.full((4,), -1), "strategy": "rejection"},
            ValueError,
            ["draft_logits", "(0, 6)", "at least one row"],
        ),
        ({"draft_logits": torch.zeros(4, 0), "strategy": "rejection"}, ValueError, ["draft_logits", "(4, 0)"]),
        (
            {"draft_logits": torch.zeros(4, 6).to_sparse(), "strategy": "rejection"},
            ValueError,
            ["draft_logits", "sparse_coo", "dense"],
        ),
        ({"logits": torch.zeros(4, 6).to_sparse()}, ValueError, ["logits", "sparse_coo", "dense"]),
        ({"temperature": torch.ones(2).to_sparse()}, ValueError, ["temperature", "sparse_coo", "dense"]),
        ({"draft_token_ids": torch.ones(4).long().to_sparse()}, ValueError, ["draft_token_ids", "sparse_coo"]),
        ({"logits": [[0.0]]}, TypeError, ["logits", "list", "torch.Tensor"]),
        ({"logits": torch.zeros(4, 6).int()}, TypeError, ["logits", "int32", "float32"]),
        ({"logits": torch.zeros(4, 6, device="meta")}, ValueError, ["logits", "meta", "that holds values"]),
        ({"logits": torch.zeros(24)}, ValueError, ["logits", "(24,)", "2 dimensions"]),
        ({"logits": torch.zeros(4, 0)}, ValueError, ["logits", "(4, 0)", "empty"]),
        ({"temperature": torch.zeros(2).int()}, TypeError, ["temperature", "int32"]),
        ({"temperature": torch.tensor([-1.0, 1])}, ValueError, ["temperature", "-1.0", "0.0"]),
        ({"temperature": torch.tensor([torch.nan, 1])}, ValueError, ["temperature", "nan"]),
        ({"cu_num_rows": torch.tensor([0, 4])}, ValueError, ["cu_num_rows", "2 elements", "3"]),
        ({"cu_num_rows": torch.tensor([0, 3, 5])}, ValueError, ["cu_num_rows", "[0, 3, 5]", "4"]),
        ({"cu_num_rows": torch.tensor([0, 5, 4])}, ValueError, ["cu_num_rows", "[0, 5, 4]"]),
        ({"cu_num_rows": None}, TypeError, ["cu_num_rows", "NoneType"]),
        ({"draft_token_ids": torch.zeros(3).long()}, ValueError, ["draft_token_ids", "3", "4"]),
        ({"draft_token_ids": torch.zeros(4)}, TypeError, ["draft_token_ids", "float32", "int64"]),
        ({"draft_token_ids": torch.zeros(4).long().to("meta")}, ValueError, ["meta", "cpu"]),
        ({"top_p": torch.tensor([0.5, 1.5])}, ValueError, ["top_p", "1.5", "0.0 to 1.0"]),
        ({"top_p": torch.tensor([0.5])}, ValueError, ["top_p", "1 elements", "2"]),
        ({"top_k": torch.tensor([0, -2])}, ValueError, ["top_k", "-2", "-1"]),
        ({"top_k": torch.tensor([0.5, 1])}, TypeError, ["top_k", "float32", "int64"]),
        ({"min_p": torch.tensor([0.5, -0.5])}, ValueError, ["min_p", "-0.5", "0.0 to 1.0"]),
        ({"positions": None}, ValueError, ["positions", "None", "seeds"]),
        ({"seeds": torch.tensor([0.0, 1.0])}, TypeError, ["seeds", "float32", "int64"]),
        ({"verify_window": 1}, ValueError, ["verify_window", "1", "target_match", "topp"]),
        ({"verify_window": -1}, ValueError, ["verify_window", "-1", "at least 0"]),
        ({"verify_window": 1.5}, TypeError, ["verify_window", "1.5", "integer"]),
        ({"max_candidate_len": 5}, ValueError, ["max_candidate_len", "5", "topp"]),
        ({"max_candidate_len": 0}, ValueError, ["max_candidate_len", "0", "at least 1"]),
        ({"max_rows": 2}, ValueError, ["max_rows", "2", "3 rows"]),
        ({"max_rows": 0}, ValueError, ["max_rows", "0", "at least 1"]),
        ({"max_rows": 2**70}, ValueError, ["max_rows", str(2**70), "below 2**31"]),
        ({"max_candidate_len": 2**63, "strategy": "topp"}, ValueError, ["max_candidate_len", str(2**63)]),
        ({"verify_window": 2**70, "strategy": "topp"}, ValueError, ["verify_window", str(2**70)]),
    ],
)
def test_errors_name_the_argument_and_what_is_allowed(changes: dict, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        verify_draft_tokens(**arguments(**changes))
    for word in words:
        assert word in str(caught.value)


def test_a_window_is_bounded_by_the_rows() -> None:
    """Its cost does not grow past what the longest request has."""
    full = {"top_p": torch.tensor([0.3, 0.3]), "top_k": None, "min_p": None, "max_candidate_len": None}
    full |= {"policy": "normal", "max_rows": None, "strategy": "topp"}
    longest = make_inputs(**arguments(**full, verify_window=3))
    huge = make_inputs(**arguments(**full, verify_window=2**31 - 1))
    assert huge.verify_window == longest.verify_window == 3
    assert torch.equal(reference.verify(huge).token_ids, reference.verify(longest).token_ids)


def test_a_window_larger_than_the_rows_accepts_no_second_choice() -> None:
    """A bounded window still asks for more drafts than a request has."""
    logits = torch.zeros(4, 6)
    logits[:, 0], logits[:, 1] = 9, 8
    args = {"logits": logits, "strategy": "topp", "top_p": torch.tensor([0.1, 0.1])}
    args |= {"draft_token_ids": torch.tensor([1, 0, -1, -1])}
    assert verify_draft_tokens(**arguments(**args, verify_window=1)).num_tokens.tolist() == [3, 1]
    for window in (2, 3, 4, 10**9):
        assert verify_draft_tokens(**arguments(**args, verify_window=window)).num_tokens.tolist() == [1, 1]
