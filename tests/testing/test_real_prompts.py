"""What the real model is asked: the same for the same seed, and nothing of `compare`'s workloads."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from vllm_specplus.compare.workloads import WORKLOADS, workload
from vllm_specplus.testing.eagle_train import HeadSettings
from vllm_specplus.testing.real_prompts import _FRESH_TOPICS, fresh_questions, openings, passages, questions


@pytest.mark.parametrize("kind", [questions, fresh_questions, openings, passages])
def test_a_seed_decides(kind: Callable[[int], Iterator[str]]) -> None:
    first, again, other = (list(itertools.islice(kind(seed), 300)) for seed in (0, 0, 1))
    assert first == again != other
    assert len(set(first)) == 300


def test_none_comes_twice_in_a_training() -> None:
    answers = HeadSettings().answers
    for kind in (questions, fresh_questions, openings):
        texts = list(itertools.islice(kind(0), answers))
        assert len(set(texts)) == answers


def test_fresh_questions_have_topics_of_their_own() -> None:
    asked = "\n".join(itertools.islice(questions(0), 5000))
    assert not [topic for topic in _FRESH_TOPICS if f" {topic}" in asked]


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_workloads_stay_fresh(name: str) -> None:
    texts = "\n".join((*itertools.islice(questions(0), 1024), *itertools.islice(openings(0), 1024), *passages(0)))
    for prompt in workload(name):
        asked = str(prompt.messages[0]["content"]) if prompt.text is None else prompt.text
        assert asked not in texts
        # Nor a passage of it.
        middle = asked[len(asked) // 2 :][:200]
        assert middle not in texts
