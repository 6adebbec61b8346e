"""Verification in plain torch, on any device: what `reference.py` says, many rows at a time.

The rank of a token and the mass above it are sums over the tokens ordered before it. Sampling inside the
nucleus takes the argmax of z + noise over all tokens first: if that token is in the nucleus, it is the
argmax there too; if not, no token ordered after it is in the nucleus either, so the same is asked of
the tokens ordered before it. Only `rejection`, which has to know the mass of the nucleus, sorts.

Rows that cannot matter are left out, which reads their number back from the device: on an
accelerator this backend waits for the device a few times for every chunk of rows.
"""

from dataclasses import dataclass

import torch

from vllm_specplus.verify.noise import acceptance_uniform, gumbel_noise
from vllm_specplus.verify.types import VerifyInputs, VerifyOutput

_NEG_INF = float("-inf")
_POS_INF = float("inf")

# Logits worked on at a time (at least one row). On a CPU few enough for the temporaries to stay in a cache; on an
# accelerator enough to keep it busy, at some ten temporaries of a quarter of a GiB.
_CHUNK_ELEMENTS = 1 << 18
_CHUNK_ELEMENTS_ON_ACCELERATOR = 1 << 26


@dataclass(frozen=True)
class _Layout:
    """Which request a row belongs to, and how many rows a request has."""

    request: torch.Tensor  # [num_rows] int64
    counts: torch.Tensor  # [num_reqs] int64
    grid: torch.Tensor  # [num_reqs, max_rows] int64: row at each slot, in bounds past the end too


@dataclass(frozen=True)
class _Nucleus:
    """Some rows and what decides whether a token is one of their candidates."""

    z: torch.Tensor  # [n, vocab] float32
    weight: torch.Tensor | None  # [n, vocab] float32: exp(z - max z), if a filter needs it
    mass: torch.Tensor | None  # [n] float32: the mass above a candidate is less than this
    min_p: torch.Tensor | None  # [n] float32: the weight of a candidate is at least this
    floor: torch.Tensor | None  # [n] float32: z of a token that top-k keeps is at least this
    max_rank: torch.Tensor | None  # [n] int64: the rank of a candidate is less than this

    def select(self, rows: torch.Tensor) -> "_Nucleus":
        fields = (None if v is None else v[rows] for v in vars(self).values())
        return _Nucleus(*fields)


def verify(inputs: VerifyInputs) -> VerifyOutput:
    """Verify the drafts of every request; see ``vllm_specplus.verify.verify_draft_tokens``."""
    if inputs.num_reqs == 0 or inputs.num_rows == 0:
        return _no_tokens(inputs)
    layout = _lay_out(inputs)
    given = _given_drafts(inputs, layout)
    drafts = _acceptable_drafts(inputs, layout, given)
    emitted = None
    if inputs.policy == "reject_all":
        accepted = torch.zeros_like(drafts, dtype=torch.bool)
    elif inputs.policy == "accept_all":
        accepted = drafts >= 0
    elif inputs.strategy == "topp":
        accepted = _accept_candidates(inputs, layout, drafts)
    elif inputs.strategy == "rejection":
        accepted = _accept_by_ratio(inputs, layout, drafts)
    else:
        rows = torch.arange(inputs.num_rows, device=drafts.device)
        emitted = _emit(inputs, layout, rows, torch.full_like(drafts, -1))
        accepted = emitted == drafts
    return _scan(inputs, layout, given, accepted, emitted)


def _no_tokens(inputs: VerifyInputs) -> VerifyOutput:
    device, shape = inputs.logits.device, (inputs.num_reqs, inputs.max_rows)
    return VerifyOutput(
        torch.full(shape, -1, dtype=torch.int64, device=device),
        torch.zeros(inputs.num_reqs, dtype=torch.int32, device=device),
    )


def _lay_out(inputs: VerifyInputs) -> _Layout:
    cu = inputs.cu_num_rows
    rows = torch.arange(inputs.num_rows, device=cu.device)
    slots = torch.arange(inputs.max_rows, device=cu.device)
    request = torch.searchsorted(cu[1:], rows, right=True).clamp_(max=inputs.num_reqs - 1)
    counts = (cu[1:] - cu[:-1]).clamp(max=inputs.max_rows)
    grid = (cu[:-1, None] + slots).clamp_(max=inputs.num_rows - 1)
    return _Layout(request, counts, grid)


def _given_drafts(inputs: VerifyInputs, layout: _Layout) -> torch.Tensor:
    """``[num_rows]`` int64: the draft, or -1 where there is none."""
    rows = torch.arange(inputs.num_rows, device=layout.request.device)
    last = inputs.cu_num_rows[layout.request] + layout.counts[layout.request] - 1
    drafts = inputs.draft_token_ids
    return torch.where((rows < last) & (drafts >= 0) & (drafts < inputs.vocab_size), drafts, -1)


