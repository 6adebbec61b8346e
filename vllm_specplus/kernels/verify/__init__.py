"""Verification of draft tokens in fused Triton kernels, on the algorithm of ``verify/reference.py``."""

from vllm_specplus.kernels.verify.launch import Workspace, verify

__all__ = ["Workspace", "verify"]
