import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specplus.proposers import reference_text
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.sources import WHOLE_OUTPUT

BOTH = pytest.mark.parametrize("edit", [False, True], ids=["sp_edit 0", "sp_edit 1"])
TEXT = np.random.default_rng(0).permutation(1000).astype(np.int32)  # every token once
NEW = np.arange(5000, 5100, dtype=np.int32)  # tokens that TEXT does not have


def array(tokens):
    return np.array(list(tokens), np.int32)


def make(reference, edit=True, sizes=(3, 8)):
    return ReferenceText(array(reference), edit=edit, min_ngram_size=sizes[0], max_ngram_size=sizes[1])


def steps(text, output, num_drafts):
    """Steps to write `output` if the model agrees with it; each gives a token more than it accepts."""
    done = count = 0
    while done < len(output):
        drafts = text.draft(output[:done], num_drafts)
        assert len(drafts) <= num_drafts
        while len(drafts) and done < len(output) and drafts[0] == output[done]:
            drafts, done = drafts[1:], done + 1
        done += 1
        count += 1
    return count


def slow_places(reference, output, min_size, max_size):
    """Where sp_edit 0 goes on after each prefix of the output, as its definition reads; None = nowhere."""
    place, places = 0, [0]
    for end in range(1, len(output) + 1):
        found = end if output[:end] == reference[:end] else None
        for size in range(min(max_size, end), min_size - 1, -1):
            ends = [p for p in range(size, len(reference) + 1) if reference[p - size : p] == output[end - size : end]]
            if ends and found is None:
                found = next((p for p in ends if p > place), ends[0])
        place = place if found is None else found
        places.append(found)
    return places


tokens = st.integers(0, 3)
sizes = st.tuples(st.integers(1, 3), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@st.composite
def references_and_outputs(draw):
    """A text of few different tokens, and an output that is pieces of it with other tokens between."""
    reference = draw(st.lists(tokens, max_size=40))
    output = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(reference)))
        output += reference[start : start + draw(st.integers(0, 20))]
        output += draw(st.lists(st.integers(0, 5), max_size=4))
    return reference, output


@BOTH
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 6, 1000])
@pytest.mark.parametrize("num_drafts", [1, 4, 128])
def test_agreement_takes_the_fewest_steps(edit, num_tokens, num_drafts):
    assert steps(make(TEXT, edit), TEXT[:num_tokens], num_drafts) == math.ceil(num_tokens / (num_drafts + 1))


@pytest.mark.parametrize("at", [0, 1, 500, 960, 999, 1000])
@pytest.mark.parametrize("num_gone", [0, 1, 20])
@pytest.mark.parametrize("num_new", [0, 1, 20])
@pytest.mark.parametrize("num_drafts", [4, 16, 128])
def test_an_edit_costs_its_new_tokens_and_two_steps(at, num_gone, num_new, num_drafts):
    """Insertions, deletions and replacements, of equal length and not. No draft can have a token that is new."""
    output = np.concatenate([TEXT[:at], NEW[:num_new], TEXT[at + num_gone :]])
    num_full_steps = math.ceil((len(output) - num_new) / (num_drafts + 1))
    assert steps(make(TEXT), output, num_drafts) <= num_full_steps + num_new + 2


@BOTH
def test_how_many_tokens_speak_for_the_drafts(edit):
    text = make(TEXT, edit)

    def agreed(output):
        text.draft(array(output), 4)
        return text.agreed

    assert agreed([]) == agreed(TEXT[:1]) == agreed(TEXT[:60]) == agreed(TEXT) == WHOLE_OUTPUT
    assert agreed([*TEXT[:60], NEW[0]]) == (0 if edit else 1)
    assert agreed([*TEXT[:60], NEW[0], *TEXT[61:65]]) == 4
    assert agreed([*TEXT[:20], *TEXT[30:34]]) == 4
    assert agreed(TEXT[1:7]) == 6  # its middle is not its beginning
    assert agreed([*TEXT, NEW[0]]) < WHOLE_OUTPUT


def test_what_is_guessed_where_the_output_leaves_the_text():
    text = array(range(100, 200))
    start = text[:20]

    def guess(*new):
        return make(text).draft(np.concatenate([start, array(new)]), 2).tolist()

    assert guess() == [120, 121]
    assert guess(900) == [121, 122]  # one token for another
    assert guess(126) == [127, 128]  # six tokens gone
    assert guess(900, 120) == [121, 122]  # one token put in
    assert guess(900, 901) == [120, 121]  # more than one
    assert guess(900, 121) == [122, 123]
    assert guess(*range(900, 930)) == [120, 121]
    assert guess(*range(900, 930), 135) == [136, 137]  # 15 gone, 30 put in


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [0, 3, 1, 2], [1, 0, 2, 3], [3, 2, 1, 0], [0, 1, 2, 1, 3]])
@pytest.mark.parametrize("edit", [False, True], ids=["sp_edit 0", "sp_edit 1"])
def test_moved_and_repeated_blocks_are_found(order, edit):
    blocks, num_drafts, min_size = TEXT.reshape(4, 250), 16, 3
    output = np.concatenate([blocks[i] for i in order])
    ideal = math.ceil(len(output) / (num_drafts + 1))
    # A jump may need the tokens of an n-gram, and one step more where a block ends in the middle of a step.
    jumps = np.count_nonzero(np.diff([-1, *order]) != 1)
    assert steps(make(TEXT, edit, (min_size, 8)), output, num_drafts) <= ideal + jumps * (min_size + 1)


