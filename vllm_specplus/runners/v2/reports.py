"""What the device tells the host of a step: kernels write into the host's memory, so nothing has to be copied.

Where the device cannot see that memory, as under WSL, a report is copied, and the host waits for it.
"""

from itertools import cycle

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
        is_on_host = device.type == "cpu"
        self._is_copied = not is_on_host and not is_uva_available()
        self._on_host = torch.empty(size, dtype=dtype, pin_memory=not is_on_host and not self._is_copied)
        if is_on_host:
            self.tensor = self._on_host
        elif self._is_copied:
            self.tensor = torch.empty(size, dtype=dtype, device=device)
        else:
            self.tensor = get_accelerator_view_from_cpu_tensor(self._on_host)
        self._values = self._on_host.numpy()

    def send(self, num_values: int) -> None:
        """Take note that the kernel which writes the first values has been launched."""
        if self._is_copied:
            self._on_host[:num_values].copy_(self.tensor[:num_values])
        self._done.record()

    def read(self, num_values: int) -> np.ndarray:
        """Wait for what was sent, and copy the first values of it."""
        self._done.synchronize()
        return self._values[:num_values].copy()


class Reports:
    """Memory for the reports of one step after the other.

    Args:
        size: values of the longest report.
        device: of the kernels.
        number: reports that may be under way at once. So many steps later the memory of a report is used again.
        sleeps: whether the host sleeps while it waits. It wakes up late then, which a step that cannot go on meanwhile
            has to pay for.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, *, number: int, sleeps: bool):
        self._in_turn = cycle([Report(size, dtype, device, sleeps=sleeps) for _ in range(number)])

    def take(self) -> Report:
        """Memory for the report of this step."""
        return next(self._in_turn)
