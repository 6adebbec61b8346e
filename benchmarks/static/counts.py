"""What the programs of a launch execute and touch, as `interpreter.py` tells it.

The header of a loop counts as often as its body begins. The negative of its line counts how often the loop is reached.
The line of a function's `def` counts its calls.

Memory is noted by sectors of 32 bytes. A load *comes from memory* if its tensor is larger than half the L2 cache, and
the launch has not touched the sector before. All others are taken to hit the L2 cache. Logits are the tensors as wide
as the vocabulary. Atomic operations are left out.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from static.places import Line, Place

SECTOR_BYTES = 32
L2_BYTES = 50 << 20


@dataclass
class LaunchCounts:
    """What the programs of one launch executed and touched."""

    name: str
    profiles: list[dict[Place, int]] = field(default_factory=list)  # distinct ones
    programs: list[int] = field(default_factory=list)  # the profile of each program, in the order of a GPU
    from_memory: dict[Place, float] = field(default_factory=dict)  # the share of a place's loads that miss the L2 cache
    bytes_read: int = 0  # each sector once
    bytes_written: int = 0
    logits_read: int = 0  # each once

    def total(self) -> Counter[Place]:
        """The executions of each place by all programs."""
        total: Counter[Place] = Counter()
        for profile, times in Counter(self.programs).items():
            for place, count in self.profiles[profile].items():
                total[place] += count * times
        return total


class Recorder:
    """Counts executions of places, and notes the sectors that are read and written.

    A *line* has a number here, and so has a *context*: a call by its caller's context and line. -1 is the outermost.
    """

    def __init__(self, vocab_size: int, share: float) -> None:
        self.launches: list[LaunchCounts] = []
        self._vocab_size, self._share = vocab_size, share
        self._lines: dict[Line, int] = {}
        self._contexts: dict[tuple[int, int], int] = {}
        self._context = self._line = -1
        self._is_paused = False

    def number_of(self, line: Line) -> int:
        return self._lines.setdefault(line, len(self._lines))

    def begin(self, name: str, arguments: Any) -> None:
        """Begin the counts of a launch, whose tensors are among `arguments`."""
        self.launches.append(LaunchCounts(name))
        self._counts_of: dict[tuple[int, ...], Counter[tuple[int, int]]] = {}
        self._loads: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in _tensors(arguments)}
        self._starts = sorted(tensors)
        self._memory = [_Memory(tensors[start], self._vocab_size, self._share) for start in self._starts]

    def begin_program(self, place: tuple[int, ...]) -> None:
        self._counts = self._counts_of[place] = Counter()
        self._context = self._line = -1

    def end(self) -> None:
        """The launch that has begun last ends."""
        launch, calls = self.launches[-1], {number: caller for caller, number in self._contexts.items()}
        lines = list(self._lines)

        def place(context: int, line: int) -> Place:
            file, number = lines[line] if line >= 0 else lines[~line]
            return (*(place(*calls[context]) if context >= 0 else ()), (file, number if line >= 0 else -number))

        profiles: dict[frozenset[Any], int] = {}
        for _, counts in sorted(self._counts_of.items()):
            launch.programs.append(profiles.setdefault(frozenset(counts.items()), len(profiles)))
        launch.profiles = [{place(*at): count for at, count in profile} for profile in profiles]
        launch.from_memory = {place(*at): misses / loads for at, (loads, misses) in self._loads.items()}
        launch.bytes_read = sum(memory.num_bytes_read for memory in self._memory)
        launch.bytes_written = sum(memory.num_bytes_written for memory in self._memory)
        logits = [memory for memory in self._memory if memory.is_logits]
        launch.logits_read = sum(memory.num_bytes_read // memory.itemsize for memory in logits)

    def stands_at(self, line: int) -> bool:
        if not self._is_paused:
            self._line = line
        return True

    def executes(self, line: int) -> None:
        if not self._is_paused:
            self._line = line
            self._counts[self._context, line] += 1

    def reaches(self, line: int) -> None:
        """As `executes`, of a loop."""
        if not self._is_paused:
            self._line = line
            self._counts[self._context, ~line] += 1

    @contextmanager
    def within_call(self) -> Iterator[None]:
        caller = self._context, self._line
        self._context = self._contexts.setdefault(caller, len(self._contexts))
        yield
        self._context, self._line = caller

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        yield
        self._is_paused = before

    def reads(self, addresses: np.ndarray) -> None:
        if addresses.size:
            memory = self._memory_of(addresses)
            is_new = memory.touch(addresses, memory.read)
            count = self._loads[self._context, self._line]
            count[0] += 1
            count[1] += is_new and memory.is_large

    def writes(self, addresses: np.ndarray) -> None:
        if addresses.size:
            memory = self._memory_of(addresses)
            memory.touch(addresses, memory.written)

    def _memory_of(self, addresses: np.ndarray) -> "_Memory":
        return self._memory[bisect.bisect_right(self._starts, int(addresses.flat[0])) - 1]


class _Memory:
    """The storage of a tensor, and which of its sectors a launch has touched."""

    def __init__(self, tensor: torch.Tensor, vocab_size: int, share: float) -> None:
        storage = tensor.untyped_storage()
        self.start, self.itemsize = storage.data_ptr(), tensor.element_size()
        self.is_large = storage.nbytes() / share > L2_BYTES / 2
        self.is_logits = tensor.ndim > 0 and tensor.shape[-1] == vocab_size
        self.read, self.written = np.zeros((2, storage.nbytes() // SECTOR_BYTES + 1), bool)

    @property
    def num_bytes_read(self) -> int:
        return int(self.read.sum()) * SECTOR_BYTES

    @property
    def num_bytes_written(self) -> int:
        return int(self.written.sum()) * SECTOR_BYTES

    def touch(self, addresses: np.ndarray, touched: np.ndarray) -> bool:
        """Note the sectors of addresses; whether one of them is new. Addresses that span just their size are a run."""
        first, last = int(addresses.flat[0]) - self.start, int(addresses.flat[-1]) - self.start
        sectors: Any
        if last - first == (addresses.size - 1) * self.itemsize:
            sectors = slice(first // SECTOR_BYTES, last // SECTOR_BYTES + 1)
        else:
            sectors = (addresses.reshape(-1) - np.uint64(self.start)) // np.uint64(SECTOR_BYTES)
        is_new = not (self.read[sectors] | self.written[sectors]).all()
        touched[sectors] = True
        return is_new


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments and groups of them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)
