"""Drafting from a reference: text that a request's output is expected to resemble, such as a file to edit."""

from types import ModuleType

import numpy as np

from vllm_specplus.sources import WHOLE_OUTPUT

_NUM_FINGERPRINT_TOKENS = 8
_NEAR = 256  # tokens around an anchor where a match shorter than min_ngram_size counts
_NUM_ANCHORS = 4
_TRUSTED_BITS = 32.0  # an agreement of so much is no accident: about eight bytes or five words
_BACKWARD_BITS = 2.0  # text goes on forwards more often than it goes back
_MAX_PLACES = 4096  # occurrences of an n-gram that are looked at, the nearest ones
_MAX_EDIT = 64  # tokens of an edit, at most, for it to be remembered
_MAX_EDITS = 1024  # edits that are remembered, the latest ones
HASH_FACTOR = 0x9E3779B97F4A7C15
"""Of the hash of an n-gram: each token is added to what the ones before it come to, times this."""


class ReferenceText:
    """Drafts a request's output from its reference; one object per request, nothing shared.

    A cursor stands where the output is expected to go on in the reference, at first before its first token. The drafts
    are the tokens after the cursor. While the output agrees with them, the cursor moves on. When a token disagrees, the
    cursor moves to another place, by one of two modes:

    `edit=False` (sp_edit 0): the mode looks up the longest n-gram, of min_ngram_size to max_ngram_size tokens, that
    ends the output and occurs in the reference. Of its occurrences it takes the next one after the place last followed,
    else the first. If there is none, nothing is drafted.

    `edit=True` (sp_edit 1): the mode takes the place that is worth most, in bits. The tokens that match before a place
    add to its worth, and rare tokens add more. The distance of the jump is subtracted. Far places need a match of
    min_ngram_size tokens. Within `_NEAR` tokens of an anchor one token is enough, as a wrong draft costs only its slot.
    Anchors are the last few places where a longer agreement ended. An edit began at the latest anchor; at an older one
    the text may go on after a moved block. If no place is worth the jump, a single unknown token counts as a replaced
    one, and several count as an insertion.
    Edits are remembered (a renamed variable), the latest `_MAX_EDITS` of them. If an edit begins as an earlier one did,
    and the text has the same tokens to remove, it is drafted as before. The drafts then hold tokens of the request's
    own output as well.

    The drafts depend on the output alone, not on its steps or on earlier drafts. A step costs the same at any length of
    the output. Agreement costs one comparison. A token that disagrees costs one search over the occurrences of the
    output's last min_ngram_size tokens in the reference, at most over the nearest `_MAX_PLACES`.

    Args:
        token_ids: [n] int32, the reference; copied if it can be written to. n may be 0.
        edit: selects the mode.
        min_ngram_size: smallest n-gram size, >= 1.
        max_ngram_size: largest n-gram size, >= min_ngram_size.

    Raises:
        ValueError: a size out of range, or token_ids is not one-dimensional int32.
    """

    def __init__(self, token_ids: np.ndarray, *, edit: bool, min_ngram_size: int, max_ngram_size: int) -> None:
        if not 1 <= min_ngram_size <= max_ngram_size:
            raise ValueError(f"min_ngram_size={min_ngram_size} must lie between 1 and max_ngram_size={max_ngram_size}")
        if token_ids.ndim != 1 or token_ids.dtype != np.int32:
            raise ValueError(f"token_ids must be [n] int32, got {token_ids.dtype} of shape {token_ids.shape}")
        self._compiled = load_compiled()
        self.edit = edit
        self.min_ngram_size = min_ngram_size
        self.max_ngram_size = max_ngram_size
        self._text = token_ids.copy() if token_ids.flags.writeable else np.ascontiguousarray(token_ids)
        hashes = _hash_ngrams(self._text, min_ngram_size)
        self._starts = np.argsort(hashes, kind="stable")  # n-gram starts by hash; those of one hash are in text order
        self._hashes = hashes[self._starts]
        _, which, counts = np.unique(self._text, return_inverse=True, return_counts=True)
        bits = -np.log2(counts / max(1, len(token_ids)))[which]  # the information of each token
        self._bits = np.concatenate([[0.0], np.cumsum(bits)])  # [n + 1], the information up to each place
        self._reset()

    @property
    def is_guess(self) -> bool:
        """Whether no output token supports the drafts' place, as at the beginning and after new text."""
        return self._is_guess

    @property
    def agreed(self) -> int:
        """How many output tokens speak for the drafts' place; 0 for a guess behind an edit.

        `WHOLE_OUTPUT` where the text begins with the output, even if there is none yet and `is_guess` holds.
        """
        if self._cursor == self._run == self._num_tokens:
            return WHOLE_OUTPUT
        return 0 if self._is_guess else max(self._run, 1)

    def draft(self, output: np.ndarray, max_drafts: int) -> np.ndarray:
        """Take in the new tokens of the output and draft the tokens that follow.

        Args:
            output: [num_tokens] int32, all output tokens so far. It may differ from the output of earlier calls. All of
                it is taken in anew if it is shorter, or if the last eight tokens are not where they were.
            max_drafts: the most drafts, >= 0.

        Returns:
            [<= max_drafts] int32, a copy.
        """
        output = np.ascontiguousarray(output, np.int32)
        known = self._num_tokens
        fingerprint = output[max(0, known - _NUM_FINGERPRINT_TOKENS) : known]
        if known > len(output) or fingerprint.tobytes() != self._last:
            self._reset()
        self._take_in(output)
        if self._cursor < 0:
            return np.empty(0, np.int32)
        insertion = self._insertion[:max_drafts]
        return np.concatenate([insertion, self._text[self._cursor : self._cursor + max_drafts - len(insertion)]])

    def _reset(self) -> None:
        self._num_tokens = 0
        self._last = b""  # the last tokens of the output
        self._cursor = 0  # the place in the text that is followed; -1: none
        self._insertion = np.empty(0, np.int32)  # a remembered edit's new tokens, expected before those at the cursor
        self._run = 0  # tokens before the cursor that agree with the output
        self._is_guess = True
        self._previous = 0  # the place that was followed before
        # (place in the text, place in the output), the latest first. At the start the text lies after the only one.
        self._anchors = [(0, 0)]
        # Edits, as (tokens removed, tokens inserted). The key: whether nothing is removed, the first token removed (or
        # else the last token before the edit), and the first token inserted.
        self._edits: dict[tuple[bool, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def _take_in(self, output: np.ndarray) -> None:
        position = self._num_tokens
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
        if position > self._num_tokens:
            self._num_tokens = position
            self._last = output[max(0, position - _NUM_FINGERPRINT_TOKENS) : position].tobytes()

    def _agreement(self, new: np.ndarray) -> int:
        """Move the cursor on as far as the text agrees with `new` ([m] int32); return the number of tokens."""
        if self._cursor < 0:
            return 0
        agreed = 0
        if len(self._insertion):
            agreed = _common_prefix(self._insertion, new)
            if agreed < len(self._insertion):
                self._insertion = self._insertion[agreed:]
                return agreed
            self._insertion = self._insertion[:0]
        followed = _common_prefix(self._text[self._cursor : self._cursor + len(new) - agreed], new[agreed:])
        self._cursor += followed
        self._run += followed
        return agreed + followed

    def _look_up(self, output: np.ndarray) -> tuple[int, int]:
        """The place after the longest n-gram that ends the output, and its length; (-1, 0): none."""
        starts = self._far_starts(output, self._previous)
        if not len(starts):
            return -1, 0
        places = starts + self.min_ngram_size
        lengths = self._compiled.match_lengths(self._text, places, output, self.max_ngram_size)
        longest = int(lengths.max(initial=0))
        if longest < self.min_ngram_size:
            return -1, 0
        places = places[lengths == longest]
        return int(places[np.searchsorted(places, self._previous, side="right") % len(places)]), longest

    def _note_divergence(self, output: np.ndarray, position: int) -> None:
        """Make the cursor an anchor if it was followed for long; remember the edit before it."""
        information = self._bits[self._cursor] - self._bits[self._cursor - self._run]
        if self._run < position and information < _TRUSTED_BITS:
            return
        removed_from, inserted_from = self._anchors[0]
        # No further back than the edit's beginning: new text may end like the text before it.
        run = min(self._run, position - inserted_from)
        if self._cursor >= removed_from:
            run = min(run, self._cursor - removed_from)
        num_removed, inserted = self._cursor - run - removed_from, output[inserted_from : position - run]
        if 0 <= num_removed <= _MAX_EDIT and 0 < len(inserted) <= _MAX_EDIT:
            token = self._token_before(removed_from) if num_removed == 0 else int(self._text[removed_from])
            removed = self._text[removed_from : removed_from + num_removed]
            key = num_removed == 0, token, int(inserted[0])
            self._edits.pop(key, None)
            self._edits[key] = removed, inserted.copy()
            if len(self._edits) > _MAX_EDITS:
                del self._edits[next(iter(self._edits))]
        # Anchors a little before the place where this run began have been passed.
        start = self._cursor - run
        others = [anchor for anchor in self._anchors if not 0 <= start - anchor[0] <= _NEAR]
        self._anchors = [(self._cursor, position), *others][:_NUM_ANCHORS]

    def _token_before(self, place: int) -> int:
        """The token before a place in the text, -1 at the text's start."""
        return int(self._text[place - 1]) if place else -1

    def _recall(self, new: int) -> bool:
        """Expect a remembered edit at the cursor if it began with the token `new`."""
        self._insertion = self._insertion[:0]
        if not self._run or self._cursor == len(self._text):
            return False
        for key in ((False, int(self._text[self._cursor]), new), (True, self._token_before(self._cursor), new)):
            edit = self._edits.get(key)
            if edit and np.array_equal(self._text[self._cursor : self._cursor + len(edit[0])], edit[0]):
                self._insertion = edit[1][1:]
                self._cursor += len(edit[0])
                self._run = 0
                return True
        return False

    def _realign(self, output: np.ndarray) -> tuple[int, int]:
        """The place where the text goes on after `output`, whose last token disagreed, and how many tokens match."""
        anchor, anchor_in_output = self._anchors[0]
        place, length = self._compiled.best_place(
            self._text,
            self._bits,
            self._far_starts(output, anchor),
            np.array(self._anchors, np.int64),
            output,
            self.min_ngram_size,
            self.max_ngram_size,
            _NEAR,
            _BACKWARD_BITS,
        )
        if place >= 0:
            return place, length
        num_new = len(output) - anchor_in_output
        return min(anchor + (num_new == 1), len(self._text)), 0

    def _far_starts(self, output: np.ndarray, near: int) -> np.ndarray:
        """[P <= _MAX_PLACES] int64, ascending: where the output's last min_ngram_size tokens stand in the text.

        If there are more, these are the nearest to the place `near`. N-grams of equal hash are not told apart.
        """
        size = self.min_ngram_size
        if len(output) < size:
            return self._starts[:0]
        first, last = self._compiled.find_ngram(self._hashes, self._starts, output, size, near, _MAX_PLACES)
        return self._starts[first:last]


def load_compiled() -> ModuleType:
    """The compiled half. A worker loads it when it starts: to compile it takes longer than a request may wait."""
    # numba, imported before a vLLM CPU worker has started, breaks that worker.
    from vllm_specplus.proposers import _reference_text

    return _reference_text


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """The number of leading tokens that two rows share."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def _hash_ngrams(token_ids: np.ndarray, size: int) -> np.ndarray:
    """[n - size + 1] uint64 (none if n < size), the hash of each n-gram of `size` tokens, as `find_ngram` makes it."""
    count = max(0, len(token_ids) - size + 1)
    hashes = np.zeros(count, np.uint64)
    for k in range(size):
        hashes = hashes * np.uint64(HASH_FACTOR) + token_ids[k : k + count].astype(np.uint64)
    return hashes
