"""Rows of target logits, read so that a few passes over the vocabulary answer most questions.

Rows are padded with -inf to whole blocks of 64 tokens, and the largest value of each block is kept. The maxima say
where large values are, so only a few blocks are visited again. On a CPU torch has no fast comparison or argmax over a
whole row: a row of 49,152 tokens takes 40 to 100 µs in either, and 5 µs in a maximum.
"""

import math
from dataclasses import dataclass

import torch

from vllm_specplus.verify.noise import log_uniform_bound, token_noise
from vllm_specplus.verify.types import VerifyInputs

NEG_INF = float("-inf")
POS_INF = float("inf")
BLOCK = 64


@dataclass(frozen=True)
class Rows:
    """Some rows of logits over the temperature of their requests.

    Attributes:
        request: ``[n]`` int64, the request of each row.
        noise_key: ``[n]`` int32, of ``noise.noise_keys``.
        z: ``[n, padded_size]`` float32 without NaN; `padded_size` is the vocabulary's size in whole blocks, -inf past
            its end.
        maxima: ``[n, padded_size / 64]`` float32, the largest z of each block.
        best: ``[n]`` float32, the largest z of each row.
    """

    request: torch.Tensor
    noise_key: torch.Tensor
    z: torch.Tensor
    maxima: torch.Tensor
    best: torch.Tensor


def read_rows(inputs: VerifyInputs, rows: torch.Tensor, request: torch.Tensor, noise_key: torch.Tensor) -> Rows:
    """Read rows of some numbers, ``[n]`` int64 rising, whose requests are sampled; the rest is as in `Rows`."""
    z, maxima = scale_rows(take_rows(inputs.logits, rows), inputs.temperature[request])
    return Rows(request, noise_key, z, maxima, maxima.amax(dim=1))


def first_tokens(inputs: VerifyInputs, rows: torch.Tensor) -> torch.Tensor:
    """``[n]`` int64: the likeliest token of some rows, ``[n]`` int64 rising; the lowest id among equals."""
    return argmax(*_without_nan(_pad(take_rows(inputs.logits, rows))))


