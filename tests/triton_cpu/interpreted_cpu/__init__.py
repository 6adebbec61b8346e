"""A Triton backend called ``cpu`` with nothing behind it, so that vLLM's Model Runner V2 starts without a GPU.

vLLM's CPU build uses Triton only where a backend of that name is found. With this folder on PYTHONPATH there is one,
and with TRITON_INTERPRET=1 Triton never asks it to compile. Without the interpreter vLLM would pick kernels that
nothing can run: set both or neither.
"""
