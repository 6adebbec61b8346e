"""Records the launches of a call without running them, to see that a CUDA graph can capture it and it never waits."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Launches:
    """Takes a kernel's place and notes the grid of each launch."""

    def __init__(self) -> None:
        self.grids: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        self.grids.append(grid)
        return lambda *args, **options: None


class OnlyTorch(TorchDispatchMode):
    """Lets only the given operations of torch run."""

    def __init__(self, *allowed: Any) -> None:
        super().__init__()
        self._allowed = allowed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket in self._allowed, f"{func} was called"
        return func(*args, **(kwargs or {}))