def test_after_a_moved_block_it_goes_on_where_it_had_left_off():
    output = np.concatenate([TEXT[:100], TEXT[700:800], TEXT[100:101]])
    assert make(TEXT).draft(output, 3).tolist() == TEXT[101:104].tolist()
    assert make(TEXT, edit=False).draft(output, 3).tolist() == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param([7], [900, 901, 902, 903], id="another name"),
        pytest.param([7, 8], [900], id="a shorter one"),
        pytest.param([7], [7, 900, 901], id="put in"),
        pytest.param([7], [7, 900, 7], id="put in, and it ends as the text before it"),
        pytest.param([], [900, 901], id="put in at various places"),
    ],
)
def test_an_edit_made_again_costs_one_step(old, new):
    before = [1001] if not old else []  # what is put in is known again by the token before it
    rows = [array([*range(2000 + 100 * k, 2050 + 100 * k), *before]) for k in range(5)]
    reference = array([*(token for row in rows for token in (*row, *old)), 1])
    output = array([*(token for row in rows for token in (*row, *new)), 1])
    at, first_new = len(rows[0]), new.index(900)
    text = make(reference)
    steps(text, output[: at + len(new)], 128)
    drafts = text.draft(output[: 2 * at + len(new) + first_new + 1], len(new) + 3).tolist()
    expected = [*new[first_new + 1 :], *rows[2], *old]
    assert drafts == expected[: len(new) + 3]
    assert steps(make(reference), output, 128) <= len(new) + 2 + len(rows)


def test_an_edit_of_other_tokens_is_not_made_again():
    reference = array([*range(100, 150), 7, 8, *range(150, 200), 7, 9, *range(200, 250)])
    output = array([*range(100, 150), 900, 901, *range(150, 200), 900])
    assert make(reference).draft(output, 2).tolist() == [9, 200]


@settings(max_examples=300)
@given(references_and_outputs(), sizes, st.integers(0, 5))
def test_look_up_equals_its_definition(pair, sizes, max_drafts):
    reference, output = pair
    text = make(reference, False, sizes)
    for end, place in enumerate(slow_places(reference, output, *sizes)):
        expected = [] if place is None else reference[place : place + max_drafts]
        assert text.draft(array(output[:end]), max_drafts).tolist() == expected


@BOTH
@settings(max_examples=300)
@given(pair=references_and_outputs(), sizes=sizes, data=st.data())
def test_it_goes_by_the_output_alone(edit, pair, sizes, data):
    """The steps that it came in and earlier drafts do not matter. No draft is a token that is nowhere."""
    reference, output = pair
    text, end = make(reference, edit, sizes), 0
    buffer = np.full(len(output) + 1, -7, np.int32)  # behind the output there is something else
    while True:
        buffer[:end] = output[:end]
        limit = data.draw(st.integers(0, 9))
        drafts = text.draft(buffer[:end], limit)
        assert drafts.dtype == np.int32
        assert len(drafts) <= limit
        assert set(drafts.tolist()) <= {*reference, *(output[:end] if edit else ())}
        fresh = make(reference, edit, sizes)
        assert drafts.tolist() == fresh.draft(array(output[:end]), limit).tolist()
        assert text._run == fresh._run
        assert text._run == 0 or output[end - text._run : end] == reference[text._cursor - text._run : text._cursor]
        if end == len(output):
            break
        end = data.draw(st.integers(end, len(output)))


@BOTH
def test_of_very_many_occurrences_the_nearest_count(edit, monkeypatch):
    monkeypatch.setattr(reference_text, "_MAX_PLACES", 4)
    reference = [token for k in range(100, 200) for token in (1, 2, 3, k)]
    for last in range(100, 199):
        output = array([*reference[: 4 * (last - 99)], 900, 1, 2, 3])
        assert make(reference, edit, (2, 3)).draft(output, 1).tolist() == [last + 1]
        assert len(make(reference, edit, (2, 3))._far_starts(output, 4 * (last - 100))) == 4


