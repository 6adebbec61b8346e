"""Verification of draft tokens in fused Triton kernels."""
