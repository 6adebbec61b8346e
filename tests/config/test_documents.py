"""What README.md and docs/choosing.md say of the keys is what the code has."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.config.helpers import pretend_arctic
from vllm_specplus.compat import TESTED_VERSIONS
from vllm_specplus.config import resolve
from vllm_specplus.config.dialects import DIALECTS
from vllm_specplus.config.keys import DEFAULT_NGRAM_SIZES, TOPP_DEFAULTS, CommonKeys, UserKeys
from vllm_specplus.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROPERTIES: dict[str, dict[str, Any]] = UserKeys.model_json_schema()["properties"]


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    section = README.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


KEYS = {name: row[1] for row in rows("Keys") for name in re.findall("`([^`]+)`", row[0])}


def choices_of(key: str) -> list[str]:
    """The strings that a key allows; none where it is no choice."""
    branches = [PROPERTIES[key], *PROPERTIES[key].get("anyOf", ())]
    return [value for branch in branches for value in branch.get("enum", ())]


def test_every_key_has_its_row() -> None:
    suffix = {key for key in CommonKeys.model_fields if key.startswith("suffix_decoding_")}
    # vLLM's own, whose values are vLLM's.
    expected = CommonKeys.model_fields.keys() - suffix - {"num_speculative_tokens"} | {"suffix_decoding_*", "dialect"}
    assert KEYS.keys() == expected


@pytest.mark.parametrize("key", [key for key in KEYS if key in PROPERTIES and choices_of(key)])
def test_every_choice_is_named(key: str) -> None:
    if key == "verify_strategy":
        assert {row[0].strip("`") for row in rows("Which strategies keep the target's distribution")} == {
            "unset",
            *STRATEGIES,
        }
    else:
        assert re.findall('"([^"]+)"', KEYS[key]) == choices_of(key)
        # The default comes first.
        assert choices_of(key)[0] == PROPERTIES[key]["default"]


def test_dialects() -> None:
    assert re.findall('"([^"]+)"', KEYS["dialect"]) == list(DIALECTS)


def test_defaults() -> None:
    high, low = DEFAULT_NGRAM_SIZES
    assert KEYS["max_ngram_size"] == KEYS["min_ngram_size"]
    assert KEYS["max_ngram_size"].startswith(f"int, {high} and {low};")
    for key, value in TOPP_DEFAULTS.items():
        assert KEYS[key].startswith(f"int, {value};")
    assert KEYS["match_override_len"].startswith(f"int, {PROPERTIES['match_override_len']['default']} ")
    assert KEYS["allow_force_accept"] == f"bool, {json.dumps(PROPERTIES['allow_force_accept']['default'])}"


def test_the_versions_of_vllm_are_those_that_were_tested() -> None:
    assert f"beside vLLM {' or '.join(TESTED_VERSIONS)}\n" in README


def test_the_configs_to_choose_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A and B are adaptive; C keeps the answers of clients with different salts apart."""
    pretend_arctic(monkeypatch, True)
    text = (ROOT / "docs" / "choosing.md").read_text()
    found = [resolve(json.loads(block)).options for block in re.findall(r"```json\n(.*?)```", text, flags=re.S)]
    hybrid, ngram, suffix = found
    assert hybrid is not None
    assert hybrid.is_hybrid
    assert hybrid.adaptive
    assert ngram is not None
    assert (ngram.method, ngram.adaptive) == ("ngram", True)
    assert suffix is not None
    assert (suffix.method, suffix.needs_salts) == ("suffix", True)
