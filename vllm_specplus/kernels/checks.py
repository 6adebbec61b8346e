"""Checks of the tensors that kernels get. Each raises ValueError."""

import torch


def check_rows(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse all but a matrix of `dtype` whose rows are contiguous; they may be strided."""
    if tensor.dtype != dtype or tensor.ndim != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(f"{name} must be {dtype}, 2-D, with contiguous rows, got {describe(tensor)}")


def check_vector(name: str, tensor: torch.Tensor, size: int, *dtypes: torch.dtype) -> None:
    """Refuse all but a contiguous vector of `size` elements of one of `dtypes`."""
    if tensor.dtype not in dtypes or tensor.shape != (size,) or not tensor.is_contiguous():
        choices = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} must be {choices}, contiguous, of shape ({size},), got {describe(tensor)}")


def describe(tensor: torch.Tensor) -> str:
    """A tensor's dtype, shape and strides, for an error."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} with strides {tensor.stride()}"
