"""The strategies' output, as distributions and as text.

Each statistical test also runs with a known bug put back, and asserts that the statistic then fails. This shows that it
has the power to find that bug. Seeds are fixed: nothing is left to chance from run to run.

Functions of the torch backend are replaced. Compiled code is compiled anew, with a line replaced.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numba
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_specplus.verify
from vllm_specplus.verify import VerifyOutput, torch_backend, verify_draft_tokens
from vllm_specplus.verify.noise import gumbel_noise, noise_keys

NUM_SEEDS = 20_000
VOCAB = 12
TOP_P = 0.9
LIMIT = 1e-3  # least p-value that passes

_G = torch.Generator().manual_seed(5)
LOGITS = torch.randn(3, VOCAB, generator=_G) * 1.5
TEMPERATURE = 1.3


def target(row: int, size: int | None = None) -> np.ndarray:
    """The truncated distribution of one row: top-p at the temperature, then the first `size`."""
    p = (LOGITS[row].double() / TEMPERATURE).softmax(dim=0)
    falling = p.sort(descending=True)
    dropped = (falling.values.cumsum(dim=0) - falling.values) >= TOP_P
    if size is not None:
        dropped[size:] = True
    p[falling.indices[dropped]] = 0
    return (p / p.sum()).numpy()


@pytest.fixture(params=["torch", "numba"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def put_back(monkeypatch: pytest.MonkeyPatch, line: str, wrong: str) -> None:
    """Put a bug into the numba backend: a line of its compiled code is replaced by a wrong one."""
    source = Path(vllm_specplus.verify.__path__[0], "_rows.py").read_text()
    assert source.count(line) == 1
    module = ModuleType("wrong_rows")
    # Code without a file has no cache.
    source = source.replace(line, wrong).replace("bits_of, compiled, float_of", "bits_of, float_of")
    module.__dict__["compiled"] = lambda *, allocates, **options: numba.njit(_nrt=allocates, **options)
    exec(source, module.__dict__)
    monkeypatch.setattr(vllm_specplus.verify, "_rows", module)


def verify(drafts: list[int] | torch.Tensor, backend: str = "torch", **options: object) -> VerifyOutput:
    """The same request of two drafts with many seeds; a tensor holds the drafts of every row."""
    n = NUM_SEEDS
    if isinstance(drafts, list):
        drafts = torch.tensor([*drafts, -1]).repeat(n)
    return verify_draft_tokens(
        LOGITS.repeat(n, 1),
        torch.arange(n + 1) * 3,
        drafts,
        torch.full((n,), TEMPERATURE),
        top_p=torch.full((n,), TOP_P),
        seeds=torch.arange(n),
        positions=torch.tensor([40, 41, 42]).repeat(n),
        backend=backend,
        **options,
    )


def chi_squared(tokens: torch.Tensor, p: np.ndarray) -> float:
    """p-value of the tokens under p; a token of probability 0 makes it 0."""
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    if counts[p == 0].sum():
        return 0.0
    return scipy.stats.chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue


def likeliest(row: int) -> int:
    return int(LOGITS[row].argmax())


def first_tokens(backend: str = "torch") -> torch.Tensor:
    return verify([likeliest(0), likeliest(1)], backend, strategy="target_match").token_ids[:, 0]


def second_tokens(backend: str = "torch") -> torch.Tensor:
    """Second tokens of the sequences whose first draft was accepted."""
    out = verify([likeliest(0), likeliest(1)], backend, strategy="target_match")
    return out.token_ids[out.num_tokens > 1, 1]


def test_target_match_keeps_the_distribution(backend: str) -> None:
    # The nuclei hold 6 and 5 tokens. Seen: 3.4 (p = 0.64) and 0.8 (p = 0.94).
    for row, tokens in ((0, first_tokens(backend)), (1, second_tokens(backend))):
        assert len(tokens) > 3000
        assert chi_squared(tokens, target(row)) > LIMIT


def test_power_against_a_fresh_draw_after_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the row that rejects draws again instead of emitting the token it compared.

    The draft then gets p + (1 - p) p instead of p.
    """
    scan = torch_backend._scan

    def draw_again(inputs, layout, drafts, accepted, emitted):
        keys = noise_keys(inputs.seeds[layout.request], inputs.positions + 1000)
        return scan(inputs, replace(layout, noise_key=keys), drafts, accepted, torch.full_like(emitted, -1))

    monkeypatch.setattr(torch_backend, "_scan", draw_again)
    # The statistic moves from 3.4 to 4898.
    assert chi_squared(first_tokens(), target(0)) < LIMIT / 1000