def scale_rows(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits over temperature, as a copy in which NaN is -inf, and the maxima of its blocks.

    Returns:
        ``[n, padded_size]`` and ``[n, padded_size / 64]`` float32.
    """
    num_rows, vocab_size = logits.shape
    z = torch.empty(num_rows, -(-vocab_size // BLOCK) * BLOCK, dtype=torch.float32, device=logits.device)
    z[:, vocab_size:] = NEG_INF
    # A division of bfloat16 by float32 takes torch ten times as long as the copy.
    z[:, :vocab_size].copy_(logits).div_(temperature[:, None])
    return _without_nan(z)


def take_rows(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows, ``[n]`` int64 rising; a view where they lie side by side."""
    if rows.shape[0] == 0:
        return logits[:0]
    start, end = int(rows[0]), int(rows[-1]) + 1
    return logits[start:end] if end - start == rows.shape[0] else logits.index_select(0, rows)


def block_maxima(values: torch.Tensor) -> torch.Tensor:
    """``[n, padded_size / 64]``: the largest value of each block; NaN where one is NaN."""
    return values.unflatten(1, (-1, BLOCK)).amax(dim=2)


def argmax(values: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """``[n]`` int64: the first of the largest values of each row."""
    block = maxima.argmax(dim=1)
    inside = values.view(-1, BLOCK).index_select(
        0, torch.arange(0, maxima.numel(), maxima.shape[1], device=block.device) + block
    )
    return block * BLOCK + inside.argmax(dim=1)


def weigh(z: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """exp(z - best) for z ``[n, any]`` and best ``[n]``: 1 for all that tie with the best, 0 for -inf below it."""
    weight = z - best[:, None]
    if bool(best.isinf().any()):
        # inf - inf is no number, but it stands for a token that ties with the best.
        weight.nan_to_num_(nan=0.0, posinf=POS_INF, neginf=NEG_INF)
    return weight.exp_()


def probabilities(z: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """``[n, padded_size]`` float32: the softmax of whole rows z; of nothing but -inf, 0."""
    weight = weigh(z, best)
    total = weight.sum(dim=1)
    return weight.mul_(torch.where(best > NEG_INF, 1 / total, 0.0)[:, None])


def best_noised(
    score: torch.Tensor, noise_key: torch.Tensor, excluded: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token with the best score + noise of each row, the lower id on a tie.

    Args:
        score: ``[n, padded_size]`` float32 without NaN, contiguous.
        noise_key: ``[n]`` int32.
        excluded: ``[n]`` int64, a token that does not count, or -1.

    Returns:
        ``[n]`` int64, and ``[n]`` bool: whether the row had any token above -inf.
    """
    bound = log_uniform_bound(noise_key, score.shape[1])
    torch.sub(score, bound, out=bound)
    at = excluded.clamp(min=0)[:, None]
    bound.scatter_(1, at, torch.where(excluded[:, None] >= 0, NEG_INF, bound.gather(1, at)))
    maxima = block_maxima(bound)
    token = argmax(bound, maxima)
    is_found = maxima.amax(dim=1) > NEG_INF
    # A score to reach: at least this has the token that seems best.
    least = _least_noised(score.gather(1, token[:, None])[:, 0], bound.gather(1, token[:, None])[:, 0])
    row, tokens = at_least(bound, maxima, torch.where(is_found, least, POS_INF))
    noised = score[row, tokens] + token_noise(noise_key[row], tokens[:, None])[:, 0]
    best = torch.full_like(least, NEG_INF).scatter_reduce_(0, row, noised, "amax")
    winners = torch.where(noised == best[row], tokens, score.shape[1])
    return torch.full_like(token, score.shape[1]).scatter_reduce_(0, row, winners, "amin"), is_found


def _least_noised(score: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """``[n]`` float32: a number that score + noise is at least, of scores whose upper bound is known.

    The bound is score - log(u), from which u follows, and the noise is -log(-log(1 - u)). Rounding is allowed for.
    """
    u = torch.exp(score - bound).mul_(1 + 2.0**-10).add_(2.0**-30).clamp_(max=1 - 2.0**-24)
    noise = torch.log1p(-u).neg_().log_().neg_()
    # u is known less well where the score is large.
    slack = score.abs() * 2.0**-18 + 1e-3
    return torch.where(score.isinf(), score, score + noise - slack)


def at_least(values: torch.Tensor, maxima: torch.Tensor, bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where values reach the bound of their row.

    Args:
        values: ``[n, padded_size]`` float32, contiguous.
        maxima: ``[n, padded_size / 64]`` float32, of these values.
        bounds: ``[n]`` float32.

    Returns:
        ``[m]`` int64 rows and ``[m]`` int64 columns, by rising row, then by rising column.
    """
    row, block = (maxima >= bounds[:, None]).nonzero(as_tuple=True)
    inside = values.view(-1, BLOCK).index_select(0, row * maxima.shape[1] + block)
    hit, place = (inside >= bounds[row, None]).nonzero(as_tuple=True)
    return row[hit], block[hit] * BLOCK + place


def _pad(logits: torch.Tensor) -> torch.Tensor:
    """Rows as float32 in whole blocks, -inf past the vocabulary's end; a copy only where it has to be."""
    missing = -logits.shape[1] % BLOCK
    z = logits.to(torch.float32)
    return torch.nn.functional.pad(z, (0, missing), value=NEG_INF) if missing else z.contiguous()


def _without_nan(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows with -inf for NaN, a copy only where there is one, and the maxima of their blocks."""
    maxima = block_maxima(z)
    # A maximum is NaN where a value is; so is a sum of both infinities, which does no harm here.
    if math.isnan(maxima.sum().item()):
        z = z.nan_to_num(nan=NEG_INF, posinf=POS_INF, neginf=NEG_INF)
        maxima = block_maxima(z)
    return z, maxima
