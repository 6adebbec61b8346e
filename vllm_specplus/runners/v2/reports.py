"""What the device tells the host of a step: kernels write into the host's memory, so nothing has to be copied."""

from functools import partial

import numpy as np
import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor


class Report:
    """Memory that a kernel writes a report into, and the host reads it from.

    Attributes:
        tensor: [size], the memory, for kernels.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, *, sleeps: bool):
        self._done = torch.cuda.Event(blocking=sleeps)
        self._is_copied = device.type != "cpu" and not is_uva_available()
        self._on_host = torch.empty(size, dtype=dtype, pin_memory=device.type != "cpu")
        if device.type == "cpu":
            self.tensor = self._on_host
        elif self._is_copied:
            self.tensor = torch.empty(size, dtype=dtype, device=device)
        else:
            self.tensor = get_accelerator_view_from_cpu_tensor(self._on_host)
        self._values = self._on_host.numpy()

    def send(self) -> None:
        """Take note that the kernel which writes it has been launched."""
        if self._is_copied:
            self._on_host.copy_(self.tensor, non_blocking=True)
        self._done.record()

    def read(self, num_values: int) -> np.ndarray:
        """Wait for what was sent, and copy the first values of it."""
        self._done.synchronize()
        return self._values[:num_values].copy()


class Reports:
    """Memory for reports, which is used again and again.

    Args:
        size: values of the longest report.
        device: of the kernels.
        number: reports that are usually under way at once.
        sleeps: whether the host sleeps while it waits. It wakes up late then, which a step that cannot go on meanwhile
            has to pay for.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, *, number: int, sleeps: bool):
        self._make = partial(Report, size, dtype, device, sleeps=sleeps)
        # A kernel may still write into one that nobody reads any more, so all are kept.
        self._all = [self._make() for _ in range(number)]
        self._spare = [*self._all]

    def take(self) -> Report:
        """Memory that is not in use, until it is given back."""
        if not self._spare:
            self._all.append(self._make())
            return self._all[-1]
        return self._spare.pop()

    def give_back(self, report: Report) -> None:
        """Take back a report that has been read."""
        self._spare.append(report)