def test_power_against_shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: every row uses the noise of the same position.

    The first tokens cannot show it; the second ones, given the first, do.
    """
    monkeypatch.setattr(torch_backend, "noise_keys", lambda seeds, positions: noise_keys(seeds, positions * 0))
    assert chi_squared(first_tokens(), target(0)) > LIMIT
    # The statistic moves from 0.8 to 2425.
    assert chi_squared(second_tokens(), target(1)) < LIMIT / 1000
    put_back(
        monkeypatch,
        "noise_key = _noise_key(batch.seeds[request], batch.positions[i])",
        "noise_key = _noise_key(batch.seeds[request], 0)",
    )
    assert chi_squared(first_tokens("numba"), target(0)) > LIMIT
    assert chi_squared(second_tokens("numba"), target(1)) < LIMIT / 1000


DRAFT_LOGITS = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(8))


def reject(sampled: bool, backend: str = "torch", **changes: object) -> VerifyOutput:
    """The request with many seeds under `rejection`: two likely drafts, or drafts sampled anew each time."""
    options: dict[str, object] = {"strategy": "rejection"}
    if not sampled:
        return verify([likeliest(0), int(LOGITS[1].argsort(descending=True)[1])], backend, **options)
    q = (DRAFT_LOGITS / TEMPERATURE).softmax(dim=1)
    g = torch.Generator().manual_seed(6)
    drafts = torch.multinomial(q, NUM_SEEDS, replacement=True, generator=g).t().contiguous()
    return verify(drafts.flatten(), **options | {"draft_logits": DRAFT_LOGITS.repeat(NUM_SEEDS, 1)} | changes)


@pytest.mark.parametrize(("sampled", "backend"), [(False, "torch"), (False, "numba"), (True, "torch")])
def test_rejection_keeps_the_distribution(sampled: bool, backend: str) -> None:
    out = reject(sampled, backend)
    first, second = out.token_ids[:, 0], out.token_ids[out.num_tokens > 1, 1]
    assert len(second) > 3000
    assert chi_squared(first, target(0)) > LIMIT
    assert chi_squared(second, target(1)) > LIMIT


def test_rejection_keeps_the_distribution_where_drafts_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that the target forbids was sampled all the same, and what follows is a sample of max(p - q, 0)."""
    masked = LOGITS.clone()
    masked[:, DRAFT_LOGITS[0].argmax()] = -torch.inf
    monkeypatch.setattr(sys.modules[__name__], "LOGITS", masked)
    assert chi_squared(reject(True).token_ids[:, 0], target(0)) > LIMIT
    # Bug: it counts as no draft. The statistic moves from 2.4 to 132.
    proposals = torch_backend._proposals

    def allowed_drafts(inputs, layout):
        return torch_backend._acceptable_drafts(inputs, layout, proposals(inputs, layout))

    monkeypatch.setattr(torch_backend, "_proposals", allowed_drafts)
    assert chi_squared(reject(True).token_ids[:, 0], target(0)) < LIMIT / 1000


def test_rejection_accepts_as_often_as_the_distributions_overlap() -> None:
    """The rate of sampled drafts is the sum of min(p, q), which no other lossless rule exceeds."""
    q = (DRAFT_LOGITS[0].double() / TEMPERATURE).softmax(dim=0).numpy()
    rate = (reject(sampled=True).num_tokens > 1).double().mean().item()
    assert rate == pytest.approx(np.minimum(target(0), q).sum(), abs=0.01)


