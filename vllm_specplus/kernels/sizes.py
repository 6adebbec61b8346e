"""Sizes of launches, by the host."""


def cdiv(size: int, block: int) -> int:
    """How many blocks hold `size`. Triton's function of this name is meant for kernels: here it takes 5 µs a call."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The smallest power of 2 that is at least `size`, which is at least 1. Triton's takes 4 µs a call."""
    return 1 << (size - 1).bit_length()
