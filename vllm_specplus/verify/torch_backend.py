"""Verification in plain torch, on any device: the specification of `reference.py`, many rows at a time.

A greedy row takes one pass, for its largest logit. A sampled row without filters takes some thirty: first an upper
bound of z + noise for all tokens. Then it takes the score itself for the few whose bound reaches the best. A row with
filters takes those that find its nucleus (`nucleus.py`), and noise for the nucleus alone.

Rows that cannot matter are left out, and their number is read back from the device. So on an accelerator the host
waits a few times for every chunk of rows.
"""

from dataclasses import dataclass

import torch

from vllm_specplus.verify.noise import acceptance_uniform, noise_keys
from vllm_specplus.verify.nucleus import has_filter, read_nucleus
from vllm_specplus.verify.rows import (
    NEG_INF,
    Rows,
    argmax,
    best_noised,
    first_tokens,
    probabilities,
    read_rows,
    scale_rows,
)
from vllm_specplus.verify.types import VerifyInputs, VerifyOutput

# Logits worked on at a time (at least one row). On a CPU they are few enough for the temporaries to stay in a cache. On
# an accelerator they keep it busy, at some ten temporaries of a quarter of a GiB.
_CHUNK_ELEMENTS = 1 << 18
_CHUNK_ELEMENTS_ON_ACCELERATOR = 1 << 26
_GREEDY_CHUNKS = 8  # an argmax has no temporaries, or a single one


@dataclass(frozen=True)
class _Layout:
    """The request that a row belongs to, and the rows that a request has.

    Attributes:
        request: ``[num_rows]`` int64.
        counts: ``[num_reqs]`` int64.
        grid: ``[num_reqs, max_rows]`` int64, the row at each slot; in bounds past a request's end too.
        sampled: ``[num_rows]`` bool, whether the row's request is sampled; the others are greedy.
        filtered: ``[num_rows]`` bool, whether a filter acts for the row's request.
        noise_key: ``[num_rows]`` int32, of ``noise.noise_keys``.
    """

    request: torch.Tensor
    counts: torch.Tensor
    grid: torch.Tensor
    sampled: torch.Tensor
    filtered: torch.Tensor
    noise_key: torch.Tensor

    def read(self, inputs: VerifyInputs, rows: torch.Tensor) -> Rows:
        return read_rows(inputs, rows, self.request[rows], self.noise_key[rows])


def verify(inputs: VerifyInputs) -> VerifyOutput:
    """Verify the drafts of every request; see ``vllm_specplus.verify.verify_draft_tokens``."""
    if inputs.num_reqs == 0 or inputs.num_rows == 0:
        return _no_tokens(inputs)
    is_greedy = inputs.strategy == "greedy" or not bool(inputs.temperature.any())
    if is_greedy and inputs.policy == "normal":
        return _verify_greedy(inputs)
    layout = _lay_out(inputs)
    proposals = _proposals(inputs, layout)
    drafts = _acceptable_drafts(inputs, layout, proposals)
    emitted = torch.full_like(drafts, -1)
    if inputs.policy == "reject_all":
        accepted = torch.zeros_like(drafts, dtype=torch.bool)
    elif inputs.policy == "accept_all":
        accepted = drafts >= 0
    else:
        _emit(inputs, layout, ~layout.sampled, emitted)
        if inputs.strategy == "target_match":
            _emit(inputs, layout, layout.sampled, emitted)
        elif inputs.strategy not in ("greedy", "topp", "rejection"):
            raise NotImplementedError(f"strategy {inputs.strategy!r} has no rule here")
        accepted = emitted == drafts
        accepted &= drafts >= 0
        if inputs.strategy == "topp":
            _accept_candidates(inputs, layout, drafts, accepted)
        elif inputs.strategy == "rejection":
            _accept_by_ratio(inputs, layout, drafts, accepted)
    return _scan(inputs, layout, proposals, accepted, emitted)


