"""Whose answers the suffix trees of a request may hold."""

from types import SimpleNamespace
from typing import Any

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.requests.options import SCOPE_ENTRY
from vllm_specplus.runners.suffix_scopes import SuffixScopes


def scopes(kind: str) -> SuffixScopes:
    return SuffixScopes(SpecPlusOptions(method="suffix", num_speculative_tokens=4, suffix_decoding_scope=kind))  # type: ignore[arg-type]


def new(req_id: str, scope: Any = None, **extra: Any) -> Any:
    """vLLM's message about a request that begins."""
    args = extra if scope is None else extra | {SCOPE_ENTRY: scope}
    return SimpleNamespace(req_id=req_id, sampling_params=SimpleNamespace(extra_args=args or None))


def test_each_request_has_the_scope_that_the_scheduler_tells() -> None:
    found = scopes("salt")
    found.begin([new("a", "x"), new("b", ""), new("c", my_key=1), new("d", 7)])
    found.begin([SimpleNamespace(req_id="pooled", sampling_params=None)])
    assert found.of(["b", "a", "c", "d", "unknown", "pooled"]) == ["", "x", None, None, None, None]


def test_without_salts_nothing_is_followed() -> None:
    for kind, expected in (("shared", None), ("request", [None])):
        found = scopes(kind)
        found.begin([new("a", "x")])
        assert found.of(["a"]) == expected
        assert len(found) == 0


def test_a_request_is_known_until_the_step_after_its_last() -> None:
    found = scopes("salt")
    found.begin([new("a", "x"), new("b", "y")])
    found.end(["a", "unknown"])
    assert found.of(["a", "b"]) == ["x", "y"]
    found.end([])
    assert found.of(["a", "b"]) == [None, "y"]
    # It ends and begins again in one step.
    found.end(["b"])
    found.begin([new("b", "z")])
    found.end(["b"])
    found.begin([new("b", "z")])
    found.end([])
    assert found.of(["b"]) == ["z"]
    found.end(["b"])
    found.end([])
    assert len(found) == 0