def _acceptable_drafts(inputs: VerifyInputs, layout: _Layout, given: torch.Tensor) -> torch.Tensor:
    """``[num_rows]`` int64: the draft, or -1 where none could be accepted under any policy."""
    rows = torch.arange(inputs.num_rows, device=layout.request.device)
    z = _scale(inputs, layout, rows, inputs.logits[rows, given.clamp(min=0)][:, None])[:, 0]
    return torch.where(z > _NEG_INF, given, -1)


def _scan(
    inputs: VerifyInputs,
    layout: _Layout,
    drafts: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor | None,
) -> VerifyOutput:
    """Drafts up to the first row that does not accept, then the token that this row emits."""
    grid, counts = layout.grid, layout.counts
    slots = torch.arange(inputs.max_rows, device=grid.device)
    in_request = slots < counts[:, None] - 1
    run = (accepted[grid] & in_request).cumprod(dim=1).sum(dim=1)
    rows = (inputs.cu_num_rows[:-1] + run).clamp_(max=inputs.num_rows - 1)
    if emitted is None:
        judged = inputs.strategy == "rejection" and inputs.policy == "normal"
        own = _emit(inputs, layout, rows, drafts[rows] if judged else torch.full_like(rows, -1))
    else:
        own = emitted[rows]

    token_ids = torch.where(slots < run[:, None], drafts[grid], -1)
    ends_run = (slots == run[:, None]) & (counts > 0)[:, None]
    token_ids = torch.where(ends_run, own[:, None], token_ids)
    num_tokens = torch.where(counts > 0, run + 1, 0).to(torch.int32)
    return VerifyOutput(token_ids, num_tokens)


def _accept_candidates(inputs: VerifyInputs, layout: _Layout, drafts: torch.Tensor) -> torch.Tensor:
    """``[num_rows]`` bool: strategy `topp`."""
    rank = torch.full_like(drafts, -1)
    accepted = torch.zeros_like(drafts, dtype=torch.bool)
    for rows in _chunks(inputs, (drafts >= 0).nonzero()[:, 0]):
        nucleus = _read_nucleus(inputs, layout, rows)
        inside, before = _is_candidate(nucleus, drafts[rows])
        rank[rows] = before.sum(dim=1)
        accepted[rows] = inside
    first = rank == 0
    greedy = inputs.temperature[layout.request] == 0
    if inputs.verify_window > 0:
        accepted |= (rank == 1) & _followed_by(first, inputs.verify_window)
    return torch.where(greedy, first, accepted)


def _followed_by(first: torch.Tensor, window: int) -> torch.Tensor:
    """Whether the next `window` rows are all set in `first`.

    A bonus row holds no draft, so it is never set, and no window reaches into the next request.
    """
    num_rows = first.shape[0]
    padded = torch.nn.functional.pad(first, (0, window))
    result = torch.ones_like(first)
    for step in range(1, window + 1):
        result &= padded[step : step + num_rows]
    return result


def _accept_by_ratio(inputs: VerifyInputs, layout: _Layout, drafts: torch.Tensor) -> torch.Tensor:
    """``[num_rows]`` bool: strategy `rejection`."""
    accepted = torch.zeros_like(drafts, dtype=torch.bool)
    for rows in _chunks(inputs, (drafts >= 0).nonzero()[:, 0]):
        nucleus, request, at = _read_nucleus(inputs, layout, rows), layout.request[rows], drafts[rows, None]
        u = acceptance_uniform(inputs.seeds[request], inputs.positions[rows])
        if inputs.draft_logits is not None:
            u = u * _draft_probabilities(inputs, layout, rows, drafts[rows])[0].gather(1, at)[:, 0]
        passes = _probabilities(nucleus).gather(1, at)[:, 0] > u
        accepted[rows] = torch.where(inputs.temperature[request] > 0, passes, nucleus.z.argmax(dim=1) == at[:, 0])
    return accepted