def _no_tokens(inputs: VerifyInputs) -> VerifyOutput:
    device, shape = inputs.logits.device, (inputs.num_reqs, inputs.max_rows)
    return VerifyOutput(
        torch.full(shape, -1, dtype=torch.int64, device=device),
        torch.zeros(inputs.num_reqs, dtype=torch.int32, device=device),
    )


def _verify_greedy(inputs: VerifyInputs) -> VerifyOutput:
    """Accept what is the likeliest token; every strategy's rule where no request is sampled, in few operations."""
    cu = inputs.cu_num_rows
    every = torch.arange(inputs.num_rows, device=cu.device)
    likeliest = torch.cat([first_tokens(inputs, rows) for rows in every.split(_rows_at_a_time(inputs, _GREEDY_CHUNKS))])
    # A row of nothing but -inf emits a token, but accepts none.
    accepts = inputs.logits.gather(1, likeliest[:, None])[:, 0] > NEG_INF
    accepts &= likeliest == inputs.draft_token_ids
    slots = torch.arange(inputs.max_rows, device=cu.device)
    grid = (cu[:-1, None] + slots).clamp_(max=inputs.num_rows - 1)
    counts = cu.diff().clamp_(max=inputs.max_rows)
    accepted = accepts[grid] & (slots < counts[:, None] - 1)
    num_tokens = torch.minimum(accepted.cumprod(dim=1).sum(dim=1) + 1, counts)
    token_ids = torch.where(slots < num_tokens[:, None], likeliest[grid], -1)
    return VerifyOutput(token_ids, num_tokens.to(torch.int32))


def _lay_out(inputs: VerifyInputs) -> _Layout:
    cu = inputs.cu_num_rows
    every = torch.arange(inputs.num_reqs, device=cu.device)
    counts = cu.diff()
    request = every.repeat_interleave(counts, output_size=inputs.num_rows)
    slots = torch.arange(inputs.max_rows, device=cu.device)
    grid = (cu[:-1, None] + slots).clamp_(max=inputs.num_rows - 1)
    sampled = (inputs.temperature > 0)[request] if inputs.strategy != "greedy" else torch.zeros_like(request).bool()
    if bool(sampled.any()):
        filtered = has_filter(inputs, every)[request]
        keys = noise_keys(inputs.seeds[request], inputs.positions)
    else:
        filtered, keys = sampled, request.to(torch.int32)  # which nothing reads
    return _Layout(request, counts.clamp(max=inputs.max_rows), grid, sampled, filtered, keys)


def _proposals(inputs: VerifyInputs, layout: _Layout) -> torch.Tensor:
    """``[num_rows]`` int64: the draft, or -1 where there is none."""
    rows = torch.arange(inputs.num_rows, device=layout.request.device)
    last = inputs.cu_num_rows[layout.request] + layout.counts[layout.request] - 1
    drafts = inputs.draft_token_ids
    return torch.where((rows < last) & (drafts >= 0) & (drafts < inputs.vocab_size), drafts, -1)


def _acceptable_drafts(inputs: VerifyInputs, layout: _Layout, proposals: torch.Tensor) -> torch.Tensor:
    """``[num_rows]`` int64: the draft, or -1 where none could be accepted under any policy."""
    logits = inputs.logits.gather(1, proposals.clamp(min=0)[:, None])[:, 0].to(torch.float32)
    z = logits / torch.where(layout.sampled, inputs.temperature[layout.request], 1.0)
    # Also false for NaN.
    return torch.where(z > NEG_INF, proposals, -1)


