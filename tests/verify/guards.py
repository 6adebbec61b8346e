"""Guards around tensors, and poison in memory that nothing has written yet: what goes wrong there shows."""

import math
from dataclasses import fields, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_specplus.verify.types import VerifyInputs

GUARD = 256  # elements on either side of each buffer
_GUARD_COLUMNS = 7  # on either side of each row
_UNWRITTEN = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)


def guarded(tensor: torch.Tensor, wrong: float) -> torch.Tensor:
    """A tensor like this one within a larger one, full of a wrong value."""
    return tensor.new_full((tensor.numel() + 2 * GUARD,), wrong)[GUARD:-GUARD].view(tensor.shape)


class GuardedInputs:
    """Inputs whose tensors lie within larger ones; +inf stands around numbers, -99 around integers.

    Attributes:
        inputs: the same as those given.

    Args:
        inputs: of a backend.
        pads_rows: whether each row of logits has guards of its own, so that the rows are not in one piece.
    """

    def __init__(self, inputs: VerifyInputs, *, pads_rows: bool):
        tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        laid = {name: _lay(tensor, pads_rows=pads_rows) for name, tensor in tensors.items()}
        self.inputs = replace(inputs, **laid)
        self._wholes = {name: _whole(tensor) for name, tensor in laid.items()}
        self._before = {name: whole.clone() for name, whole in self._wholes.items()}

    def check(self) -> None:
        """Assert that no bit of the inputs and of their guards has changed."""
        for name, whole in self._wholes.items():
            assert torch.equal(whole.view(torch.uint8), self._before[name].view(torch.uint8)), name

    def check_apart(self, output: torch.Tensor) -> None:
        """Assert that an output lies in memory of its own."""
        address = output.untyped_storage().data_ptr()
        assert address not in {whole.untyped_storage().data_ptr() for whole in self._wholes.values()}


def _lay(tensor: torch.Tensor, *, pads_rows: bool) -> torch.Tensor:
    wrong = math.inf if tensor.is_floating_point() else -99
    if pads_rows and tensor.ndim == 2:
        num_rows, num_columns = tensor.shape
        wide = guarded(tensor.new_empty(num_rows, num_columns + 2 * _GUARD_COLUMNS), wrong)
        laid = wide[:, _GUARD_COLUMNS:-_GUARD_COLUMNS]
    else:
        laid = guarded(tensor, wrong)
    return laid.copy_(tensor)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor._base is not None
    return tensor._base


class PoisonedMemory(TorchDispatchMode):
    """Fills what torch hands out unwritten: with +inf, -99 or true."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in _UNWRITTEN:
            result.fill_(math.inf if result.is_floating_point() else -99)
        return result
