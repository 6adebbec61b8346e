"""The specification against examples worked by hand, and against a second, unlike implementation.

Every example is given to the torch backend as well.

Rows are mostly logs of the probabilities 1/2, 1/4, 1/8, 1/8, so that masses can be read off.
"""

import math

import pytest
import torch

from vllm_specplus.verify import reference, torch_backend
from vllm_specplus.verify.checks import make_inputs
from vllm_specplus.verify.noise import gumbel_noise

from .cases import assert_same

LOGS = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
INF = math.inf
NAN = math.nan
ORDER = [0, 1, 2, 3]


def run(
    rows: list[list[float]], drafts: list[int], temperature: float = 1.0, on_bonus_row: int = -1, **options
) -> list:
    """Tokens of one request, by the specification; filters are given as numbers."""
    for name in ("top_p", "min_p"):
        if name in options:
            options[name] = torch.tensor([options[name]])
    if "top_k" in options:
        options["top_k"] = torch.tensor([options["top_k"]])
    arguments = {
        "top_p": None,
        "top_k": None,
        "min_p": None,
        "strategy": "greedy",
        "policy": "normal",
        "verify_window": 0,
        "max_candidate_len": None,
        "max_rows": None,
    } | options
    inputs = make_inputs(
        logits=torch.tensor(rows),
        cu_num_rows=torch.tensor([0, len(rows)]),
        draft_token_ids=torch.tensor([*drafts, on_bonus_row]),
        temperature=torch.tensor([temperature]),
        seeds=torch.tensor([7]),
        positions=torch.arange(len(rows)),
        **arguments,
    )
    expected = reference.verify(inputs)
    assert_same(torch_backend.verify(inputs), expected)
    return expected.token_ids[0, : int(expected.num_tokens)].tolist()


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p", "size"),
    [
        # Mass above each token: 0, 0.5, 0.75, 0.875.
        (1.0, 0, 0.0, 4),
        (0.5001, 0, 0.0, 2),
        (0.4999, 0, 0.0, 1),
        (0.6, 0, 0.0, 2),
        (0.8, 0, 0.0, 3),
        (0.9, 0, 0.0, 4),
        (0.0, 0, 0.0, 1),
        (1e-9, 0, 0.0, 1),
        (1.0, -1, 0.0, 4),
        (1.0, 1, 0.0, 1),
        (1.0, 3, 0.0, 3),
        (1.0, 99, 0.0, 4),
        # Relative to the likeliest: 1, 0.5, 0.25, 0.25.
        (1.0, 0, 0.3, 2),
        (1.0, 0, 0.2, 4),
        (1.0, 0, 1.0, 1),
        # top-k leaves 2/3 and 1/3 of the mass: 0.6 is now less than what stands above token 1.
        (0.6, 2, 0.0, 1),
        (0.7, 2, 0.0, 2),
        # min-p leaves the same two, so top-p sees the same masses.
        (0.6, 0, 0.3, 1),
        (0.7, 0, 0.3, 2),
        # top-k of 3 leaves 4/7, 2/7, 1/7; the mass above token 2 is 6/7 = 0.857.
        (0.85, 3, 0.0, 2),
        (0.86, 3, 0.0, 3),
        # min-p first: it leaves two of top-k's three.
        (0.86, 3, 0.3, 2),
    ],
)
def test_nucleus(top_p: float, top_k: int, min_p: float, size: int) -> None:
    assert reference.nucleus(LOGS, ORDER, top_p, top_k, min_p) == ORDER[:size]
    filters = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    for draft in ORDER:
        tokens = run([LOGS, LOGS], [draft], strategy="topp", **filters)
        assert (len(tokens) == 2) == (draft < size)


def test_nucleus_is_cut_among_equals_by_token_id() -> None:
    # Four equal tokens: the sums are exact, so that "less than top_p" can be tested on the spot.
    assert reference.nucleus([0.0] * 4, ORDER, 0.5, 0, 0.0) == [0, 1]
    assert reference.nucleus([0.0] * 4, ORDER, 0.50001, 0, 0.0) == [0, 1, 2]
    assert reference.nucleus([1.0, 3.0, 1.0, 3.0], [1, 3, 0, 2], 1.0, 3, 0.0) == [1, 3, 0]


