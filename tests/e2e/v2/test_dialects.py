"""Configs of other systems on Model Runner V2: what is drafted is what that system's rule says."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.dialects import LONG, NGRAM_RULES, check_forced_acceptance, check_ngram_rule
from tests.e2e.engines import PROMPTS, engine


@pytest.fixture(scope="module")
def answers(trained: Path) -> list[list[int]]:
    with engine(trained) as e:
        return e.tokens(PROMPTS, max_tokens=LONG + 10)


@pytest.mark.parametrize(("config", "rule"), [(row[0], row[1:]) for row in NGRAM_RULES[2:4]], ids=json.dumps)
def test_ngram_rules(config: dict[str, Any], rule: Any, trained: Path, answers: list[list[int]]) -> None:
    """With synchronous scheduling no padding is scheduled, so vLLM's counters are those of the drafts."""
    with engine(trained, config, async_scheduling=False) as e:
        check_ngram_rule(e, answers, rule, to_the_end=False)


def test_all_drafts_of_one_request_are_accepted(trained: Path) -> None:
    check_forced_acceptance(trained, {"method": "mtp", "num_speculative_tokens": 2}, async_scheduling=False)
