"""Drafting from text that a request's output is expected to resemble: a predicted output, a file to edit."""

import numpy as np

_NUM_FINGERPRINT_TOKENS = 8
_NEAR = 256  # tokens around an anchor where a match shorter than min_ngram_size counts
_NUM_ANCHORS = 4
_TRUSTED_BITS = 32.0  # agreement from which a place was no accident: about eight bytes or five words
_BACKWARD_BITS = 2.0  # text goes on forwards more often than it goes back
_MAX_PLACES = 4096  # of one window's occurrences, the nearest ones
_MAX_EDIT = 64  # tokens of an edit that is remembered
_FACTOR = 0x9E3779B97F4A7C15


class ReferenceText:
    """Drafts a request's output from its reference; one object per request, nothing shared.

    A cursor stands where the output is expected to go on in the reference. While the output agrees,
    it moves on, and the drafts are what follows it; it starts at the reference's first token. When a
    token disagrees, the two modes look for another place, p:

    `edit=False` (sp_edit 0): the longest window, of min_ngram_size to max_ngram_size tokens, that
    ends the output and occurs in the reference; of its occurrences the next one after the place last
    followed, else the first. Nothing found: no drafts.

    `edit=True` (sp_edit 1): a place is worth the bits of the tokens that match before it (the rarer a
    token in the reference, the more), less the bits that it takes to say how far the jump is. Far
    places need a match of min_ngram_size tokens; within `_NEAR` tokens of an anchor one token will
    do, as a wrong draft costs nothing but its slot. Anchors are the last few places where a longer
    agreement ended: the latest is where an edit began, the older ones are where a moved block has
    left off. Where no place is worth the jump, a single unknown token is taken for a replaced one,
    more of them for an insertion. Edits are remembered: where one begins as an earlier one did and the
    text has the same tokens to take out (a renamed variable), it is drafted as it went the last time;
    then the drafts hold tokens of the request's own output as well.

    All of it goes by the output alone, whatever the steps it came in and whatever was drafted. A step
    costs the same at any length of the output: agreement one comparison; each disagreeing token one
    search, over the reference's occurrences of its last min_ngram_size tokens, at most `_MAX_PLACES`
    (the nearest ones).

    Args:
        token_ids: [n] int32, the reference; copied. n may be 0.
        edit: which mode.
        min_ngram_size: shortest window, >= 1.
        max_ngram_size: longest window, >= min_ngram_size.

    Raises:
        ValueError: a size out of range, or token_ids is not one-dimensional int32.
    """

    def __init__(self, token_ids: np.ndarray, *, edit: bool, min_ngram_size: int, max_ngram_size: int) -> None:
        if not 1 <= min_ngram_size <= max_ngram_size:
            raise ValueError(f"min_ngram_size={min_ngram_size} must lie between 1 and max_ngram_size={max_ngram_size}")
        if token_ids.ndim != 1 or token_ids.dtype != np.int32:
            raise ValueError(f"token_ids must be [n] int32, got {token_ids.dtype} of shape {token_ids.shape}")
        self.edit = edit
        self.min_ngram_size = min_ngram_size
        self.max_ngram_size = max_ngram_size
        self._text = token_ids.copy()
        hashes = _hash_windows(self._text, min_ngram_size)
        self._starts = np.argsort(hashes, kind="stable")  # window starts by hash, each hash's in text order
        self._hashes = hashes[self._starts]
        _, which, counts = np.unique(self._text, return_inverse=True, return_counts=True)
        bits = -np.log2(counts / max(1, len(token_ids)))[which]  # what each token tells
        self._bits = np.concatenate([[0.0], np.cumsum(bits)])  # [n + 1], what the text tells up to each place
        self._restart()

    @property
    def is_guess(self) -> bool:
        """Whether nothing in the output speaks for the drafts' place: it has just begun, or new text came in."""
        return self._is_guess

    def draft(self, output: np.ndarray, max_drafts: int) -> np.ndarray:
        """Take in what is new in the output and draft what follows.

        Args:
            output: [num_tokens] int32, all output tokens so far. It need not be what was seen before
                with more behind it: if it is shorter, or if the last eight tokens seen are not where
                they were, all of it is taken in anew.
            max_drafts: at most so many drafts, >= 0.

        Returns:
            [<= max_drafts] int32, a copy.
        """
        seen = self._num_seen
        if seen > len(output) or not np.array_equal(output[max(0, seen - _NUM_FINGERPRINT_TOKENS) : seen], self._last):
            self._restart()
        self._take_in(output)
        if self._cursor < 0:
            return np.empty(0, np.int32)
        known = self._known[:max_drafts]
        return np.concatenate([known, self._text[self._cursor : self._cursor + max_drafts - len(known)]])

    def _restart(self) -> None:
        self._num_seen = 0
        self._last = np.empty(0, np.int32)  # the last tokens seen
        self._cursor = 0  # the place in the text that is followed; -1 = none
        self._known = np.empty(0, np.int32)  # new text of a remembered edit, expected before the cursor's
        self._run = 0  # tokens before the cursor that agree with the output
        self._is_guess = True
        self._previous = 0  # the place that was followed last
        # (place in the text, place in the output), the latest first. All text is behind the first.
        self._anchors = [(0, 0)]
        # (Is nothing gone, first token gone or else the last one kept, first token new) -> (gone, new).
        self._edits: dict[tuple[bool, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def _take_in(self, output: np.ndarray) -> None:
        position = self._num_seen
        while position < len(output):
            agreed = self._agreement(output[position:])
            position += agreed
            if agreed:
                self._is_guess = False
            if position == len(output):
                break
            if self._cursor >= 0:
                self._previous = self._cursor
            if self.edit:
                self._note_divergence(output, position)
                is_known = self._recall(int(output[position]))
                if not is_known:
                    self._cursor, self._run = self._realign(output[: position + 1])
                self._is_guess = not is_known and self._run == 0
            else:
                self._cursor, self._run = self._look_up(output[: position + 1])
                self._is_guess = False
            position += 1
        if position > self._num_seen:
            self._num_seen = position
            self._last = output[max(0, position - _NUM_FINGERPRINT_TOKENS) : position].copy()

    def _agreement(self, new: np.ndarray) -> int:
        """Follow the cursor as far as it agrees with `new` ([m] int32); return how many tokens that is."""
        if self._cursor < 0:
            return 0
        agreed = _common_prefix(self._known, new)
        if agreed < len(self._known):
            self._known = self._known[agreed:]
            return agreed
        if agreed:
            self._known = self._known[:0]
        followed = _common_prefix(self._text[self._cursor : self._cursor + len(new) - agreed], new[agreed:])
        self._cursor += followed
        self._run += followed
        return agreed + followed

    def _look_up(self, output: np.ndarray) -> tuple[int, int]:
        """The place after the longest window that ends the output, and its length; (-1, 0) = none."""
        places = self._far_places(output, self._previous)
        lengths = self._match_lengths(places, output)
        longest = int(lengths.max(initial=0))
        if longest < self.min_ngram_size:
            return -1, 0
        places = places[lengths == longest]
        return int(places[np.searchsorted(places, self._previous, side="right") % len(places)]), longest

    def _note_divergence(self, output: np.ndarray, position: int) -> None:
        """Make the cursor an anchor if it was followed for long; remember the edit that it came from."""
        told = self._bits[self._cursor] - self._bits[self._cursor - self._run]
        if self._run < position and told < _TRUSTED_BITS:
            return
        gone_from, new_from = self._anchors[0]
        # No further back than the edit's beginning, where new text ends as the text before it does.
        run = min(self._run, position - new_from)
        if self._cursor >= gone_from:
            run = min(run, self._cursor - gone_from)
        gone, new = self._cursor - run - gone_from, output[new_from : position - run]
        if 0 <= gone <= _MAX_EDIT and 0 < len(new) <= _MAX_EDIT:
            token = self._last_kept(gone_from) if gone == 0 else int(self._text[gone_from])
            self._edits[gone == 0, token, int(new[0])] = self._text[gone_from : gone_from + gone], new.copy()
        # What lies a little before the place where this run began has been passed.
        start = self._cursor - run
        kept = [anchor for anchor in self._anchors if not 0 <= start - anchor[0] <= _NEAR]
        self._anchors = [(self._cursor, position), *kept][:_NUM_ANCHORS]

    def _last_kept(self, place: int) -> int:
        """The token before a place in the text, -1 at the text's start."""
        return int(self._text[place - 1]) if place else -1

    def _recall(self, new: int) -> bool:
        """Expect a remembered edit at the cursor if it began with the token `new`."""
        self._known = self._known[:0]
        if not self._run or self._cursor == len(self._text):
            return False
        for key in ((False, int(self._text[self._cursor]), new), (True, self._last_kept(self._cursor), new)):
            edit = self._edits.get(key)
            if edit and np.array_equal(self._text[self._cursor : self._cursor + len(edit[0])], edit[0]):
                self._known = edit[1][1:]
                self._cursor += len(edit[0])
                self._run = 0
                return True
        return False

    def _realign(self, output: np.ndarray) -> tuple[int, int]:
        """Where the text goes on after `output`, whose last token disagreed, and how many tokens match there."""
        anchor, diverged = self._anchors[0]
        num_new = len(output) - diverged
        places = np.concatenate(
            [self._far_places(output, anchor), *(self._near_places(a, output[-1]) for a, _ in self._anchors)]
        )
        lengths = self._match_lengths(places, output)
        if lengths.any():
            worth = self._bits[places] - self._bits[places - lengths]
            worth -= np.min([self._jump_bits(places, lengths, a, len(output) - o) for a, o in self._anchors], axis=0)
            best = int(worth.argmax())
            if worth[best] > 0:
                return int(places[best]), int(lengths[best])
        return min(anchor + (num_new == 1), len(self._text)), 0

    def _jump_bits(self, places: np.ndarray, lengths: np.ndarray, anchor: int, num_new: int) -> np.ndarray:
        """What it costs to go on at each place ([P]) when the output left the text at `anchor`."""
        skipped = places - np.minimum(lengths, num_new) - anchor
        return np.log2(1 + np.abs(skipped)) + _BACKWARD_BITS * (skipped < 0)

    def _far_places(self, output: np.ndarray, near: int) -> np.ndarray:
        """[P <= _MAX_PLACES] int64, ascending: where the text goes on after the output's last min_ngram_size tokens.

        If there are more, the nearest to the place `near`. Windows of equal hash are not told apart;
        `_match_lengths` does that.
        """
        size = self.min_ngram_size
        if len(output) < size:
            return np.empty(0, np.int64)
        wanted = _hash_windows(output[-size:], size)[0]
        first, last = np.searchsorted(self._hashes, wanted), np.searchsorted(self._hashes, wanted, side="right")
        if last - first > _MAX_PLACES:
            middle = first + np.searchsorted(self._starts[first:last], near)
            first = min(max(first, middle - _MAX_PLACES // 2), last - _MAX_PLACES)
            last = first + _MAX_PLACES
        return self._starts[first:last] + size

    def _near_places(self, anchor: int, token: int) -> np.ndarray:
        """[P] int64: where the text goes on after `token`, not far from the anchor."""
        start = max(0, anchor - _NEAR)
        return np.flatnonzero(self._text[start : anchor + _NEAR] == token) + (start + 1)

    def _match_lengths(self, places: np.ndarray, output: np.ndarray) -> np.ndarray:
        """[P] int64: how many tokens before each place end the output, up to max_ngram_size."""
        lengths = np.zeros(len(places), np.int64)
        alive = np.arange(len(places))
        for size in range(1, min(self.max_ngram_size, len(output)) + 1):
            alive = alive[places[alive] >= size]
            alive = alive[self._text[places[alive] - size] == output[-size]]
            if not len(alive):
                break
            lengths[alive] = size
        return lengths


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading tokens two rows share."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def _hash_windows(token_ids: np.ndarray, size: int) -> np.ndarray:
    """[n - size + 1] uint64 (none if n < size), a hash of each window of `size` tokens."""
    count = max(0, len(token_ids) - size + 1)
    hashes = np.zeros(count, np.uint64)
    for k in range(size):
        hashes = hashes * np.uint64(_FACTOR) + token_ids[k : k + count].astype(np.uint64)
    return hashes
