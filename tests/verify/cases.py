"""Random and adversarial arguments for verification, off the thresholds where rounding decides.

The specification sums masses in float64, a backend may in float32. Either answer is right if a mass lies within
rounding of top_p, or a probability of min_p. So `settle` moves the parameter away from every threshold of the request's
rows, by the margins below. No float32 sum of 1,100 weights was ever off by more than 3e-7 of the row's mass. Thresholds
that are hit
exactly stay where float32 sums are exact too: weights of 0 and 1 alone and a top_p in eighths.

Backends may take another logarithm than the specification. So `settle_samples` moves the position of some rows: the two
best scores are about equal there, or p(d) and u q(d) are.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from hypothesis import strategies as st

from vllm_specplus.verify import POLICIES, STRATEGIES
from vllm_specplus.verify.checks import make_inputs
from vllm_specplus.verify.noise import acceptance_uniform
from vllm_specplus.verify.reference import draft_probabilities, is_greedy, read_row, softmax
from vllm_specplus.verify.types import VerifyInputs, VerifyOutput

TOP_P_MARGIN = 2e-6
MIN_P_MARGIN = 1e-4
SCORE_MARGIN = 1e-5
RATIO_MARGIN = 1e-5
SMALLEST_PROBABILITY = 1e-30
# If q is close to p, the logarithm of p - q is known less well.
RESIDUAL_MARGIN = 1e-3

ROW_KINDS = (
    "normal",
    "narrow",
    "wide",
    "extreme",
    "tied",
    "flat",
    "peaked",
    "masked",
    "one_left",
    "nan",
    "partly_nan",
    "all_masked",
    "infinite",
    "lowest",
)
DRAFT_KINDS = ("first", "first", "second", "third", "random", "none", "outside", "masked")
SAMPLED_SHARE = 0.6  # of the drafts of `target_match`, which else would rarely be accepted


@dataclass(frozen=True)
class Shape:
    """The outline of a case; `seed` fills in the numbers."""

    counts: list[int]
    vocab_size: int
    dtype: torch.dtype
    strategy: str
    policy: str
    verify_window: int
    max_candidate_len: int | None
    kinds: list[str]
    filters: set[str]
    seed: int
    with_draft_logits: bool = False
    with_draft_rows: bool = False

    def consistent(self) -> "Shape":
        """Without what the strategy does not take."""
        with_draft_logits = self.with_draft_logits and self.strategy == "rejection"
        with_draft_rows = self.with_draft_rows and with_draft_logits
        return replace(self, with_draft_logits=with_draft_logits, with_draft_rows=with_draft_rows)


def shapes_of(counts: st.SearchStrategy[list[int]]) -> st.SearchStrategy[Shape]:
    """Draws shapes of every strategy, policy, dtype and filter, whose requests have as many rows as `counts` draws."""
    return st.builds(
        Shape,
        counts=counts,
        vocab_size=st.sampled_from([5, 8, 16, 63, 64, 65, 128, 320, 500, 1100]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        strategy=st.sampled_from(STRATEGIES),
        policy=st.sampled_from(["normal", "normal", "normal", *POLICIES]),
        verify_window=st.integers(0, 3),
        max_candidate_len=st.sampled_from([None, 1, 2, 5]),
        kinds=st.lists(st.sampled_from(ROW_KINDS), min_size=1, max_size=4, unique=True),
        filters=st.sets(st.sampled_from(["top_p", "top_k", "min_p"])),
        seed=st.integers(0, 2**40),
        with_draft_logits=st.booleans(),
        with_draft_rows=st.booleans(),
    ).map(Shape.consistent)


# Logits of +inf, and a rejected draft that was drawn from no distribution, or from one.
UNDRAWN_AT_INFINITY = Shape(
    counts=[1, 3],
    vocab_size=63,
    dtype=torch.float32,
    strategy="rejection",
    policy="normal",
    verify_window=0,
    max_candidate_len=None,
    kinds=["normal", "infinite", "narrow"],
    filters=set(),
    seed=39283168,
    with_draft_logits=True,
)
DRAWN_AT_INFINITY = replace(
    UNDRAWN_AT_INFINITY, counts=[1, 3, 1, 1], vocab_size=320, kinds=["normal", "infinite"], seed=0
)


def pick(values: list[float], size: int, g: torch.Generator) -> torch.Tensor:
    return torch.tensor(values)[torch.randint(len(values), (size,), generator=g)]


def make_row(kind: str, vocab_size: int, g: torch.Generator) -> torch.Tensor:
    row = torch.randn(vocab_size, generator=g)
    scales = {"narrow": 0.3, "wide": 30.0, "extreme": 1e4}
    some = torch.rand(vocab_size, generator=g)
    if kind in scales:
        return row * scales[kind]
    if kind == "tied":
        return (row * 1.5).round()
    if kind == "flat":
        return torch.zeros(vocab_size)
    if kind == "peaked":
        row[some.argmax()] += 40
    if kind == "masked":
        row[some < 0.9] = -math.inf
    if kind == "one_left":
        row[some < some.max()] = -math.inf
    if kind == "nan":
        return row * math.nan
    if kind == "partly_nan":
        row[some < 0.3] = math.nan
    if kind == "all_masked":
        return torch.full((vocab_size,), -math.inf)
    if kind == "infinite":
        row[some < 0.1] = math.inf
    if kind == "lowest":
        # As some processors mask; divided by a temperature below 1 it is -inf.
        row[some < 0.5] = torch.finfo(torch.bfloat16).min
    return row * 3


def make_draft(kind: str, row: torch.Tensor, g: torch.Generator) -> int:
    vocab_size = row.shape[0]
    values = torch.where(row.isnan(), -math.inf, row)
    order = values.sort(descending=True, stable=True).indices.tolist()
    at = int(torch.randint(vocab_size, (1,), generator=g))
    return {
        "first": order[0],
        "second": order[1],
        "third": order[2],
        "random": at,
        "none": -1,
        "outside": vocab_size + at,
        "masked": order[-1],
    }[kind]


def make_case(shape: Shape) -> VerifyInputs:
    g = torch.Generator().manual_seed(shape.seed)
    num_reqs, num_rows = len(shape.counts), sum(shape.counts)

    def choose(names: tuple[str, ...] | list[str]) -> str:
        return names[int(torch.randint(len(names), (1,), generator=g))]

    rows = [make_row(choose(shape.kinds), shape.vocab_size, g) for _ in range(num_rows)]
    drafts = [make_draft(choose(DRAFT_KINDS), row, g) for row in rows]
    logits = torch.stack(rows) if rows else torch.zeros(0, shape.vocab_size)
    top_p = pick([0.0, 1e-9, 0.125, 0.3, 0.5, 0.75, 0.9, 0.99, 1.0], num_reqs, g)
    top_k = pick([-1, 0, 1, 2, 5, 50, 2000], num_reqs, g).to(torch.int32)
    min_p = pick([0.0, 0.0, 1e-6, 0.05, 0.3, 1.0], num_reqs, g)
    inputs = make_inputs(
        logits=logits.to(shape.dtype),
        cu_num_rows=torch.tensor([0, *shape.counts]).cumsum(0).to(torch.int32),
        draft_token_ids=torch.tensor(drafts, dtype=torch.int64),
        temperature=pick([0.0, 0.01, 0.7, 1.0, 1.0, 2.5], num_reqs, g),
        top_p=top_p if "top_p" in shape.filters else None,
        top_k=top_k if "top_k" in shape.filters else None,
        min_p=min_p if "min_p" in shape.filters else None,
        seeds=torch.randint(-(2**62), 2**62, (num_reqs,), generator=g),
        positions=torch.randint(0, 2**18, (num_rows,), generator=g),
        strategy=shape.strategy,
        policy=shape.policy,
        verify_window=shape.verify_window if shape.strategy == "topp" else 0,
        max_candidate_len=shape.max_candidate_len if shape.strategy == "topp" else None,
        max_rows=None,
        draft_logits=make_draft_logits(logits, drafts, g).to(shape.dtype) if shape.with_draft_logits else None,
    )
    if shape.with_draft_rows:
        inputs = scatter_draft_logits(inputs, g)
    inputs = settle_samples(settle(inputs))
    return draft_samples(inputs, g) if shape.strategy == "target_match" else inputs


def make_draft_logits(logits: torch.Tensor, drafts: list[int], g: torch.Generator) -> torch.Tensor:
    """Logits near the target's, and on some rows one-hot or none, as for drafts that were not sampled."""
    draft_logits = logits.nan_to_num(nan=0.0, posinf=9.0, neginf=-9.0).clamp(-30, 30)
    draft_logits += torch.randn(logits.shape, generator=g) * 2
    for row, draft in enumerate(drafts):
        kind = torch.rand(1, generator=g)
        if kind < 0.1:
            draft_logits[row] = -math.inf
        elif kind < 0.15:
            draft_logits[row] = math.nan
        elif 0 <= draft < logits.shape[1] and kind < 0.4:
            draft_logits[row] = -math.inf
            draft_logits[row, draft] = 0 if kind < 0.3 else math.inf
    return draft_logits


