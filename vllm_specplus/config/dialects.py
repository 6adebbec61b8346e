"""The defaults of the systems whose configs are understood.

A config with one system's names has that system's defaults for all that it leaves out. The key ``dialect`` asks for the
defaults of a system whose names are vLLM's too, and for its way of verification.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

FASTDEPLOY, PADDLENLP, RTP_LLM = "FastDeploy", "PaddleNLP", "RTP-LLM"
DIALECT_KEY = "dialect"
LOWERED_KEYS = ("method", "mtp_strategy", "draft_strategy", "verify_strategy", "accept_policy")
"""Under a `dialect` the values of these keys are read in any case, as FastDeploy reads them."""

_Values = Mapping[str, Any]
"""A config under canonical keys."""


@dataclass(frozen=True)
class Default:
    """One default of a system's.

    when: whether the config has a use for it. by_name: whether the system's names ask for it, or only `dialect` does.
    """

    key: str
    value: Any
    when: Callable[[_Values], bool]
    by_name: bool = True


@dataclass(frozen=True)
class Dialect:
    """A system's name, and its defaults in the order in which they are taken."""

    system: str
    defaults: tuple[Default, ...]


def _drafts(values: _Values) -> bool:
    return values.get("method") is not None


def _is_ngram(values: _Values) -> bool:
    return values.get("method") == "ngram"


def _matches_ngrams(values: _Values) -> bool:
    return _is_ngram(values) or values.get("mtp_strategy") == "with_ngram"


def _matches_suffixes(values: _Values) -> bool:
    return values.get("method") == "suffix" or values.get("mtp_strategy") == "with_suffix"


def _is_hybrid(values: _Values) -> bool:
    return values.get("mtp_strategy") in ("with_ngram", "with_suffix")


def _looks_up(values: _Values) -> bool:
    return values.get("method") in ("ngram", "naive")


def _is_naive(values: _Values) -> bool:
    return values.get("method") == "naive"


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "fastdeploy": Dialect(
            FASTDEPLOY,
            (
                Default("num_speculative_tokens", 1, _drafts),
                Default("verify_strategy", "topp", _drafts, by_name=False),
                Default("max_ngram_size", 5, _matches_ngrams),
                Default("min_ngram_size", 2, _matches_ngrams),
                Default("ngram_match_order", "first", _matches_ngrams),
                Default("suffix_decoding_max_tree_depth", 64, _matches_suffixes, by_name=False),
                Default("suffix_decoding_max_cached_requests", -1, _matches_suffixes, by_name=False),
                Default("adaptive", False, _is_hybrid, by_name=False),
            ),
        ),
        "paddlenlp": Dialect(
            PADDLENLP,
            (
                Default("num_speculative_tokens", 1, _drafts),
                Default("verify_strategy", "topp", _drafts, by_name=False),
                Default("max_ngram_size", 1, _is_ngram),
                # PaddleNLP tries every n-gram size down to one token.
                Default("min_ngram_size", 1, _is_ngram),
                Default("ngram_match_order", "first", _is_ngram),
            ),
        ),
        "rtp_llm": Dialect(
            RTP_LLM,
            (
                Default("num_speculative_tokens", 5, _drafts),
                Default("max_ngram_size", 2, _looks_up),
                Default("min_ngram_size", 2, _looks_up),
                Default("ngram_match_order", "first", _is_ngram),
                Default("adaptive", False, _is_naive),
            ),
        ),
    }
)
"""By the value of the key ``dialect``. Sources: the systems' documents and sources, see docs/migration.md."""


def dialect_of(system: str) -> str:
    """The value of ``dialect`` for a system's name."""
    return next(name for name, dialect in DIALECTS.items() if dialect.system == system)
