"""The names of vLLM that the plugin touches, and the check that the installed vLLM has them."""

from vllm_specplus.compat.check import (
    SpecPlusCompatError,
    check_vllm,
    function_source,
    missing_seams,
    override,
    problem_of,
    vllm_root,
)
from vllm_specplus.compat.ledger import LEDGER, TESTED_VERSIONS, Seam

__all__ = [
    "LEDGER",
    "TESTED_VERSIONS",
    "Seam",
    "SpecPlusCompatError",
    "check_vllm",
    "function_source",
    "missing_seams",
    "override",
    "problem_of",
    "vllm_root",
]
