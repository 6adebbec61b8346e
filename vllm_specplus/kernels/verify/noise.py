"""The noise of ``vllm_specplus.verify.noise`` inside a Triton kernel.

The hash, series and logarithms are those of vLLM's V2 runner, ``vllm/v1/worker/gpu/sample/gumbel.py``, in the same
order. So both give the same bits on one device.
"""

import triton
import triton.language as tl

_KEY_MUL_1 = tl.constexpr(0xCC9E2D51)
_KEY_MUL_2 = tl.constexpr(0x1B873593)
_HASH_ADD = tl.constexpr(0xE6546B64)
_FINAL_MUL_1 = tl.constexpr(0x85EBCA6B)
_FINAL_MUL_2 = tl.constexpr(0xC2B2AE35)
_KEY_BYTES = tl.constexpr(16)
_LOW_WORD = tl.constexpr(0xFFFFFFFF)

_BITS_OF_ONE = tl.constexpr(0x3F800000)
_SMALLEST_SURVIVAL = tl.constexpr(2.0**-24)
_SERIES_BELOW = tl.constexpr(0.25)
_SMALLEST_UNIFORM = tl.constexpr(4.6566127342e-10)


@triton.jit
def _rotate_left(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _mix_product(h, product):
    """Mix a key into a hash; `product` is the key times `_KEY_MUL_1`."""
    return _rotate_left(h ^ (_rotate_left(product, 15) * _KEY_MUL_2), 13) * 5 + _HASH_ADD


@triton.jit
def _mix(h, key):
    return _mix_product(h, (key & _LOW_WORD).to(tl.uint32) * _KEY_MUL_1)


@triton.jit
def _unfinished_hash(seed, position, products):
    """Murmur3 of (seed, position, token) before its last step: uint32 of the shape of `products`.

    Args:
        products: uint32, each token times `_KEY_MUL_1`.
    """
    h = _mix(_mix(_mix((seed & 0).to(tl.uint32), seed), seed >> 32), position)
    h = _mix_product(h, products) ^ _KEY_BYTES
    h = (h ^ (h >> 16)) * _FINAL_MUL_1
    return (h ^ (h >> 13)) * _FINAL_MUL_2


@triton.jit
def gumbel_noise(seed, position, tokens):
    """Noise of some tokens of one row.

    Args:
        seed, position: int64 scalars.
        tokens: int32, any shape.

    Returns:
        float32 of the shape of `tokens`.
    """
    h = _unfinished_hash(seed, position, tokens.to(tl.uint32) * _KEY_MUL_1)
    h = h ^ (h >> 16)
    high = (h >> 16).to(tl.int32).to(tl.float32) * 2.0**-16
    low = ((h & 0xFFFF).to(tl.int32).to(tl.float32) + 0.5) * 2.0**-32
    u = high + low

    series = 1.0 / 8.0
    for i in tl.static_range(7):
        series = 1.0 / (7 - i) + u * series
    direct = tl.log(tl.maximum(1.0 - u, _SMALLEST_SURVIVAL))
    log_survival = tl.where(u < _SERIES_BELOW, -u * series, direct)
    return -tl.log(-log_survival)


@triton.jit
def least_uniform(seed, position, starts, offsets):
    """1 + u or slightly less, of the uniform number u that the noise of each token is made of: float32.

    Args:
        starts, offsets: int32 of shapes that go together; the tokens are their sums. A thread holds many tokens but few
            starts and offsets, so it multiplies those.

    The noise of a token is at most -log(u). The hash lacks its last step here, which moves u by less than 2^-15 of
    itself. Then u is rounded down to 23 bits.
    """
    products = starts.to(tl.uint32) * _KEY_MUL_1 + offsets.to(tl.uint32) * _KEY_MUL_1
    bits = (_unfinished_hash(seed, position, products) >> 9) | _BITS_OF_ONE
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def acceptance_uniform(seed, position):
    """A number in (0, 1), with which strategy `rejection` compares a draft's probability: float32 scalar."""
    return tl.maximum(tl.rand(seed, position), _SMALLEST_UNIFORM)