def test_nucleus_without_finite_numbers() -> None:
    assert reference.nucleus([-INF] * 4, ORDER, 1.0, 0, 0.0) == [0]
    assert reference.nucleus([-INF, 2.0, -INF, -INF], [1, 0, 2, 3], 1.0, 0, 0.0) == [1]
    # Tokens of +inf hold half of the mass each.
    assert reference.nucleus([0.0, INF, INF, 0.0], [1, 2, 0, 3], 0.9, 0, 0.0) == [1, 2]
    assert reference.nucleus([0.0, INF, INF, 0.0], [1, 2, 0, 3], 0.5, 0, 0.0) == [1]


def by_masks(logits: torch.Tensor, top_p: float, top_k: int, min_p: float) -> set[int]:
    """min-p, top-k and top-p as masks set on logits one after the other, as samplers do it."""
    logits = logits.double().clone()
    if min_p > 0:
        logits[logits < logits.max() + math.log(min_p)] = -INF
    if 0 < top_k < len(logits):
        logits[logits < logits.sort().values[-top_k]] = -INF
    rising = logits.sort()
    dropped = rising.values.softmax(0).cumsum(0) <= 1 - top_p
    dropped[-1] = False
    logits[rising.indices[dropped]] = -INF
    return set((logits > -INF).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("seed", range(60))
def test_nucleus_equals_masks(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    # Distinct values, so that the order of equals does not come in; no threshold is hit.
    logits = torch.randn(200, generator=g) * float(torch.rand(1, generator=g) * 4 + 0.2)
    order = logits.argsort(descending=True).tolist()
    for top_p in (0.05, 0.37, 0.81, 0.97):
        for top_k in (0, 1, 7, 60, 500):
            for min_p in (0.0, 0.013, 0.4):
                candidates = reference.nucleus(logits.tolist(), order, top_p, top_k, min_p)
                assert set(candidates) == by_masks(logits, top_p, top_k, min_p)


def test_greedy() -> None:
    up, down = [0.0, 1.0, 2.0], [2.0, 1.0, 0.0]
    assert run([up, down, up], [2, 0]) == [2, 0, 2]
    assert run([up, down, up], [1, 0]) == [2]
    assert run([up, down, up], [2, 1]) == [2, 0]
    # The lowest id stands first among equals.
    assert run([[1.0, 1.0, 0.0], up], [0]) == [0, 2]
    assert run([[1.0, 1.0, 0.0], up], [1]) == [0]
    # No draft: only the bonus row.
    assert run([up], []) == [2]


def test_an_empty_slot_ends_the_run() -> None:
    up = [0.0, 1.0, 2.0]
    for policy in ("normal", "accept_all"):
        assert run([up] * 4, [2, -1, 2], policy=policy) == [2, 2]


def test_target_match_accepts_what_it_would_have_sampled() -> None:
    noise = gumbel_noise(torch.tensor([7, 7]), torch.tensor([0, 1]), 4)
    # The seed was chosen for this: neither sample is the likeliest token.
    samples = (torch.tensor([LOGS, LOGS]) + noise).argmax(dim=1).tolist()
    first, second = samples
    assert run([LOGS, LOGS], [first], strategy="target_match") == [first, second]
    for other in set(range(4)) - {first}:
        assert run([LOGS, LOGS], [other], strategy="target_match") == [first]
    # With top_k 1 only the likeliest token can be sampled.
    assert run([LOGS, LOGS], [0], strategy="target_match", top_k=1) == [0, 0]


def test_topp_accepts_candidates() -> None:
    options = {"strategy": "topp", "top_p": 0.8}  # candidates: 0, 1, 2
    for draft in (0, 1, 2):
        assert run([LOGS, LOGS], [draft], **options)[0] == draft
        assert len(run([LOGS, LOGS], [draft], **options)) == 2
    (token,) = run([LOGS, LOGS], [3], **options)
    assert token in (0, 1, 2)
    assert len(run([LOGS, LOGS], [2], max_candidate_len=2, **options)) == 1
    assert len(run([LOGS, LOGS], [1], max_candidate_len=2, **options)) == 2
    # One candidate: what is emitted is known.
    assert run([LOGS, LOGS], [1], max_candidate_len=1, **options) == [0]


def test_topp_verify_window() -> None:
    options = {"strategy": "topp", "top_p": 0.1}  # the likeliest token is the one candidate
    rows = [LOGS] * 4
    assert run(rows, [1, 0, 0], **options) == [0]
    assert run(rows, [1, 0, 0], verify_window=1, **options) == [1, 0, 0, 0]
    assert run(rows, [1, 0, 0], verify_window=2, **options) == [1, 0, 0, 0]
    # Third choice; following drafts that are no first choices; too few following drafts.
    assert run(rows, [2, 0, 0], verify_window=1, **options) == [0]
    assert run(rows, [1, 0, 1], verify_window=2, **options) == [0]
    assert run(rows, [1, 0, -1], verify_window=2, **options) == [0]
    assert run(rows, [1, 0, 0], verify_window=3, **options) == [0]
    # The run goes on after a second choice, and another may follow.
    assert run([LOGS] * 5, [1, 0, 1, 0], verify_window=1, **options) == [1, 0, 1, 0, 0]
    # A bonus row holds no draft, whatever stands there.
    assert run(rows, [1, 0, 0], on_bonus_row=0, verify_window=3, **options) == [0]
    assert run(rows[:2], [1], on_bonus_row=0, verify_window=1, **options) == [0]
    # Temperature 0 is greedy: a second choice is never accepted.
    assert run(rows, [1, 0, 0], temperature=0.0, verify_window=1, **options) == [0]


@pytest.mark.parametrize("strategy", ["greedy", "target_match", "topp"])
def test_temperature_zero_is_greedy(strategy: str) -> None:
    options = {"temperature": 0.0, "strategy": strategy, "top_p": 0.99}
    assert run([LOGS, LOGS], [0], **options) == [0, 0]
    assert run([LOGS, LOGS], [1], **options) == [0]


def test_temperature_scales_before_the_nucleus() -> None:
    # At temperature 1/2 the probabilities are squared: 8/11, 2/11, 1/22, 1/22.
    options = {"strategy": "topp", "top_p": 0.7}
    assert len(run([LOGS, LOGS], [1], temperature=1.0, **options)) == 2
    assert len(run([LOGS, LOGS], [1], temperature=0.5, **options)) == 1


@pytest.mark.parametrize("strategy", ["greedy", "target_match", "topp"])
def test_policies(strategy: str) -> None:
    rows, drafts = [LOGS] * 4, [3, 2, 3]
    accepted = run(rows, drafts, strategy=strategy, policy="accept_all")
    assert accepted[:3] == drafts
    assert len(accepted) == 4
    # The emitted token is the one that the strategy gives without any draft.
    alone = run(rows[:1], [], strategy=strategy)
    assert run(rows, [0, 0, 0], strategy=strategy, policy="reject_all") == alone


@pytest.mark.parametrize("policy", ["normal", "accept_all", "reject_all"])
@pytest.mark.parametrize("strategy", ["greedy", "target_match", "topp"])
@pytest.mark.parametrize(
    ("row", "draft"),
    [
        ([0.0, -INF, 0.0], 1),
        ([0.0, NAN, 0.0], 1),
        ([NAN, NAN, NAN], 0),
        ([-INF, -INF, -INF], 0),
        ([0.0, 0.0, 0.0], 3),
        ([0.0, 0.0, 0.0], 2**40),
        ([0.0, 0.0, 0.0], -1),
        ([0.0, 0.0, 0.0], -7),
    ],
)
def test_never_accepted(row: list[float], draft: int, strategy: str, policy: str) -> None:
    (token,) = run([row, [0.0, 0.0, 0.0]], [draft], strategy=strategy, policy=policy)
    assert token == 0 if math.isnan(row[0]) or row[0] == -INF else token in (0, 1, 2)


@pytest.mark.parametrize("strategy", ["greedy", "target_match", "topp"])
def test_infinite_logits_win(strategy: str) -> None:
    row = [0.0, 1e4, INF, INF]
    assert run([row, row], [2], strategy=strategy) == [2, 2]


def test_top_p_of_one_keeps_tokens_of_vanishing_weight() -> None:
    assert len(run([[1e4, -1e4, 0.0]] * 2, [1], strategy="topp", top_p=1.0)) == 2
    assert len(run([[1e4, -1e4, 0.0]] * 2, [1], strategy="topp", top_p=0.9999)) == 1


def test_extreme_logits_are_certain() -> None:
    row = [1e4, -1e4, 0.0]
    for strategy in ("target_match", "topp"):
        assert run([row, row], [0], strategy=strategy, top_p=0.999) == [0, 0]