def _scan(
    inputs: VerifyInputs, layout: _Layout, drafts: torch.Tensor, accepted: torch.Tensor, emitted: torch.Tensor
) -> VerifyOutput:
    """Drafts up to the first row that does not accept, then the token that this row emits.

    Args:
        drafts: ``[num_rows]`` int64, -1 where there is none.
        accepted: ``[num_rows]`` bool.
        emitted: ``[num_rows]`` int64, the token of each row, or -1 where it is not known yet.
    """
    grid, counts = layout.grid, layout.counts
    slots = torch.arange(inputs.max_rows, device=grid.device)
    in_request = slots < counts[:, None] - 1
    run = (accepted[grid] & in_request).cumprod(dim=1).sum(dim=1)
    rows = (inputs.cu_num_rows[:-1] + run).clamp_(max=inputs.num_rows - 1)
    if not bool((emitted[rows] >= 0).all()):
        is_last = torch.zeros_like(accepted)
        is_last[rows] = True
        judged = inputs.strategy == "rejection" and inputs.policy == "normal"
        _emit(inputs, layout, is_last & (emitted < 0), emitted, drafts if judged else None)

    token_ids = torch.where(slots < run[:, None], drafts[grid], -1)
    ends_run = (slots == run[:, None]) & (counts > 0)[:, None]
    token_ids = torch.where(ends_run, emitted[rows][:, None], token_ids)
    num_tokens = torch.where(counts > 0, run + 1, 0).to(torch.int32)
    return VerifyOutput(token_ids, num_tokens)


def _accept_candidates(inputs: VerifyInputs, layout: _Layout, drafts: torch.Tensor, accepted: torch.Tensor) -> None:
    """Set `accepted` of the drafts of sampled requests by strategy `topp`; all other rows are left as they are."""
    tested = layout.sampled & (drafts >= 0)
    # Without a filter every token is a candidate.
    accepted |= tested & ~layout.filtered
    first, second = torch.zeros_like(accepted), torch.zeros_like(accepted)
    for rows in _chunks(inputs, tested & layout.filtered):
        nucleus = read_nucleus(inputs, layout.read(inputs, rows))
        accepted[rows] = nucleus.holds(drafts[rows])
        first[rows] = nucleus.has_rank(0, drafts[rows])
        second[rows] = nucleus.has_rank(1, drafts[rows])
    if inputs.verify_window > 0:
        accepted |= second & _followed_by(first, inputs.verify_window)


def _followed_by(first: torch.Tensor, verify_window: int) -> torch.Tensor:
    """Whether the next `verify_window` rows are all set in `first`.

    A bonus row holds no draft, so it is never set, and no row looks into the next request.
    """
    num_rows = first.shape[0]
    padded = torch.nn.functional.pad(first, (0, verify_window))
    result = torch.ones_like(first)
    for step in range(1, verify_window + 1):
        result &= padded[step : step + num_rows]
    return result


def _accept_by_ratio(inputs: VerifyInputs, layout: _Layout, drafts: torch.Tensor, accepted: torch.Tensor) -> None:
    """Set `accepted` of the drafts of sampled requests by strategy `rejection`; all other rows are left as they are."""
    tested = layout.sampled & (drafts >= 0)
    for chunk, is_filtered in ((tested & ~layout.filtered, False), (tested & layout.filtered, True)):
        for numbers in _chunks(inputs, chunk):
            rows, tokens = layout.read(inputs, numbers), drafts[numbers]
            if is_filtered:
                nucleus = read_nucleus(inputs, rows)
                p = (nucleus.probabilities() * (nucleus.token_ids == tokens[:, None])).sum(dim=1)
            else:
                p = probabilities(rows.z, rows.best).gather(1, tokens[:, None])[:, 0]
            u = acceptance_uniform(inputs.seeds[rows.request], inputs.positions[numbers])
            if inputs.draft_logits is not None:
                q, was_drawn = _draft_probabilities(inputs, rows, numbers)
                u = torch.where(was_drawn, u * q.gather(1, tokens[:, None])[:, 0], u)
            accepted[numbers] = p > u