@BOTH
@pytest.mark.parametrize("num_reference", [0, 1, 2, 5])
@pytest.mark.parametrize("output", [[], NEW[:50], TEXT[:50], TEXT[1:50], [*TEXT[:5], *TEXT[:5], *TEXT[:5]]])
def test_a_reference_shorter_than_ngram_and_output(edit, num_reference, output):
    text, reference = make(TEXT[:num_reference], edit, (3, 8)), set(TEXT[:num_reference].tolist())
    for end in range(len(output) + 1):
        drafts = text.draft(array(output[:end]), 4)
        assert len(drafts) <= 4
        assert set(drafts.tolist()) <= reference


@BOTH
def test_an_output_that_never_agrees(edit):
    text, output = make(TEXT, edit), array(range(2000, 2300))
    for end in range(len(output) + 1):
        drafts = text.draft(output[:end], 16)
        assert len(drafts) <= 16
        assert set(drafts.tolist()) <= set(TEXT.tolist())
    assert text._run == 0


@BOTH
@pytest.mark.parametrize(
    "second",
    [
        pytest.param(TEXT[:30], id="rewound"),
        pytest.param([*TEXT[:30], *NEW[:5], *TEXT[30:40]], id="rewound, then other text"),
        pytest.param([*TEXT[300:360], *TEXT[400:460]], id="longer, all other"),
        pytest.param([*TEXT[:40], 5000, *TEXT[41:60]], id="of the same length"),
        pytest.param([], id="preempted without output"),
    ],
)
def test_what_is_no_continuation_starts_over(edit, second):
    text, first = make(TEXT, edit), np.concatenate([TEXT[:20], TEXT[60:100]])
    assert text.draft(first, 4).tolist() == TEXT[100:104].tolist()
    fresh = make(TEXT, edit)
    assert text.draft(array(second), 4).tolist() == fresh.draft(array(second), 4).tolist()
    for end in range(len(second), len(second) + 30):
        longer = array([*second, *TEXT[500:530]][:end])
        assert text.draft(longer, 4).tolist() == fresh.draft(longer, 4).tolist()


@BOTH
def test_the_buffer_of_the_output_may_be_overwritten(edit):
    """A preempted request's row may hold another text of the same length."""
    buffer = TEXT[:50].copy()
    text = make(TEXT, edit)
    text.draft(buffer, 4)
    buffer[:] = TEXT[300:350]
    fresh = make(TEXT, edit)
    assert text.draft(buffer, 4).tolist() == fresh.draft(buffer, 4).tolist() == TEXT[350:354].tolist()
    assert text._run == fresh._run


@BOTH
def test_each_token_is_taken_in_once(edit, monkeypatch):
    """So that a step's cost does not grow with the output."""
    text, output = make(TEXT, edit), np.concatenate([TEXT[:300], NEW[:20], TEXT[310:700]])
    agreement, lengths = ReferenceText._agreement, []
    monkeypatch.setattr(ReferenceText, "_agreement", lambda self, new: lengths.append(len(new)) or agreement(self, new))
    for end in range(len(output) + 1):
        text.draft(output[:end], 4)
    assert sum(lengths) == len(output)


@BOTH
def test_nothing_is_shared(edit):
    """Not between requests, nor with the arrays that went in or came out."""
    first, second = TEXT[:200].copy(), np.concatenate([TEXT[:100], TEXT[300:400]])
    one, other = make(first, edit), make(second, edit)
    array_in = first.copy()
    copied = ReferenceText(array_in, edit=edit, min_ngram_size=3, max_ngram_size=8)
    array_in[:] = -5
    for end in range(0, 200, 7):
        output = np.concatenate([TEXT[:90], NEW[:10], TEXT[100:200]])[:end]
        drafts = one.draft(output, 8)
        fresh = make(second, edit).draft(second[:end], 8).tolist()
        assert other.draft(second[:end], 8).tolist() == fresh
        assert copied.draft(output, 8).tolist() == drafts.tolist()
        assert not {*drafts.tolist()} & {*TEXT[300:400].tolist()}
        drafts[:] = -5
    assert one.draft(np.concatenate([TEXT[:90], NEW[:10], TEXT[100:197]]), 8).tolist() == TEXT[197:200].tolist()


@pytest.mark.parametrize(
    ("reference", "sizes", "message"),
    [
        (TEXT, (0, 3), "min_ngram_size=0"),
        (TEXT, (4, 3), "max_ngram_size=3"),
        (TEXT.astype(np.int64), (1, 3), r"\[n\] int32"),
        (TEXT.reshape(10, 100), (1, 3), r"\[n\] int32"),
    ],
)
def test_wrong_arguments(reference, sizes, message):
    with pytest.raises(ValueError, match=message):
        ReferenceText(reference, edit=True, min_ngram_size=sizes[0], max_ngram_size=sizes[1])