def _emit(inputs: VerifyInputs, layout: _Layout, rows: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """``[n]`` int64: the token that each of `rows` emits if the run ends there.

    `rejected`: ``[n]`` the draft that `rejection` turned down there, or -1.
    """
    chunks = zip(_chunks(inputs, rows), _chunks(inputs, rejected), strict=True)
    return torch.cat([_emit_chunk(inputs, layout, *chunk) for chunk in chunks])


def _emit_chunk(inputs: VerifyInputs, layout: _Layout, rows: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    request = layout.request[rows]
    if inputs.strategy == "greedy":
        return _rows_of_z(inputs, layout, rows).argmax(dim=1)
    sampled = inputs.temperature[request] > 0
    token = torch.empty_like(rows)
    if not sampled.all():
        token[~sampled] = _rows_of_z(inputs, layout, rows[~sampled]).argmax(dim=1)
    if sampled.any():
        rows, rejected = rows[sampled], rejected[sampled]
        noise = gumbel_noise(inputs.seeds[request[sampled]], inputs.positions[rows], inputs.vocab_size)
        nucleus = _read_nucleus(inputs, layout, rows)
        if (rejected >= 0).any():
            token[sampled] = _sample_residual(inputs, layout, rows, nucleus, noise, rejected)
        else:
            token[sampled] = _sample(nucleus, noise)
    return token


def _sample_residual(
    inputs: VerifyInputs,
    layout: _Layout,
    rows: torch.Tensor,
    nucleus: _Nucleus,
    noise: torch.Tensor,
    rejected: torch.Tensor,
) -> torch.Tensor:
    """``[n]`` int64: a sample of what the nucleus has more of than the drafts' distribution."""
    was_rejected = (rejected >= 0)[:, None]
    p = _probabilities(nucleus)
    score = (nucleus.z + noise).masked_fill_(p == 0, _NEG_INF)
    ids = torch.arange(inputs.vocab_size, device=rows.device)
    score.masked_fill_(ids == rejected[:, None], _NEG_INF)
    if inputs.draft_logits is not None:
        q, was_drawn = _draft_probabilities(inputs, layout, rows, rejected)
        score = torch.where(was_rejected & was_drawn, (p - q).clamp_(min=0).log_() + noise, score)
    best = score.max(dim=1)
    return torch.where(best.values > _NEG_INF, best.indices, nucleus.z.argmax(dim=1))


def _draft_probabilities(
    inputs: VerifyInputs, layout: _Layout, rows: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution that each row's draft was drawn from, and whether it was drawn: if not, all is on the draft.

    Returns:
        ``[n, vocab]`` float32 and ``[n, 1]`` bool.
    """
    assert inputs.draft_logits is not None
    draft_rows = rows if inputs.draft_rows is None else inputs.draft_rows[rows]
    z = _scale(inputs, layout, rows, inputs.draft_logits[draft_rows.clamp(min=0)])
    z.masked_fill_((draft_rows < 0)[:, None], _NEG_INF)
    best = z.amax(dim=1, keepdim=True)
    weight = _weigh(z, best).masked_fill_(z == _NEG_INF, 0.0)
    certain = torch.arange(z.shape[1], device=z.device) == drafts[:, None]
    was_drawn = best > _NEG_INF
    return torch.where(was_drawn, weight / weight.sum(dim=1, keepdim=True), certain.to(weight.dtype)), was_drawn


def _probabilities(nucleus: _Nucleus) -> torch.Tensor:
    """``[n, vocab]`` float32: the distribution of each row within its nucleus, 0 outside."""
    weight = _weigh(nucleus.z, nucleus.z.amax(dim=1, keepdim=True))
    weight *= nucleus.z > _NEG_INF
    order = nucleus.z.sort(dim=1, descending=True, stable=True).indices
    falling = weight.gather(1, order)
    if nucleus.min_p is not None:
        falling *= falling >= nucleus.min_p[:, None]
    above = falling.cumsum(dim=1) - falling
    if nucleus.max_rank is not None:
        falling *= torch.arange(falling.shape[1], device=falling.device) < nucleus.max_rank[:, None]
    if nucleus.mass is not None:
        inside = above < nucleus.mass[:, None]
        inside[:, 0] = True
        falling *= inside
    total = falling.sum(dim=1, keepdim=True)
    return torch.zeros_like(weight).scatter_(1, order, falling).div_(torch.where(total > 0, total, 1.0))


def _sample(nucleus: _Nucleus, noise: torch.Tensor) -> torch.Tensor:
    """``[n]`` int64: the argmax of z + noise among the candidates of each row."""
    score = nucleus.z + noise
    if nucleus.min_p is not None:
        assert nucleus.weight is not None
        score.masked_fill_(nucleus.weight < nucleus.min_p[:, None], _NEG_INF)
    if nucleus.floor is not None:
        score.masked_fill_(nucleus.z < nucleus.floor[:, None], _NEG_INF)
    token = score.argmax(dim=1)
    if nucleus.mass is None and nucleus.max_rank is None:
        return token
    open_rows = torch.arange(token.shape[0], device=token.device)
    while True:
        inside, before = _is_candidate(nucleus, token[open_rows])
        outside = (~inside).nonzero()[:, 0]
        if outside.shape[0] == 0:
            return token
        open_rows, nucleus = open_rows[outside], nucleus.select(outside)
        score = score[outside].masked_fill_(~before[outside], _NEG_INF)
        token[open_rows] = score.argmax(dim=1)


def _is_candidate(nucleus: _Nucleus, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether one token of each row is a candidate, and which tokens are ordered before it.

    Returns:
        ``[n]`` bool and ``[n, vocab]`` bool.
    """
    z, at = nucleus.z, tokens[:, None]
    z_token = z.gather(1, at)
    ids = torch.arange(z.shape[1], device=z.device)
    before = (z == z_token).logical_and_(ids < at).logical_or_(z > z_token)
    rank = before.sum(dim=1)
    inside = torch.ones_like(rank, dtype=torch.bool)
    if nucleus.min_p is not None:
        assert nucleus.weight is not None
        inside &= nucleus.weight.gather(1, at)[:, 0] >= nucleus.min_p
    if nucleus.max_rank is not None:
        inside &= rank < nucleus.max_rank
    if nucleus.mass is not None:
        assert nucleus.weight is not None
        inside &= (nucleus.weight * before).sum(dim=1) < nucleus.mass
    return inside | (rank == 0), before


def _read_nucleus(inputs: VerifyInputs, layout: _Layout, rows: torch.Tensor) -> _Nucleus:
    request = layout.request[rows]
    z = _rows_of_z(inputs, layout, rows)
    min_p = None if inputs.min_p is None else inputs.min_p[request]
    weight = mass = max_rank = floor = None
    if inputs.top_p is not None or min_p is not None:
        best = z.amax(dim=1, keepdim=True)
        weight = _weigh(z, best)
    if inputs.top_p is not None:
        mass = _mass_left(weight, min_p)
    if inputs.top_k is not None:
        max_rank, floor, values = _top_k(z, inputs.top_k[request])
        if mass is not None and values is not None:
            kept = torch.arange(values.shape[1], device=z.device) < max_rank[:, None]
            mass_of_k = _mass_left(_weigh(values, best) * kept, min_p)
            mass = torch.where(max_rank < inputs.vocab_size, mass_of_k, mass)
    if mass is not None:
        assert inputs.top_p is not None
        top_p = inputs.top_p[request]
        mass = torch.where(top_p < 1, top_p * mass, _POS_INF)
    if inputs.max_candidate_len is not None:
        cap = torch.full_like(request, inputs.max_candidate_len)
        max_rank = cap if max_rank is None else torch.minimum(max_rank, cap)
    return _Nucleus(z, weight, mass, min_p, floor, max_rank)


def _weigh(z: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    # inf - inf is no number, but it stands for a token that ties with the best.
    return (z - best).nan_to_num_(nan=0.0, posinf=_POS_INF, neginf=_NEG_INF).exp_()


def _mass_left(weight: torch.Tensor, min_p: torch.Tensor | None) -> torch.Tensor:
    """``[n]`` float32: the sum of the weights that min-p leaves."""
    if min_p is not None:
        weight = weight * (weight >= min_p[:, None])
    return weight.sum(dim=1)


def _top_k(z: torch.Tensor, top_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """How many tokens top-k keeps, the z of the last one, and the largest z in falling order.

    Returns:
        ``[n]`` int64 (the vocabulary's size where top-k is off), ``[n]`` float32 and ``[n, widest
        k]`` float32; the last two are None if top-k is off everywhere.
    """
    vocab_size = z.shape[1]
    on = (top_k > 0) & (top_k < vocab_size)
    count = torch.where(on, top_k, vocab_size)
    widest = int(torch.where(on, top_k, 0).max())
    if widest == 0:
        return count, None, None
    values = z.topk(widest, dim=1).values
    last = values.gather(1, count.clamp(max=widest)[:, None] - 1)[:, 0]
    return count, torch.where(on, last, _NEG_INF), values


def _rows_of_z(inputs: VerifyInputs, layout: _Layout, rows: torch.Tensor) -> torch.Tensor:
    return _scale(inputs, layout, rows, inputs.logits[rows])


def _scale(inputs: VerifyInputs, layout: _Layout, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """``[n, any]`` float32: z of some logits of each row, which are copied, never changed."""
    z = logits.to(torch.float32).nan_to_num(nan=_NEG_INF, posinf=_POS_INF, neginf=_NEG_INF)
    if inputs.strategy == "greedy":
        return z
    temperature = inputs.temperature[layout.request[rows]]
    return z.div_(torch.where(temperature > 0, temperature, 1.0)[:, None])


def _chunks(inputs: VerifyInputs, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Some rows at a time, so that temporaries stay small; no chunk is empty."""
    if rows.shape[0] == 0:
        return ()
    on_cpu = rows.device.type == "cpu"
    elements = _CHUNK_ELEMENTS if on_cpu else _CHUNK_ELEMENTS_ON_ACCELERATOR
    return rows.split(max(1, elements // inputs.vocab_size))
