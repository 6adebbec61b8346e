"""Takes the place of vLLM's compiled module `_C_stable_libtorch` where only vLLM's Python files are.

vLLM asks `torch.ops._C` for operations. Some are needed to run, and torch can do their work. Others are only named when
vLLM's modules are imported: those fail when they are called.
"""

import torch

# Named by vLLM's modules that rewrite compiled graphs, none of which run here.
ONLY_NAMED = (
    "cutlass_scaled_mm",
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "fused_add_rms_norm",
    "fused_add_rms_norm_static_fp8_quant",
    "fused_qk_norm_rope",
    "rms_norm",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "rms_norm_static_fp8_quant",
    "rotary_embedding",
    "silu_and_mul_per_block_quant",
    "silu_and_mul_quant",
    "static_scaled_fp8_quant",
)
# Asked whether compiled operations can do something.
QUESTIONS = (
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
)


class _Missing:
    """An operation, or one of its overloads, that cannot be called."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def default(self) -> "_Missing":
        return self

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"vLLM's compiled operation {self._name} is not here")


class _SiluAndMul:
    """silu(x[..., :d]) * x[..., d:], written to the first argument."""

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> None:
        gate, up = x.chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), up, out=out)

    @property
    def default(self) -> "_SiluAndMul":
        return self


class _Memory:
    """Pinned memory of the host as the GPU sees it, at the same address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        shape, dtype = tuple(tensor.shape), tensor.numpy().dtype
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
        self.tensor = tensor  # lives as long as the view


def view_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a pinned and contiguous tensor, for kernels to read and write in place."""
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    return torch.as_tensor(_Memory(tensor), device="cuda")


def add_operations() -> None:
    """Put them where vLLM looks."""
    namespace = torch.ops._C
    namespace.get_cuda_view_from_cpu_tensor = view_on_gpu
    # vLLM lets go of a graph's outputs to save memory; here they live as long as the graph.
    namespace.weak_ref_tensor = lambda tensor: tensor
    namespace.silu_and_mul = _SiluAndMul()
    for name in QUESTIONS:
        setattr(namespace, name, lambda *args: False)
    for name in ONLY_NAMED:
        setattr(namespace, name, _Missing(name))


add_operations()
