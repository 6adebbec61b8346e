"""What the adaptive drafter asks of the sources and tells the arbiter."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.proposers.reference import make_history
from vllm_specplus.proposers import _arbiter
from vllm_specplus.proposers.adaptive import AdaptiveDrafter
from vllm_specplus.proposers.arbiter import Prices
from vllm_specplus.proposers.history import History, Match
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.sources import NGRAM

_ROOT = Path(__file__).parents[2]
STEPS = 3


def make_drafter(**options: Any) -> AdaptiveDrafter:
    return AdaptiveDrafter({}, max_num_reqs=4, num_model_steps=STEPS, num_speculative_tokens=4, **options)


def history(**texts: list[int]) -> History:
    return make_history(texts, 32)


def trials(drafter: AdaptiveDrafter) -> int:
    return int(drafter.arbiter.table.trials.sum() - _arbiter.PRIOR_TRIALS * _arbiter.NUM_KEYS)


def test_drafts_inside_a_prompt_are_not_judged() -> None:
    """The draft model goes on from a token of the prompt there, and the first token of the output comes much later."""
    drafter, drafted = make_drafter(), np.full((1, STEPS), 7)
    for text, limit in (([1, 2, 3], 0), ([1, 2, 3, 9], 4)):
        drafter.plan(history(a=text), np.array([limit]), [None])
        assert trials(drafter) == 0
        drafter.draft(history(a=text), np.array([limit]), drafted)
    drafter.plan(history(a=[1, 2, 3, 9, 8]), np.array([4]), [None])
    assert trials(drafter) == _arbiter.TRIAL


def test_one_pass_is_made_where_no_request_may_draft() -> None:
    """The draft model's cache has to keep up; later passes would serve nobody."""
    drafter = make_drafter()
    texts = history(a=[1, 2, 3], b=[1])
    assert drafter.plan(texts, np.array([0, 0]), [None, None]) == 1
    drafter.draft(texts, np.array([0, 0]), np.full((2, 1), 7))
    assert drafter.plan(texts, np.array([0, 2]), [None, None]) == STEPS


def test_data_parallel_ranks_make_all_passes() -> None:
    """Whatever a pass costs, and though no request may draft: another rank's may."""
    drafter = make_drafter(makes_all_passes=True)
    texts = history(a=[1, 2, 3])
    for limit in (0, 4):
        drafter.set_prices(Prices(slot=0.02, step=1.0, first_pass=9.0, later_pass=9.0))
        assert drafter.plan(texts, np.array([limit]), [None], without_drafts=["a"]) == STEPS
        assert not drafter.is_asleep(["a"])
        drafter.draft(texts, np.array([limit]), np.full((1, STEPS), 7))
    # Passes that are made anyway are no reason to draft less.
    drafter = make_drafter(makes_all_passes=True)
    drafter.set_prices(Prices(slot=0.02, step=1.0, first_pass=9.0, later_pass=9.0))
    drafter.plan(texts, np.array([4]), [None])
    (drafts,) = drafter.draft(texts, np.array([4]), np.full((1, STEPS), 7)).to_lists()
    assert drafts


def test_a_request_that_allows_no_drafts_is_asleep_from_the_start() -> None:
    drafter = make_drafter()
    assert drafter.plan(history(a=[1]), np.array([0]), [None], without_drafts=["a", "stranger"]) == 0
    assert drafter.is_asleep(["a"])
    assert drafter.plan(history(a=[1], b=[1]), np.array([0, 4]), [None, None], without_drafts=["a"]) == STEPS
    assert not drafter.is_asleep(["b"])


def test_passes_are_divided_among_the_requests_that_they_draft_for() -> None:
    """So one that is in its prompt, as the second is here, pays nothing, and leaves nothing unpaid."""

    def credit_of_first(**texts: list[int]) -> int:
        drafter = make_drafter()
        drafter.set_prices(Prices(0.02, 1.0, 0.3, 0.3))
        limits = np.array([4, 0][: len(texts)])
        passes = drafter.plan(history(**texts), limits, [None] * len(texts))
        drafter.draft(history(**texts), limits, np.full((len(texts), passes), 7))
        return int(drafter.arbiter._credits[drafter.arbiter._rows[0]])

    assert credit_of_first(a=[1], b=[2, 3]) == credit_of_first(a=[1])


def test_offers_to_a_request_whose_name_begins_anew_are_withdrawn() -> None:
    """A session goes on under its name with more text. What its model has earned it stays."""
    drafter = make_drafter()
    for text in ([1], [1, 2]):
        drafter.plan(history(a=text), np.array([4]), [None])
        drafter.draft(history(a=text), np.array([4]), np.full((1, STEPS), 7))
    before = trials(drafter)
    credit = drafter.arbiter._credits.copy()
    drafter.withdraw(["a", "stranger"])
    drafter.plan(history(a=[1, 2, 5, 5, 5]), np.array([4]), [None])
    assert trials(drafter) == before > 0
    np.testing.assert_array_equal(drafter.arbiter._credits, credit)


class Copies:
    """Goes on with the same tokens in any text."""

    def __init__(self, token_ids: list[int]):
        self._token_ids = token_ids

    def match(self, history: History, model_drafts: np.ndarray | None, max_drafts: np.ndarray) -> Match:
        num_reqs = len(history.req_ids)
        token_ids = np.array([self._token_ids] * num_reqs, np.int32)
        lengths = np.minimum(max_drafts, len(self._token_ids)).astype(np.int32)
        return Match(token_ids, lengths, np.full(num_reqs, 30, np.int32))