def scatter_draft_logits(inputs: VerifyInputs, g: torch.Generator) -> VerifyInputs:
    """Put the draft logits in another order among other rows, and let some drafts have none."""
    assert inputs.draft_logits is not None
    num_rows = inputs.num_rows
    rows = torch.randperm(num_rows + 3, generator=g)[:num_rows]
    draft_logits = torch.full((num_rows + 3, inputs.vocab_size), 7.0, dtype=inputs.draft_logits.dtype)
    draft_logits[rows] = inputs.draft_logits
    rows[torch.rand(num_rows, generator=g) < 0.2] = -1
    return replace(inputs, draft_logits=draft_logits, draft_rows=rows)


def draft_samples(inputs: VerifyInputs, g: torch.Generator) -> VerifyInputs:
    """Put the token that a row emits on most rows as its draft."""
    drafts = inputs.draft_token_ids.clone()
    for r in range(inputs.num_reqs):
        for i in range(*inputs.cu_num_rows[r : r + 2].tolist()):
            if torch.rand(1, generator=g) < SAMPLED_SHARE:
                drafts[i] = read_row(inputs, r, i, is_bonus=False).emits
    return replace(inputs, draft_token_ids=drafts)


def settle_samples(inputs: VerifyInputs) -> VerifyInputs:
    """Move the positions of rows whose outcome hangs on rounding, and drop the draft where that does not help."""
    positions, drafts = inputs.positions.clone(), inputs.draft_token_ids.clone()
    settled = replace(inputs, positions=positions, draft_token_ids=drafts)
    for r in range(inputs.num_reqs):
        start, end = inputs.cu_num_rows[r : r + 2].tolist()
        for i in range(start, end):
            for attempt in range(20):
                if not is_close(settled, r, i, is_bonus=i == end - 1):
                    break
                positions[i] += 1
                drafts[i] = -1 if attempt > 9 else drafts[i]
    return settled