def _emit(
    inputs: VerifyInputs,
    layout: _Layout,
    wanted: torch.Tensor,
    emitted: torch.Tensor,
    drafts: torch.Tensor | None = None,
) -> None:
    """Set `emitted` of some rows to the token that each emits if the run of accepted drafts ends there.

    Args:
        wanted: ``[num_rows]`` bool, these rows.
        emitted: ``[num_rows]`` int64.
        drafts: ``[num_rows]`` int64, the draft that `rejection` turned down at each row, or -1; None: none anywhere.
    """
    for numbers in _chunks(inputs, wanted & ~layout.sampled, _GREEDY_CHUNKS):
        emitted[numbers] = first_tokens(inputs, numbers)
    wanted = wanted & layout.sampled
    for chunk, sample in ((wanted & ~layout.filtered, _sample_row), (wanted & layout.filtered, _sample_nucleus)):
        for numbers in _chunks(inputs, chunk):
            rejected = torch.full_like(numbers, -1) if drafts is None else drafts[numbers]
            emitted[numbers] = sample(inputs, layout.read(inputs, numbers), numbers, rejected)


def _sample_row(inputs: VerifyInputs, rows: Rows, numbers: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """``[n]`` int64: a sample of rows without filters, or of what they have more of than the drafts' distribution.

    `rejected`: ``[n]`` int64, the draft that was turned down, -1 where there was none.
    """
    score = rows.z
    if inputs.draft_logits is not None and bool((rejected >= 0).any()):
        q, was_drawn = _draft_probabilities(inputs, rows, numbers)
        score, rejected = _excess(score, probabilities(rows.z, rows.best), q, was_drawn, rejected)
    token, is_found = best_noised(score, rows.noise_key, rejected)
    return token if bool(is_found.all()) else torch.where(is_found, token, argmax(rows.z, rows.maxima))


def _sample_nucleus(inputs: VerifyInputs, rows: Rows, numbers: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """As `_sample_row`, for rows with filters."""
    nucleus = read_nucleus(inputs, rows)
    score = nucleus.z
    if inputs.draft_logits is not None and bool((rejected >= 0).any()):
        q, was_drawn = _draft_probabilities(inputs, rows, numbers)
        q = q.gather(1, nucleus.token_ids)
        score, rejected = _excess(score, nucleus.probabilities(), q, was_drawn, rejected)
    return nucleus.sample(score, rows.noise_key, rejected)


def _excess(
    score: torch.Tensor, p: torch.Tensor, q: torch.Tensor, was_drawn: torch.Tensor, rejected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a drawn draft was turned down, the log of what p has more than q; elsewhere the score as it is.

    Args:
        score, p, q: ``[n, m]`` float32.
        was_drawn: ``[n]`` bool, whether the draft was drawn from q.
        rejected: ``[n]`` int64, the draft that was turned down, or -1.

    Returns:
        ``[n, m]`` float32, and `rejected` with -1 for drawn drafts, which need no further exclusion.
    """
    uses_q = was_drawn & (rejected >= 0)
    more = (p - q).clamp_(min=0).log_()
    return torch.where(uses_q[:, None], more, score), torch.where(uses_q, -1, rejected)


def _draft_probabilities(inputs: VerifyInputs, rows: Rows, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution that the draft of each row was drawn from, and whether it was drawn.

    Returns:
        ``[n, padded_size]`` float32 and ``[n]`` bool.
    """
    assert inputs.draft_logits is not None
    draft_rows = numbers if inputs.draft_rows is None else inputs.draft_rows[numbers]
    logits = inputs.draft_logits.index_select(0, draft_rows.clamp(min=0))
    z, maxima = scale_rows(logits, inputs.temperature[rows.request])
    best = maxima.amax(dim=1)
    return probabilities(z, best), (best > NEG_INF) & (draft_rows >= 0)


def _chunks(inputs: VerifyInputs, wanted: torch.Tensor, times: int = 1) -> tuple[torch.Tensor, ...]:
    """The numbers of the rows in a mask, some rows at a time, so that temporaries stay small; no chunk is empty."""
    rows = wanted.nonzero()[:, 0]
    if rows.shape[0] == 0:
        return ()
    return rows.split(_rows_at_a_time(inputs, times))


def _rows_at_a_time(inputs: VerifyInputs, times: int) -> int:
    elements = _CHUNK_ELEMENTS if inputs.logits.device.type == "cpu" else _CHUNK_ELEMENTS_ON_ACCELERATOR
    return max(1, times * elements // inputs.vocab_size)
