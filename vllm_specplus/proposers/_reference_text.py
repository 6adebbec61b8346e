"""Where a text goes on in its reference: the compiled half of `proposers.reference_text`.

Importing this module imports numba, which must not happen before a vLLM worker has started. `load_compiled` imports it.
"""

import math

import numba as nb
import numpy as np

from vllm_specplus._numba import compiled
from vllm_specplus.proposers.reference_text import HASH_FACTOR

# A reference may lie in memory that cannot be written to. One type for both kinds of memory is compiled once.
_INT32, _INT64, _UINT64, _FLOAT64 = (
    nb.types.Array(kind, 1, "C", readonly=True) for kind in (nb.int32, nb.int64, nb.uint64, nb.float64)
)
_ANCHORS = nb.types.Array(nb.int64, 2, "C", readonly=True)
_PAIR = nb.types.UniTuple(nb.int64, 2)


@compiled(_PAIR(_UINT64, _INT64, _INT32, nb.int64, nb.int64, nb.int64), allocates=False)
def find_ngram(
    hashes: np.ndarray, starts: np.ndarray, output: np.ndarray, size: int, near: int, most: int
) -> tuple[int, int]:
    """Which n-grams of a text have the hash of the one that ends the output: the first, and the one behind the last.

    Where there is none, both are equal.

    Args:
        hashes: [m] uint64, of all n-grams of the text, sorted.
        starts: [m] int64, where each begins; those of one hash are in the text's order.
        output: [>= size] int32.
        size: tokens of an n-gram.
        near: a place in the text; of more than `most` n-grams those nearest to it count.
        most: at most so many.
    """
    wanted = np.uint64(0)
    for n in range(len(output) - size, len(output)):
        wanted = wanted * np.uint64(HASH_FACTOR) + np.uint64(output[n])
    first = last = int(np.searchsorted(hashes, wanted))
    if first < len(hashes) and hashes[first] == wanted:
        last = int(np.searchsorted(hashes, wanted, side="right"))
    if last - first > most:
        middle = first + int(np.searchsorted(starts[first:last], near))
        first = min(max(first, middle - most // 2), last - most)
        last = first + most
    return first, last


@compiled(allocates=False, forceinline=True)
def _match_length(text: np.ndarray, place: int, output: np.ndarray, max_ngram_size: int) -> int:
    """How many tokens before a place equal the output's last ones, up to `max_ngram_size`."""
    longest, length = min(max_ngram_size, place, len(output)), 0
    while length < longest and text[place - 1 - length] == output[len(output) - 1 - length]:
        length += 1
    return length


@compiled(nb.int64[::1](_INT32, _INT64, _INT32, nb.int64))
def match_lengths(text: np.ndarray, places: np.ndarray, output: np.ndarray, max_ngram_size: int) -> np.ndarray:
    """[P] int64: how many tokens before each place equal the output's last ones, up to `max_ngram_size`."""
    lengths = np.empty(len(places), np.int64)
    for i in range(len(places)):
        lengths[i] = _match_length(text, places[i], output, max_ngram_size)
    return lengths


@compiled(allocates=False, forceinline=True)
def _worth(
    bits: np.ndarray, place: int, length: int, anchors: np.ndarray, num_output: int, backward_bits: float
) -> float:
    """The bits that the tokens before a place are worth, less those of the jump from the nearest anchor."""
    least = math.inf
    for i in range(len(anchors)):
        skipped = place - min(length, num_output - anchors[i, 1]) - anchors[i, 0]
        jump = math.log2(1.0 + abs(skipped)) + (backward_bits if skipped < 0 else 0.0)
        least = min(least, jump)
    return bits[place] - bits[place - length] - least


@compiled(_PAIR(_INT32, _FLOAT64, _INT64, _ANCHORS, _INT32, nb.int64, nb.int64, nb.int64, nb.float64), allocates=False)
def best_place(
    text: np.ndarray,
    bits: np.ndarray,
    starts: np.ndarray,
    anchors: np.ndarray,
    output: np.ndarray,
    size: int,
    max_ngram_size: int,
    near: int,
    backward_bits: float,
) -> tuple[int, int]:
    """The place that is worth most, the first of equals, and how many tokens before it match; (-1, 0): none.

    Args:
        text: [n] int32, the reference.
        bits: [n + 1] float64, the information of the tokens before each place.
        starts: [P] int64, of the n-grams of `find_ngram`, which are looked at first.
        anchors: [A, 2] int64, places in the text, and in the output. Around each, one token is enough.
        output: [>= 1] int32, all tokens.
        size: tokens of an n-gram.
        max_ngram_size: tokens that are compared.
        near: how many tokens before and behind an anchor count as near.
        backward_bits: what a jump back costs beside its distance.
    """
    best, found, matching = 0.0, -1, 0
    for i in range(len(starts)):
        place = starts[i] + size
        length = _match_length(text, place, output, max_ngram_size)
        worth = _worth(bits, place, length, anchors, len(output), backward_bits)
        if worth > best:
            best, found, matching = worth, place, length
    newest = output[len(output) - 1]
    for a in range(len(anchors)):
        anchor = anchors[a, 0]
        for place in range(max(0, anchor - near) + 1, min(len(text), anchor + near) + 1):
            if text[place - 1] == newest:
                length = _match_length(text, place, output, max_ngram_size)
                worth = _worth(bits, place, length, anchors, len(output), backward_bits)
                if worth > best:
                    best, found, matching = worth, place, length
    return found, matching
