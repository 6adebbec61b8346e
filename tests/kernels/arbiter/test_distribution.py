"""Sampled drafts that the arbiter's kernel chooses, verified, keep the target's distribution."""

import pytest
import torch
from scipy.stats import chisquare

from tests.kernels.limits import limits_of
from vllm_specplus.kernels.arbiter import NUM_TOTALS, choose_and_settle, judge_and_offer, make_state, offer_chains
from vllm_specplus.kernels.arbiter.state import ALONE, CONTRARY, DIFFERED, NUM_KEYS, ONE
from vllm_specplus.kernels.drafts import DraftCounts
from vllm_specplus.sources import NGRAM
from vllm_specplus.verify import verify_draft_tokens

pytestmark = pytest.mark.interpreter

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
VOCAB, WIDTH, NUM_REQS = len(P), 2, 4000


def p_value(*, is_blind: bool) -> float:
    """Chi-squared of the first tokens of many requests.

    The model samples a draft of each from Q, and history offers token 0. A draft that differs from history's seems not
    worth its slot.
    """
    chances = torch.full((NUM_KEYS.value,), ONE.value * 3 // 4)
    chances[ALONE.value] = ONE.value * 7 // 8
    chances[DIFFERED.value : CONTRARY.value] = ONE.value // 9
    state = make_state(
        VOCAB,
        num_model_steps=1,
        num_speculative_tokens=WIDTH,
        chain_sources=[NGRAM, NGRAM],
        starts=[0, 1],
        prior=chances,
        is_blind=is_blind,
    )
    # A choice for each token that the model may have sampled.
    rows, one = torch.arange(VOCAB), torch.ones(VOCAB, dtype=torch.int32)
    limits = limits_of([WIDTH] * VOCAB)
    texts, num_new = (torch.zeros(VOCAB, 1, dtype=torch.int32), one), torch.zeros(1, dtype=torch.int64)
    judge_and_offer(state, *texts, rows, num_new, limits, rows[:, None])
    both = one.repeat(2, 1)
    offer_chains(state, rows, torch.zeros(2, VOCAB, 1, dtype=torch.int64), both, 4 * both)
    drafts = torch.empty(VOCAB, WIDTH, dtype=torch.int64)
    by_state = torch.empty(3, VOCAB, dtype=torch.int32)
    prices, totals = torch.tensor([ONE.value // 50, ONE.value, 0]), torch.zeros(NUM_TOTALS, dtype=torch.int64)
    outputs = drafts, DraftCounts(*by_state[:2]), by_state[2], totals, totals.new_empty(NUM_TOTALS + 1 + VOCAB)
    choose_and_settle(state, one, rows, limits, prices, *outputs)

    sampled = torch.multinomial(Q, NUM_REQS, replacement=True, generator=torch.Generator().manual_seed(0))
    is_model = torch.arange(WIDTH + 1) < by_state[1, sampled][:, None]
    no_draft = torch.full((NUM_REQS, 1), -1)
    num_rows = NUM_REQS * (WIDTH + 1)
    out = verify_draft_tokens(
        P.log().repeat(num_rows, 1),
        torch.arange(NUM_REQS + 1) * (WIDTH + 1),
        torch.cat([drafts[sampled], no_draft], dim=1).flatten(),
        torch.ones(NUM_REQS),
        seeds=torch.arange(NUM_REQS),
        positions=torch.arange(WIDTH + 1).repeat(NUM_REQS),
        strategy="rejection",
        draft_logits=Q.log()[None],
        draft_rows=torch.where(is_model, 0, -1).flatten(),
        backend="torch",  # the interpreter would take minutes
    )
    counts = torch.bincount(out.token_ids[:, 0], minlength=VOCAB)
    return float(chisquare(counts.numpy(), (P * NUM_REQS).numpy()).pvalue)


def test_a_blind_choice_keeps_the_distribution() -> None:
    assert p_value(is_blind=True) > 1e-3


def test_power() -> None:
    """Bug: the choice looks at drafts that were sampled, and drops those that differ from history's."""
    assert p_value(is_blind=False) < 1e-12
