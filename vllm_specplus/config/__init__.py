"""Speculative configs: parsed, checked, and resolved. Nothing here imports vLLM or torch."""

from vllm_specplus.config.errors import SpecPlusConfigError
from vllm_specplus.config.options import HISTORY_METHODS, SpecPlusOptions
from vllm_specplus.config.resolve import Resolved, parse_json, resolve

__all__ = ["HISTORY_METHODS", "Resolved", "SpecPlusConfigError", "SpecPlusOptions", "parse_json", "resolve"]
