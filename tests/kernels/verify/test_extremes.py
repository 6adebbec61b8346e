"""The fused kernels at the extremes: vocabularies, top-p, equal logits at the cut, and numbers of requests.

Block sizes are those of a GPU. Rows and the rule for rounding are those of the benchmark (``verify_cases.py``). Where
all logits are equal, masses are whole numbers and nothing is rounded.
"""

import sys
from pathlib import Path

import pytest
import torch

from tests.verify.cases import Shape, assert_same, make_case
from vllm_specplus.kernels.verify import launch as kernels
from vllm_specplus.verify import reference, verify_draft_tokens
from vllm_specplus.verify.noise import gumbel_noise

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import verify_cases as benchmark

pytestmark = pytest.mark.interpreter

SAMPLING = ("target_match", "topp", "rejection")


def check(kind: str, setting: benchmark.Setting, vocab_size: int, strategy: str) -> None:
    case = benchmark.make_case(kind, setting, batch=2, num_drafts=1, vocab_size=vocab_size, device="cpu", seed=3)
    benchmark.check_same(case, strategy, benchmark.ours(case, strategy, "triton")())


@pytest.mark.parametrize("strategy", SAMPLING)
@pytest.mark.parametrize("kind", ["peaked", "flat"])
@pytest.mark.parametrize("vocab_size", [5, 63, 64, 8193, 262_144])
def test_vocabularies(vocab_size: int, kind: str, strategy: str) -> None:
    for setting in (benchmark.Setting(0.8), benchmark.Setting(0.8, top_p=0.95), benchmark.Setting(0.8, 0.95, 50)):
        check(kind, setting, vocab_size, strategy)


@pytest.mark.parametrize("strategy", SAMPLING)
@pytest.mark.parametrize("kind", ["peaked", "flat"])
@pytest.mark.parametrize("top_p", [0.001, 0.01, 0.5, 0.99, 0.999, 0.9999])
def test_top_p(top_p: float, kind: str, strategy: str) -> None:
    for vocab_size in (320, 32_000):
        check(kind, benchmark.Setting(0.8, top_p=top_p), vocab_size, strategy)


def verify_flat_row(vocab_size: int, draft: int, size: int, strategy: str, filters: str) -> tuple[int, list[int]]:
    """How many tokens a request with one draft emits where all logits are equal and `size` tokens stay; and which."""
    options = {}
    if "p" in filters:
        # Half a token before the cut, so that no rounding of top-p decides.
        options["top_p"] = torch.tensor([(size - 0.5) / vocab_size])
    if "k" in filters:
        options["top_k"] = torch.tensor([size])
    output = verify_draft_tokens(
        torch.full((2, vocab_size), 3.0),
        torch.tensor([0, 2]),
        torch.tensor([draft, -1]),
        torch.ones(1),
        seeds=torch.tensor([3]),
        positions=torch.tensor([5, 6]),
        strategy=strategy,
        backend="triton",
        **options,
    )
    return int(output.num_tokens), output.token_ids[0].tolist()


@pytest.mark.parametrize("filters", ["p", "k"])
@pytest.mark.parametrize("vocab_size", [5, 64, 1100])
def test_equal_logits_at_the_cut(vocab_size: int, filters: str) -> None:
    """The first tokens stay, as many as the filter says."""
    noise = gumbel_noise(torch.tensor([3]), torch.tensor([5]), vocab_size)[0]
    for size in (1, vocab_size // 2, vocab_size - 1):
        assert verify_flat_row(vocab_size, size - 1, size, "topp", filters)[0] == 2
        num_tokens, tokens = verify_flat_row(vocab_size, size, size, "topp", filters)
        assert (num_tokens, tokens[0]) == (1, int(noise[:size].argmax()))
        sample = int(noise[:size].argmax())
        assert verify_flat_row(vocab_size, sample, size, "target_match", filters)[0] == 2
        num_tokens, tokens = verify_flat_row(vocab_size, size, size, "rejection", filters)
        assert num_tokens == 1
        assert tokens[0] < size


@pytest.mark.parametrize("filters", ["p", "k"])
def test_equal_logits_of_a_long_row(filters: str) -> None:
    """One verification: the search for the cut of such a row takes long under the interpreter."""
    vocab_size, size = 262_144, 50
    noise = gumbel_noise(torch.tensor([3]), torch.tensor([5]), vocab_size)[0]
    num_tokens, tokens = verify_flat_row(vocab_size, size, size, "topp", filters)
    assert (num_tokens, tokens[0]) == (1, int(noise[:size].argmax()))


@pytest.mark.parametrize(
    ("num_reqs", "strategy"),
    [
        (1, "rejection"),
        (1, "greedy"),
        (129, "topp"),
        (129, "target_match"),
        pytest.param(512, "rejection", marks=pytest.mark.slow),
        (512, "greedy"),
    ],
)
def test_many_requests(num_reqs: int, strategy: str) -> None:
    """More requests than one step of the search for a row's request takes; some have no rows."""
    counts = [(1, 0, 2)[i % 3] for i in range(num_reqs)]
    shape = Shape(counts, 65, torch.bfloat16, strategy, "normal", 0, None, ["normal", "tied"], {"top_p"}, seed=num_reqs)
    inputs = make_case(shape)
    assert_same(kernels.verify(inputs), reference.verify(inputs))
