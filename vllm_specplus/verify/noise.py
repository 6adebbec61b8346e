"""Noise that depends on (seed, position, token id) alone, or on (seed, position).

The hash of the Gumbel noise and the two logarithms are those of vLLM's V2 runner, restated in torch operations. There
they are ``murmur3_hash32``, ``murmur3_uniform32`` and ``gumbel_noised_argmax`` at float32, of
``vllm/v1/worker/gpu/sample/gumbel.py``. So the same logits, seed and position give the token that vLLM's sampler draws.
A draft is judged by Triton's ``tl.rand(seed, position)``, as in that runner's rejection sampler: Philox-4x32-10 (Salmon
et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

The hashes and the uniform numbers made of them agree bit for bit. The Gumbel noise goes through the platform's
``log``, so it agrees to a few units in the last place. The drawn token agrees unless two scores are that close.

torch has little arithmetic for uint32. int32 has the same bits, and its additions, products and left shifts wrap
alike. Only the right shift needs care.
"""

from functools import lru_cache

import torch

_KEY_MUL_1 = 0xCC9E2D51 - (1 << 32)
_KEY_MUL_2 = 0x1B873593
_HASH_ADD = 0xE6546B64 - (1 << 32)
_FINAL_MUL_1 = 0x85EBCA6B - (1 << 32)
_FINAL_MUL_2 = 0xC2B2AE35 - (1 << 32)
_KEY_BYTES = 16  # Murmur3 mixes in the length of its key: three words and the token id

_PHILOX_ROUNDS = 10
_PHILOX_MUL_A, _PHILOX_MUL_B = 0xD2511F53, 0xCD9E8D57
_PHILOX_KEY_A, _PHILOX_KEY_B = 0x9E3779B9, 0xBB67AE85
_SMALLEST_UNIFORM = 4.6566127342e-10  # a zero would accept a draft of no probability

_SMALLEST_SURVIVAL = 2.0**-24  # keeps log(1 - u) finite where u rounds to 1
_SERIES_BELOW = 0.25
_BOUND_SCALE = (1 - 2.0**-13) * 2.0**-32


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise to add to scaled logits before an argmax, which then is a sample from their softmax.

    Args:
        seeds: ``[n]`` int64, the seed of the request that each row belongs to. Any value.
        positions: ``[n]`` int64, position of the token that gave the row's logits, in its sequence (0-based, as V2's
            ``positions[logits_indices]``). The token drawn with it will stand at ``position + 1``.
        vocab_size: number of token ids.

    Returns:
        ``[n, vocab_size]`` float32 in about [-2.82, 22.9], a function of (seed, position, token id) alone.
    """
    return _gumbel(_uniform(_hash(seeds, positions, vocab_size)))


def noise_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``[n]`` int32: what rows bring into the hash of their noise, of seeds and positions as for `gumbel_noise`."""
    # The two halves of each number, the lower one first.
    halves = torch.stack((seeds, positions)).view(torch.int32)
    words = torch.stack((halves[0, ::2], halves[0, 1::2], halves[1, ::2]))
    prefix = torch.zeros_like(words[0])
    for key in _rotated_key(words):
        prefix = _rotate_left(prefix, 13).bitwise_xor_(key).mul_(5).add_(_HASH_ADD)
    return _rotate_left(prefix, 13)