def test_nothing_is_drafted_that_ends_a_text_or_would_stand_behind() -> None:
    stops = {"a": [9], "b": [8, 6, 7], "c": [1, 2, 3, 4, 6], "d": []}
    options = {"num_model_steps": 0, "num_speculative_tokens": 4, "stop_token_ids": stops}
    drafter = AdaptiveDrafter({NGRAM: Copies([5, 6, 7, 9])}, max_num_reqs=4, **options)
    texts, limits = history(a=[1], b=[1], c=[1], d=[1]), np.full(4, 4)
    drafter.plan(texts, limits, [None] * 4)
    drafts = drafter.draft(texts, limits, np.empty((4, 0), np.int32)).to_lists()
    # The third has more such tokens than there is room for.
    assert drafts == [[5, 6, 7], [5], [5, 6, 7, 9], [5, 6, 7, 9]]


def test_no_copy_follows_a_token_of_the_models_that_ends_a_text() -> None:
    options = {"num_model_steps": STEPS, "num_speculative_tokens": 4, "stop_token_ids": {"a": [7]}}
    drafter = AdaptiveDrafter({NGRAM: Copies([5])}, max_num_reqs=1, **options)
    for model, expected in (([3, 3, 7], [1, 1, 1, 0, 0]), ([7, 3, 3], [1, 0, 0, 0, 0])):
        drafter.plan(history(a=[1]), np.array([4]), [None])
        drafter.draft(history(a=[1]), np.array([4]), np.array([model]))
        assert drafter.arbiter._offers.lengths[drafter.arbiter._rows[0]].tolist() == expected


def test_a_reference_ends_where_it_says_that_the_text_does() -> None:
    reference = ReferenceText(np.arange(1, 9, dtype=np.int32), edit=False, min_ngram_size=1, max_ngram_size=3)
    options = {"num_model_steps": 0, "num_speculative_tokens": 4, "stop_token_ids": {"a": [5]}}
    drafter = AdaptiveDrafter({}, max_num_reqs=1, **options)
    begun = History(["a"], np.array([[1, 2]], np.int32), np.array([2]), np.array([0]))
    drafter.plan(begun, np.array([4]), [reference])
    assert drafter.draft(begun, np.array([4]), np.empty((1, 0), np.int32)).to_lists() == [[3, 4]]


def test_what_ends_a_text_is_read_anew_with_a_name_that_begins_anew() -> None:
    stops = {"a": [5]}
    options = {"num_model_steps": 0, "num_speculative_tokens": 2, "stop_token_ids": stops}
    drafter = AdaptiveDrafter({NGRAM: Copies([5, 6])}, max_num_reqs=1, **options)
    found = []
    for now in ([5], [6]):
        stops["a"] = now
        drafter.withdraw(["a"])
        drafter.plan(history(a=[1]), np.array([2]), [None])
        found.append(drafter.draft(history(a=[1]), np.array([2]), np.empty((1, 0), np.int32)).to_lists())
    assert found == [[[]], [[5]]]


def test_limits_above_the_slots_count_as_the_slots() -> None:
    tokens = np.full((1, 9), 7, np.int32)
    matcher = SimpleNamespace(
        match=lambda history, drafts, limits: Match(tokens, np.full(1, 9, np.int32), np.full(1, 30, np.int32))
    )
    reference = ReferenceText(np.arange(1, 9, dtype=np.int32), edit=False, min_ngram_size=1, max_ngram_size=3)
    for matchers, references, expected in (({NGRAM: matcher}, [None], [7] * 4), ({}, [reference], [3, 4, 5, 6])):
        drafter = AdaptiveDrafter(matchers, max_num_reqs=1, num_model_steps=0, num_speculative_tokens=4)
        begun = History(["a"], np.array([[1, 2]], np.int32), np.array([2]), np.array([0]))
        assert drafter.plan(begun, np.array([9]), references) == 0
        assert drafter.draft(begun, np.array([9]), np.empty((1, 0), np.int32)).to_lists() == [expected]


def test_the_first_step_compiles_nothing() -> None:
    """Otherwise a step's time, and that of its passes, would be that of the compiler."""
    code = """
import numpy as np
from tests.proposers.test_adaptive import STEPS, history, make_drafter
from vllm_specplus.proposers import _arbiter

def compiled():
    calls = _arbiter.begin_step, _arbiter.offer, _arbiter.plan, _arbiter.offer_model, _arbiter.choose_and_settle
    return [len(function.signatures) for function in (*calls, _arbiter.set_list_prices)]

drafter = make_drafter()
assert compiled() == [1] * 6
for dtype in (np.int32, np.int64):
    drafter.plan(history(a=[1, 2]), np.array([4]), [None])
    drafter.draft(history(a=[1, 2]), np.array([4]), np.full((1, STEPS), 7, dtype))
no_tokens, length = np.zeros((1, 4), np.int32), np.zeros(1, np.int32)
drafter.arbiter.offer(0, no_tokens, length, length)
assert compiled() == [1] * 6
"""
    subprocess.run([sys.executable, "-c", code], cwd=_ROOT, check=True)
