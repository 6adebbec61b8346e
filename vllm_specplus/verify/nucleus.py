"""The nucleus of rows that a filter acts on: the few tokens that can be inside, in order.

A bound on z comes first: no token of the nucleus lies below it. Block maxima give it, as each of them is one token's
value. So the k-th largest maximum is at most the k-th largest value. And the mass of the largest maxima is at most the
mass of as many tokens. Only the tokens that reach the bound are sorted.
"""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplus.verify.noise import token_noise
from vllm_specplus.verify.rows import NEG_INF, POS_INF, Rows, at_least, weigh
from vllm_specplus.verify.types import VerifyInputs

_MOST_MAXIMA = 256  # sorted in search of a bound for top-p
_MASS_SLACK = 1e-4  # of the row's mass: far above what float32 sums are off by
_SCORE_SLACK = 1e-3
_WIDE = 1024  # from here on numpy sorts much faster than torch on a CPU
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Nucleus:
    """The first tokens of some rows' order; the whole nucleus is among them.

    Attributes:
        token_ids: ``[n, m]`` int64 in order; 0 past a row's last.
        z: ``[n, m]`` float32, -inf past a row's last.
        weight: ``[n, m]`` float32, exp(z - the largest z of the row).
        inside: ``[n, m]`` bool, whether the token is in the nucleus: a number of first ones, at least one.
    """

    token_ids: torch.Tensor
    z: torch.Tensor
    weight: torch.Tensor
    inside: torch.Tensor

    def holds(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[n]`` bool: whether each row's token is in its nucleus."""
        return (self.inside & (self.token_ids == tokens[:, None])).any(dim=1)

    def has_rank(self, rank: int, tokens: torch.Tensor) -> torch.Tensor:
        """``[n]`` bool: whether each row's token has this place in the order."""
        if rank >= self.z.shape[1]:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return (self.token_ids[:, rank] == tokens) & (self.z[:, rank] > NEG_INF)

    def probabilities(self) -> torch.Tensor:
        """``[n, m]`` float32: the distribution within the nucleus, 0 outside."""
        mass = (self.weight * self.inside).masked_fill_(self.z == NEG_INF, 0.0)
        total = mass.sum(dim=1, keepdim=True)
        return mass / torch.where(total > 0, total, 1.0)

    def sample(self, score: torch.Tensor, noise_key: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
        """The token inside with the best score + noise of each row, the lower id on a tie.

        Args:
            score: ``[n, m]`` float32.
            noise_key: ``[n]`` int32, of ``noise.noise_keys``.
            excluded: ``[n]`` int64, a token that does not count, or -1.

        Returns:
            ``[n]`` int64, the first of the order where no token above -inf is left.
        """
        noised = score + token_noise(noise_key, self.token_ids)
        noised.masked_fill_(~self.inside | (self.token_ids == excluded[:, None]), NEG_INF)
        best = noised.amax(dim=1, keepdim=True)
        last = torch.iinfo(torch.int64).max
        lowest = self.token_ids.masked_fill(noised < best, last).amin(dim=1)
        return torch.where(best[:, 0] > NEG_INF, lowest, self.token_ids[:, 0])


def has_filter(inputs: VerifyInputs, request: torch.Tensor) -> torch.Tensor:
    """``[n]`` bool: whether any filter acts for some requests, ``[n]`` int64."""
    if inputs.max_candidate_len is not None:
        return torch.ones_like(request, dtype=torch.bool)
    result = torch.zeros_like(request, dtype=torch.bool)
    if inputs.top_p is not None:
        result |= inputs.top_p[request] < 1
    if inputs.min_p is not None:
        result |= inputs.min_p[request] > 0
    return result | (_top_k(inputs, request) < inputs.vocab_size)


def _top_k(inputs: VerifyInputs, request: torch.Tensor) -> torch.Tensor:
    """``[n]`` int64: the top-k of some requests, the size of the vocabulary where it does not act."""
    off = torch.full_like(request, inputs.vocab_size)
    if inputs.top_k is None:
        return off
    top_k = inputs.top_k[request]
    return torch.where((top_k > 0) & (top_k < inputs.vocab_size), top_k, off)


def read_nucleus(inputs: VerifyInputs, rows: Rows) -> Nucleus:
    """The nucleus of rows whose temperature is above 0."""
    request = rows.request
    top_k = _top_k(inputs, request)
    min_p = None if inputs.min_p is None else inputs.min_p[request]
    mass = None
    if inputs.top_p is not None:
        # top-p takes its share of what min-p and top-k leave; where top-k acts that is summed among the sorted.
        weight = weigh(rows.z, rows.best)
        mass = (weight if min_p is None else weight * (weight >= min_p[:, None])).sum(dim=1)
    bound = _lower_bound(inputs, rows, top_k, min_p, mass)
    token_ids, z = _sort(rows, bound)

    weight = weigh(z, rows.best)
    rank = torch.arange(z.shape[1], device=z.device)
    inside = (z > NEG_INF) & (rank < top_k[:, None])
    if min_p is not None:
        inside &= weight >= min_p[:, None]
    if mass is not None:
        assert inputs.top_p is not None
        left = weight * inside
        above = torch.nn.functional.pad(left.cumsum(dim=1)[:, :-1], (1, 0))
        mass = torch.where(top_k < inputs.vocab_size, left.sum(dim=1), mass)
        top_p = inputs.top_p[request]
        inside &= above < torch.where(top_p < 1, top_p * mass, POS_INF)[:, None]
    if inputs.max_candidate_len is not None:
        inside &= rank < inputs.max_candidate_len
    inside[:, 0] = True
    # Tokens past every row's nucleus are of no use, but a second choice may pass by `verify_window`.
    size = max(int(inside.sum(dim=1).max()), 2)
    return Nucleus(*(value[:, :size] for value in (token_ids, z, weight, inside)))


def _lower_bound(
    inputs: VerifyInputs, rows: Rows, top_k: torch.Tensor, min_p: torch.Tensor | None, mass: torch.Tensor | None
) -> torch.Tensor:
    """``[n]`` float32: no token of the nucleus has a z below this, nor one of the first two of the order."""
    best, maxima = rows.best, rows.maxima
    count = top_k
    if inputs.max_candidate_len is not None:
        # If both top-k and top-p act, the mass of all that top-k keeps has to be known.
        fewer = top_k.clamp(max=inputs.max_candidate_len)
        count = fewer if mass is None else torch.where(top_k < inputs.vocab_size, top_k, fewer)
    num_maxima = min(maxima.shape[1], _MOST_MAXIMA)
    largest = maxima.topk(num_maxima, dim=1).values
    bound = largest.gather(1, (count[:, None] - 1).clamp(max=num_maxima - 1))[:, 0]
    bound = torch.where(count <= num_maxima, bound, _LOWEST)
    if min_p is not None:
        slack = _SCORE_SLACK + best.abs().clamp(max=-_LOWEST) * 2.0**-20
        bound = torch.where(min_p > 0, torch.maximum(bound, best + min_p.log() - slack), bound)
    if mass is not None:
        assert inputs.top_p is not None
        top_p = inputs.top_p[rows.request]
        enough = (top_p * mass + _MASS_SLACK * mass)[:, None]
        reached = (weigh(largest, best).cumsum(dim=1) >= enough).to(torch.int8)
        at = reached.argmax(dim=1, keepdim=True)
        acts = (top_p < 1) & (top_k >= inputs.vocab_size) & (reached.amax(dim=1) > 0)
        bound = torch.where(acts, torch.maximum(bound, largest.gather(1, at)[:, 0]), bound)
    if inputs.verify_window > 0:
        second = largest[:, 1] if num_maxima > 1 else torch.full_like(bound, _LOWEST)
        bound = torch.minimum(bound, second)
    # Nothing at -inf is a candidate; of a row of nothing else, token 0 is.
    return torch.where(best == NEG_INF, POS_INF, bound.clamp(min=_LOWEST))


def _sort(rows: Rows, bound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens whose z reaches the bound of their row, in order.

    Returns:
        ``[n, m]`` int64 ids, 0 past a row's last, and ``[n, m]`` float32 z, -inf there.
    """
    row, token = at_least(rows.z, rows.maxima, bound)
    num_rows = bound.shape[0]
    counts = torch.bincount(row, minlength=num_rows)
    size = max(int(counts.max()), 2)
    place = torch.arange(row.shape[0], device=row.device) - (counts.cumsum(0) - counts)[row]
    z = torch.full((num_rows, size), NEG_INF, device=row.device)
    z[row, place] = rows.z[row, token]
    token_ids = torch.zeros((num_rows, size), dtype=torch.int64, device=row.device)
    token_ids[row, place] = token
    order = _falling_order(z)
    return token_ids.gather(1, order), z.gather(1, order)


def _falling_order(z: torch.Tensor) -> torch.Tensor:
    """``[n, m]`` int64: the places of the values of each row, the largest first, the lower place among equals."""
    if z.shape[1] < _WIDE or z.device.type != "cpu":
        return z.sort(dim=1, descending=True, stable=True).indices
    # The bits of a float, as an integer, rise with it, but fall where it is negative. -0 counts as 0.
    bits = (z + 0.0).view(torch.int32).to(torch.int64)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (~rising << 32) | torch.arange(z.shape[1])
    return torch.from_numpy(np.sort(keys.numpy(), axis=1)) & 0xFFFFFFFF