def token_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The noise of some tokens alone: what `gumbel_noise` has for them.

    Args:
        keys: ``[n]`` int32, of `noise_keys`.
        token_ids: ``[n, m]`` int64.

    Returns:
        ``[n, m]`` float32.
    """
    h = _unfinished_hash(keys, _rotated_key(token_ids.to(torch.int32)))
    return _gumbel(_uniform(_finish_hash(h)))


def log_uniform_bound(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """log(u) or slightly less, of the uniform number u that the noise of each token is made of.

    The noise is -log(-log(1 - u)), so it is at most -log(u), and comes close to that where it is large. This takes a
    third of the noise's time. The hash lacks its last step here, which moves u by less than 2^-14 of itself.

    Args:
        keys: ``[n]`` int32, of `noise_keys`.
        vocab_size: number of token ids.

    Returns:
        ``[n, vocab_size]`` float32.
    """
    u = _unfinished_hash(keys, token_keys(vocab_size, keys.device)).view(torch.uint32).to(torch.float32)
    half = torch.tensor(_BOUND_SCALE / 2, device=u.device)
    return torch.add(half, u, alpha=_BOUND_SCALE, out=u).log_()


def acceptance_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers to compare with the acceptance probability of drafts.

    Args:
        seeds: ``[n]`` int64, the seed of the request that each row belongs to.
        positions: ``[n]`` int64, as for `gumbel_noise`.

    Returns:
        ``[n]`` float32 in (0, 1], independent of `gumbel_noise`.
    """
    zero = torch.zeros_like(positions)
    words = [*_split(positions), zero, zero]
    key_a, key_b = _split(seeds)
    for _ in range(_PHILOX_ROUNDS):
        # The product of two 32-bit words wraps in int64, but its bits are right.
        low_b, high_b = _split(words[2] * _PHILOX_MUL_B)
        low_a, high_a = _split(words[0] * _PHILOX_MUL_A)
        words = [high_b ^ words[1] ^ key_a, low_b, high_a ^ words[3] ^ key_b, low_a]
        key_a, key_b = (key_a + _PHILOX_KEY_A) & 0xFFFFFFFF, (key_b + _PHILOX_KEY_B) & 0xFFFFFFFF
    signed = _low_word(words[0])
    folded = torch.where(signed < 0, -signed - 1, signed)
    return (folded.to(torch.float32) * _SMALLEST_UNIFORM).clamp_(min=_SMALLEST_UNIFORM)


def _split(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The low and the high 32 bits of int64, each as a non-negative int64."""
    return value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF


def _hash(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Murmur3 (x86, 32 bits) of seed, position and token id: ``[n, vocab_size]`` int32."""
    h = _unfinished_hash(noise_keys(seeds, positions), token_keys(vocab_size, seeds.device))
    return _finish_hash(h)


def _unfinished_hash(keys: torch.Tensor, token_keys: torch.Tensor) -> torch.Tensor:
    """``[n, m]`` int32: the hash before its last step.

    `token_keys`: int32, ``[m]`` or ``[n, m]``, rotated as `keys` are. Rotation goes through an exclusive or.
    """
    h = torch.bitwise_xor(keys[:, None], token_keys)
    h = torch.add(torch.tensor(_HASH_ADD, dtype=torch.int32, device=h.device), h, alpha=5, out=h)
    h.bitwise_xor_(_KEY_BYTES)
    shifted = torch.empty_like(h)
    for shift, factor in ((16, _FINAL_MUL_1), (13, _FINAL_MUL_2)):
        torch.bitwise_right_shift(h, shift, out=shifted).bitwise_and_((1 << (32 - shift)) - 1)
        h.bitwise_xor_(shifted).mul_(factor)
    return h


def _finish_hash(h: torch.Tensor) -> torch.Tensor:
    return h.bitwise_xor_(_shift_right(h, 16))


@lru_cache(maxsize=4)
def token_keys(vocab_size: int, device: torch.device) -> torch.Tensor:
    """What each token id brings into the hash: ``[vocab_size]`` int32, the same in every step."""
    return _rotated_key(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _rotated_key(word: torch.Tensor) -> torch.Tensor:
    return _rotate_left(_rotate_left(word * _KEY_MUL_1, 15) * _KEY_MUL_2, 13)


def _low_word(value: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64, as int32 with the same bits."""
    unsigned = value & 0xFFFFFFFF
    return ((unsigned ^ 0x80000000) - 0x80000000).to(torch.int32)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; ``>>`` alone would copy the sign bit in."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x << bits).bitwise_or_(_shift_right(x, 32 - bits))


def _uniform(h: torch.Tensor) -> torch.Tensor:
    """``(h + 0.5) / 2**32`` for the unsigned h, rounded once to float32: in (0, 1]."""
    high = _shift_right(h, 16).to(torch.float32).mul_(2.0**-16)
    low = (h & 0xFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32)
    return high.add_(low)


def _gumbel(u: torch.Tensor) -> torch.Tensor:
    """``-log(-log(1 - u))``, precise where it is large: u near 0, where float32 is fine."""
    # The series of log(1 - u) to degree 8, by Horner's rule.
    series = torch.full_like(u, 1.0 / 8.0)
    for degree in range(7, 0, -1):
        series.mul_(u).add_(1.0 / degree)
    series.mul_(u)
    direct = torch.log(torch.clamp(1.0 - u, min=_SMALLEST_SURVIVAL)).neg_()
    return torch.where(u < _SERIES_BELOW, series, direct).log_().neg_()