def test_power_against_sampling_the_target_after_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what follows a rejection is sampled from p, not from max(p - q, 0)."""

    sample = torch_backend._sample_nucleus

    def from_target(inputs, rows, numbers, rejected):
        return sample(inputs, rows, numbers, torch.full_like(rejected, -1))

    monkeypatch.setattr(torch_backend, "_sample_nucleus", from_target)
    # The statistics move from 6.8 and 3.5 to 5097 and 2081.
    assert chi_squared(reject(False).token_ids[:, 0], target(0)) < LIMIT / 1000
    put_back(monkeypatch, "excluded = proposal", "excluded = _NO_TOKEN")
    assert chi_squared(reject(False, "numba").token_ids[:, 0], target(0)) < LIMIT / 1000
    assert chi_squared(reject(True).token_ids[:, 0], target(0)) < LIMIT / 1000


def test_power_against_a_draft_distribution_without_temperature() -> None:
    """Bug: q is the softmax of the draft logits as they are."""
    # The statistic moves from 3.5 to 51.
    warmer = (DRAFT_LOGITS * TEMPERATURE).repeat(NUM_SEEDS, 1)
    assert chi_squared(reject(True, draft_logits=warmer).token_ids[:, 0], target(0)) < LIMIT / 1000


def test_topp_emits_the_renormalised_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    least = int(LOGITS[0].argmin())

    def tokens(backend: str = "torch") -> torch.Tensor:
        out = verify([least, 0], backend, strategy="topp", max_candidate_len=4)
        assert (out.num_tokens == 1).all()
        return out.token_ids[:, 0]

    for backend in ("torch", "numba"):
        assert chi_squared(tokens(backend), target(0, size=4)) > LIMIT
    # Bug: what falls outside the candidates goes to the likeliest token. The statistic moves from
    # 3.5 to 416.
    sample = torch_backend._sample_nucleus

    def to_the_first(inputs, rows, numbers, rejected):
        noise = gumbel_noise(inputs.seeds[rows.request], inputs.positions[numbers], VOCAB)
        drawn = (rows.z[:, :VOCAB] + noise).argmax(dim=1)
        return torch.where(drawn == sample(inputs, rows, numbers, rejected), drawn, rows.z.argmax(dim=1))

    monkeypatch.setattr(torch_backend, "_sample_nucleus", to_the_first)
    assert chi_squared(tokens(), target(0, size=4)) < LIMIT / 1000
    # Bug: the sample is of the nucleus that top-p leaves, not of its first four.
    put_back(monkeypatch, "min(top_k, max_candidates), top_p * mass", "top_k, top_p * mass")
    assert chi_squared(tokens("numba"), target(0, size=4)) < LIMIT / 1000


def test_topp_is_lossy_as_documented() -> None:
    """A draft among the candidates is accepted always, not with its probability."""
    draft = int(LOGITS[0].argsort(descending=True)[2])
    first = verify([draft, 0], strategy="topp").token_ids[:, 0]
    assert 0 < target(0)[draft] < 0.3
    assert (first == draft).all()


def decode(table: torch.Tensor, plan: Iterable[tuple[list[int], str]], strategy: str, seed: int) -> list[int]:
    """Text of a toy model, whose next logits are a function of position and last token."""
    text = [0]
    for drafts, policy in plan:
        step_tokens = [text[-1], *drafts]
        positions = torch.arange(len(text) - 1, len(text) - 1 + len(step_tokens))
        out = verify_draft_tokens(
            torch.stack([table[p % len(table), token] for p, token in zip(positions, step_tokens, strict=True)]),
            torch.tensor([0, len(step_tokens)]),
            torch.tensor([*drafts, -1]),
            torch.tensor([0.9]),
            top_p=torch.tensor([0.95]),
            seeds=torch.tensor([seed]),
            positions=positions,
            strategy=strategy,
            policy=policy,
        )
        text += out.token_ids[0, : int(out.num_tokens)].tolist()
    return text


@settings(max_examples=100)
@given(
    drafts=st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=10),
    policies=st.lists(st.sampled_from(["normal", "reject_all"]), min_size=10, max_size=10),
    strategy=st.sampled_from(["target_match", "greedy"]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_text_does_not_depend_on_drafts(drafts: list[list[int]], policies: list[str], strategy: str, seed: int) -> None:
    table = torch.randn(7, 5, 5, generator=torch.Generator().manual_seed(seed % 1000)) * 1.5
    text = decode(table, zip(drafts, policies, strict=False), strategy, seed)
    alone = decode(table, [([], "normal")] * (len(text) - 1), strategy, seed)
    assert text == alone


def test_right_drafts_are_all_accepted() -> None:
    table = torch.randn(7, 5, 5, generator=torch.Generator().manual_seed(2)) * 1.5
    alone = decode(table, [([], "normal")] * 12, "target_match", seed=9)
    plan = [(alone[1:5], "normal"), (alone[6:12], "normal")]
    assert decode(table, plan, "target_match", seed=9) == alone