def is_close(inputs: VerifyInputs, r: int, i: int, is_bonus: bool) -> bool:
    row = read_row(inputs, r, i, is_bonus)
    best, second = [*sorted(row.score.values(), reverse=True), -math.inf][:2]
    if math.isinf(best):
        return False  # exact ties, which the lower id wins
    drawn_by = draft_probabilities(inputs, r, i) if inputs.strategy == "rejection" else None
    probabilistic = drawn_by is not None
    margin = RESIDUAL_MARGIN if probabilistic else SCORE_MARGIN
    if best - second < margin * max(1.0, abs(best) / 10):
        return True
    draft = int(inputs.draft_token_ids[i])
    is_tested = not is_bonus and 0 <= draft < inputs.vocab_size
    if inputs.strategy != "rejection" or inputs.policy != "normal" or not is_tested or is_greedy(inputs, r):
        return False
    z = request_z(inputs, r)[i - int(inputs.cu_num_rows[r])].tolist()
    p = softmax(z, row.candidates)
    q = drawn_by or {draft: 1.0}
    if any(0 < v < SMALLEST_PROBABILITY for v in (p.get(draft, 0.0), q[draft])):
        return True
    u = acceptance_uniform(inputs.seeds[r : r + 1], inputs.positions[i : i + 1]).item()
    if abs(p.get(draft, 0.0) - u * q[draft]) < RATIO_MARGIN * q[draft]:
        return draft in p
    if not probabilistic or math.isinf(q[row.emits]):
        return False
    # If the residual is small throughout, the rounding of a likely token's may outweigh it.
    largest = max(v for v in q.values() if v < math.inf)
    return p.get(row.emits, 1.0) - q[row.emits] < RESIDUAL_MARGIN * largest


def settle(inputs: VerifyInputs) -> VerifyInputs:
    """Move top_p and min_p of each request away from the thresholds of its rows."""
    top_p, min_p = inputs.top_p, inputs.min_p
    for r in range(inputs.num_reqs):
        z = request_z(inputs, r)
        if not z.numel():
            continue
        weight = (z - z.amax(dim=1, keepdim=True)).nan_to_num(nan=0.0).exp()
        weight[z == -math.inf] = 0
        if min_p is not None:
            min_p = settle_min_p(min_p.clone(), r, weight)
            weight[weight < min_p[r]] = 0
        weight = weight.sort(dim=1, descending=True).values
        if inputs.top_k is not None and inputs.top_k[r] > 0:
            weight[:, int(inputs.top_k[r]) :] = 0
        if top_p is not None:
            top_p = settle_top_p(top_p.clone(), r, weight)
    return replace(inputs, top_p=top_p, min_p=min_p)


