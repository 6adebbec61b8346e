"""What the config tests share: base configs, and ways to resolve them."""

import importlib.util
from typing import Any

import pytest

from vllm_specplus.config import SpecPlusConfigError, SpecPlusOptions, resolve
from vllm_specplus.config.stock_keys import stock_keys

MTP = {"method": "mtp", "num_speculative_tokens": 4}
HYBRID = {**MTP, "mtp_strategy": "with_ngram"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
WITH_MEDUSA = pytest.mark.skipif(
    "medusa" not in stock_keys().methods, reason="vLLM 0.33 has neither Medusa nor speculators of `mlp_speculator`"
)
UNLIMITED = {"suffix_decoding_max_cached_requests": -1}


def pretend_arctic(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """Make arctic-inference look installed, or not, whatever this machine has."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        if name == "arctic_inference":
            return object() if installed else None
        return real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def options(config: dict[str, Any]) -> SpecPlusOptions:
    """The options that `config` resolves to."""
    resolved = resolve(config)
    assert resolved.options is not None
    return resolved.options


def refused(config: dict[str, Any]) -> str:
    """The message with which `config` is refused."""
    with pytest.raises(SpecPlusConfigError) as caught:
        resolve(config)
    return str(caught.value)
