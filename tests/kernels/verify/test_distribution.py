"""The kernels keep the target's distribution, and the same statistic sees each bug that is put back.

tests/verify/test_distribution.py tests the torch backend with more draws and filters: the interpreter is slow. Seeds
are fixed.
"""

from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl

from tests.verify.test_distribution import DRAFT_LOGITS, LOGITS, TEMPERATURE, TOP_P, chi_squared, likeliest, target
from vllm_specplus.kernels.verify import emit, head, judge, launch, nucleus, order, race, request_stats
from vllm_specplus.kernels.verify.arguments import Draft, draft_of
from vllm_specplus.kernels.verify.head import sample_of_head
from vllm_specplus.kernels.verify.noise import gumbel_noise, least_uniform
from vllm_specplus.kernels.verify.nucleus import NEG_INF, POS_INF, Residual, score_tokens
from vllm_specplus.kernels.verify.order import sample_before
from vllm_specplus.verify import verify_draft_tokens

pytestmark = pytest.mark.interpreter

NUM_SEEDS = 400
P = (LOGITS[0].double() / TEMPERATURE).softmax(dim=0)


def p_value(mode: str) -> float:
    """Chi-squared of the first tokens of a request of one draft, with many seeds."""
    drafts, expected, logits = torch.full((NUM_SEEDS,), likeliest(0)), P.clone(), LOGITS[:2].clone()
    mode, _, has_top_p = mode.partition(", ")
    options: dict[str, object] = {"strategy": mode}
    if mode == "topp":
        # The unlikeliest token is not accepted. A sample of the likeliest four follows.
        drafts = torch.full((NUM_SEEDS,), int(P.argmin()))
        expected[P.argsort()[:-4]] = 0
        options["max_candidate_len"] = 4
    if mode in ("sampled drafts", "masked drafts"):
        draft_logits, first = DRAFT_LOGITS[:2].clone(), DRAFT_LOGITS[0].argmax()
        if mode == "masked drafts":
            # The target forbids the token of most drafts.
            expected[first], logits[:, first] = 0, -torch.inf
            draft_logits[:, first] += 3
        g = torch.Generator().manual_seed(3)
        q = (draft_logits[0].double() / TEMPERATURE).softmax(dim=0)
        drafts = torch.multinomial(q, NUM_SEEDS, replacement=True, generator=g)
        options = {"strategy": "rejection", "draft_logits": draft_logits.repeat(NUM_SEEDS, 1)}
    if has_top_p:
        expected = torch.from_numpy(target(0))
        options["top_p"] = torch.full((NUM_SEEDS,), TOP_P)
    out = verify_draft_tokens(
        logits.repeat(NUM_SEEDS, 1),
        torch.arange(NUM_SEEDS + 1) * 2,
        torch.stack([drafts, torch.full_like(drafts, -1)], dim=1).flatten(),
        torch.full((NUM_SEEDS,), TEMPERATURE),
        seeds=torch.arange(NUM_SEEDS) - 200,
        positions=torch.tensor([40, 41]).repeat(NUM_SEEDS),
        backend="triton",
        **options,
    )
    return chi_squared(out.token_ids[:, 0], (expected / expected.sum()).numpy())


IN_A_NUCLEUS = ["rejection, top-p", "sampled drafts, top-p"]


@pytest.mark.parametrize(
    "mode",
    ["target_match", "topp", "rejection", "sampled drafts", "masked drafts", "target_match, top-p", *IN_A_NUCLEUS],
)
def test_keeps_the_distribution(mode: str) -> None:
    assert p_value(mode) > 1e-3


@triton.jit
def forgets_the_draft(row, key, residual, tokens, DRAFT_LOGITS):  # noqa: N803
    """Bug: the token after a rejection is sampled from p, not from max(p - q, 0)."""
    return score_tokens(row, key, Residual(residual.draft_ptr, -1, 0.0, 0.0, POS_INF), tokens, DRAFT_LOGITS)


@triton.jit
def takes_one_half(seed, position):
    """Bug: a draft's probability is compared with a constant."""
    return (position * 0).to(tl.float32) + 0.5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rejection", "sampled drafts", "sampled drafts, top-p"])
@pytest.mark.parametrize(
    ("module", "name", "bug"),
    [(order, "score_tokens", forgets_the_draft), (request_stats, "acceptance_uniform", takes_one_half)],
)
def test_power(mode: str, module: ModuleType, name: str, bug: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, bug)
    if name == "score_tokens":
        # That of rows with a head.
        monkeypatch.setattr(head, name, bug)
    assert p_value(mode) < 1e-6


@triton.jit
def same_noise(seed, position, tokens):
    """Bug: the noise of every request is the same."""
    return gumbel_noise(seed & 0, position, tokens)


@triton.jit
def same_uniform(seed, position, starts, offsets):
    """The same bug, where the noise is bounded."""
    return least_uniform(seed & 0, position, starts, offsets)


@pytest.mark.slow
def test_power_of_target_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nucleus, "gumbel_noise", same_noise)
    monkeypatch.setattr(race, "least_uniform", same_uniform)
    assert p_value("target_match") < 1e-6


@triton.jit
def allows_all(logits, rows, i_row, temperature):
    """Bug: a masked draft counts as none, so a sample of p follows it."""
    draft = draft_of(logits, rows, i_row, temperature)
    return Draft(tl.where(draft.is_usable, draft.token, -1), draft.logit, draft.is_usable)


@pytest.mark.slow
def test_power_with_masked_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "draft_of", allows_all)
    # 4e-5, where it is 0.09 without the bug.
    assert p_value("masked drafts") < 1e-3


@triton.jit
def forgets_the_cut(row, head, inside, key, residual, DRAFT_LOGITS):  # noqa: N803
    """Bug: any token of the head is a candidate."""
    return sample_of_head(row, head, head.tokens < row.vocab_size, key, residual, DRAFT_LOGITS)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["topp", "rejection, top-p"])
def test_power_in_a_nucleus(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "sample_of_head", forgets_the_cut)
    assert p_value(mode) < 1e-6


@triton.jit
def samples_all(row, groups, num_listed, key, residual, token, logit, floor, sizes, DRAFT_LOGITS):  # noqa: N803
    """Bug: a sample may be less likely than every candidate."""
    return sample_before(row, groups, num_listed, key, residual, token, logit, NEG_INF, sizes, DRAFT_LOGITS)


@triton.jit
def counts_none(row, groups, num_listed, token, logit, sizes):
    """The same bug, where such a sample is found out."""
    return tl.zeros((), tl.int32)


@pytest.mark.parametrize("is_broken", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_row_without_a_head(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "HEAD_SIZE", 2)
    if is_broken:
        monkeypatch.setattr(emit, "sample_before", samples_all)
        monkeypatch.setattr(emit, "count_before", counts_none)
    assert (p_value("topp") < 1e-6) == is_broken