def request_z(inputs: VerifyInputs, r: int) -> torch.Tensor:
    start, end = inputs.cu_num_rows[r : r + 2].tolist()
    z = inputs.logits[start:end].float()
    z = torch.where(z.isnan(), -math.inf, z)
    t = inputs.temperature[r]
    return (z if t == 0 else z / t).double()


def settle_min_p(min_p: torch.Tensor, r: int, weight: torch.Tensor) -> torch.Tensor:
    while ((weight < 1) & ((weight / min_p[r].double()).log().abs() < MIN_P_MARGIN)).any():
        min_p[r] *= 1 - 3 * MIN_P_MARGIN
    return min_p


def settle_top_p(top_p: torch.Tensor, r: int, weight: torch.Tensor) -> torch.Tensor:
    """`weight`: float64, in falling order, 0 for what min-p and top-k drop."""
    whole = ((weight == 0) | (weight == 1)).all()
    total = weight.sum(dim=1, keepdim=True).clamp(min=1e-300)
    # The first token of a row is kept whatever top_p says.
    above = ((weight.cumsum(dim=1) - weight) / total)[:, 1:]
    tokens = weight[:, 1:] > 0
    while 0 < top_p[r] < 1:
        exact = whole and (top_p[r] * 8) % 1 == 0
        if exact or not (tokens & ((above - top_p[r]).abs() < TOP_P_MARGIN)).any():
            break
        top_p[r] *= 0.999
    return top_p


def make_huge_case(strategy: str, scale: float, temperature: float, *, with_draft_logits: bool = False) -> VerifyInputs:
    """Three requests of logits up to about `scale`, top-k 3, most drafts the likeliest token, one of them masked."""
    g = torch.Generator().manual_seed(7)
    logits = torch.randn(9, 100, generator=g).clamp(-1, 1) * scale
    logits[torch.arange(9), torch.arange(9) * 7] = scale * (1 - torch.arange(9) / 100)
    drafts = logits.argmax(dim=1)
    drafts[4] = 99
    logits[4, 99] = -math.inf
    return make_inputs(
        logits=logits,
        cu_num_rows=torch.tensor([0, 4, 5, 9]),
        draft_token_ids=drafts,
        temperature=torch.full((3,), temperature),
        top_p=None,
        top_k=torch.full((3,), 3),
        min_p=None,
        seeds=torch.arange(3),
        positions=torch.arange(9),
        strategy=strategy,
        policy="normal",
        verify_window=0,
        max_candidate_len=None,
        max_rows=None,
        draft_logits=logits.clamp(-1e30, 1e30).roll(1, dims=1) if with_draft_logits else None,
    )


HUGE_CASES = [(1e30, 1e-7), (1e30, 1.0), (1e30, 1e30), (3e38, 1.0), (1.0, 1e-30), (0.0, 1.0)]
"""Logits and temperatures that all backends agree on."""
OPEN_CASES = [(1.0, 1e-40), (1e30, 1e-38), (1e30, 1e-10), (3e38, 1e-30), (3e38, 1e38)]
"""Those that the specification leaves open."""


def assert_in_range(output: VerifyOutput, inputs: VerifyInputs) -> None:
    """What holds of an output whatever the logits and temperatures are."""
    for r, (start, end) in enumerate(pairwise(inputs.cu_num_rows.tolist())):
        num_tokens = int(output.num_tokens[r])
        tokens = output.token_ids[r].tolist()
        assert 1 <= num_tokens <= end - start
        assert tokens[num_tokens:] == [-1] * (inputs.max_rows - num_tokens)
        assert 0 <= tokens[num_tokens - 1] < inputs.vocab_size
        accepted = inputs.draft_token_ids[start : start + num_tokens - 1]
        assert tokens[: num_tokens - 1] == accepted.tolist()
        assert (inputs.logits[start : start + num_tokens - 1].gather(1, accepted[:, None]) > -math.inf).all()


def assert_same(actual: VerifyOutput, expected: VerifyOutput) -> None:
    assert actual.num_tokens.dtype == torch.int32
    assert actual.token_ids.dtype == torch.int64
    assert actual.num_tokens.tolist() == expected.num_tokens.tolist()
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
