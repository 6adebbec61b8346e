"""A model of how long an H100 takes for a launch: from machine code, and from how often each place of it is executed.

A block of machine code is executed as often as its place in the source. That is the most common place among the
instructions that a compiler moves least: memory, barriers, shuffles and branches. Code that was moved out of a loop is
executed as often as the loop is reached. A loop of the source that is in no loop of the machine code has been unrolled.
If it is in several, the largest takes all of the work.

A program costs the sum over its blocks. A block costs what one warp waits in it, or what all its warps need of the
busiest pipe, if that is more. A launch takes as long as the slowest of four: its bytes, its instructions, the busiest
pipe, and its programs one after the other in the places that the processors have.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from static.counts import LaunchCounts
from static.machine import (
    BARRIER_CYCLES,
    L2_LATENCY,
    LATENCIES,
    MACHINE,
    MEMORY_LATENCY,
    OTHER_LATENCY,
    PIPE_CYCLES,
    Machine,
)
from static.places import Line, Place, function_of, loops_of, place_of, reach_of
from static.sass import Block, Instruction, Kernel, cycles_of_blocks
from static.steps import Step

_WEIGHT = 1000  # of an instruction that is in its place, and once more of one that a compiler moves least
_ANCHORS = ("LDG", "STG", "LDS", "STS", "ATOMG", "ATOM", "RED", "BAR", "SHFL", "REDUX", "BRA", "EXIT")


@dataclass(frozen=True)
class LaunchCost:
    """What a launch costs, in microseconds. With the mean latency all programs take as long as the mean one."""

    name: str
    programs: int
    num_warps: int
    registers: int
    spilled_bytes: int
    programs_per_sm: int
    num_bytes: float
    # Instructions of a thread for each logit that is read, by pipe. Those of programs that end early are
    # among them. Empty but for a wide kernel.
    per_logit: dict[str, float]
    memory_us: float
    issue_us: float
    pipe_us: float
    busiest_pipe: str
    latency_us: float
    mean_latency_us: float

    @property
    def us(self) -> float:
        return max(self.memory_us, self.issue_us, self.pipe_us, self.latency_us)

    @property
    def mean_us(self) -> float:
        return max(self.memory_us, self.issue_us, self.pipe_us, self.mean_latency_us)

    def record(self) -> dict[str, Any]:
        """The launch with its times, as plain values."""
        return asdict(self) | {"us": self.us, "mean_us": self.mean_us}


@dataclass(frozen=True)
class StepCost:
    """What a step costs, in microseconds: its launches, torch's operations with their bytes, and the gaps between."""

    step: Step
    launches: list[LaunchCost]
    operations: list[tuple[str, int]]

    @property
    def num_launches(self) -> int:
        return len(self.launches) + len(self.operations)

    @property
    def us(self) -> float:
        return self._others_us + sum(launch.us for launch in self.launches)

    @property
    def mean_us(self) -> float:
        return self._others_us + sum(launch.mean_us for launch in self.launches)

    @property
    def floor_us(self) -> float:
        return MACHINE.memory_us(self.step.shape.logits_bytes)

    @property
    def _others_us(self) -> float:
        moved = sum(num_bytes for _, num_bytes in self.operations)
        return MACHINE.memory_us(moved) + MACHINE.gap_us * (self.num_launches - 1)

    def record(self) -> dict[str, Any]:
        """The step with its times and its launches, as plain values."""
        found = {name: getattr(self, name) for name in ("us", "mean_us", "floor_us", "num_launches")}
        launches = [launch.record() for launch in self.launches]
        operations = [{"name": name, "num_bytes": num_bytes} for name, num_bytes in self.operations]
        about = {"name": self.step.name} | asdict(self.step)
        return about | found | {"launches": launches, "torch_operations": operations}


@dataclass
class _Work:
    """What one execution of a place costs a program."""

    cycles: float
    instructions: Counter[str]  # of all its warps, by pipe


class ProgramCosts:
    """What programs cost, by how often each of them executes each place."""

    def __init__(self, kernel: Kernel, num_warps: int, counts: LaunchCounts, folders: tuple[Path, ...]) -> None:
        self._kernel, self._counts, self._folders = kernel, counts, folders
        self._total = counts.total()
        self._place = cache(self._executed_place)
        self._work: dict[Place, _Work] = {}
        places = dict(self.places())
        times = {n: self._total[place] * self._shares[n] / self._unrolled(place) for n, place in places.items()}
        waits = cycles_of_blocks(kernel, self._latency, times)
        for number, place in places.items():
            instructions = kernel.blocks[number].instructions
            wait = waits[number] + BARRIER_CYCLES * sum(i.opcode == "BAR" for i in instructions)
            pipes = Counter(instruction.pipe for instruction in instructions)
            share = self._shares[number] / self._unrolled(place)
            work = self._work.setdefault(place, _Work(0.0, Counter()))
            work.cycles += share * max(wait, *(num_warps * busy for busy in occupied(pipes).values()))
            for pipe, count in pipes.items():
                work.instructions[pipe] += share * count * num_warps

    def of(self, profile: dict[Place, int]) -> tuple[float, Counter[str]]:
        """The cycles of a program and its warps' instructions by pipe."""
        cycles, instructions = 0.0, Counter[str]()
        for place, work in self._work.items():
            if times := profile.get(place, 0):
                cycles += times * work.cycles
                for pipe, count in work.instructions.items():
                    instructions[pipe] += times * count
        return cycles, instructions

    def places(self) -> Iterator[tuple[int, Place]]:
        """The number of each block that can be reached, and its place."""
        entry = self._place(self._kernel.blocks[0].instructions[0].place)
        for number in self._kernel.predecessors:
            around = {loop for loop, copies in self._loops.items() if any(number in blocks for blocks in copies)}
            found = self._places_within(self._kernel.blocks[number], around)
            innermost = max(around, key=len, default=function_of(entry[:1]))
            yield number, found.most_common(1)[0][0] if found else innermost

    def _places_within(self, block: Block, around: set[Place]) -> Counter[Place]:
        """The places of a block's instructions, as far as they are in the loops that the block is in; anchors first.

        What was moved out of a loop is executed as often as the loop is reached. It counts least.
        """
        found: Counter[Place] = Counter()
        for instruction in block.instructions:
            place = self._place(instruction.place)
            loops = [loop for loop in loops_of(place) if loop in self._loops]
            left = [loop for loop in loops if loop not in around]
            if place and len(loops) - len(left) == len(around):
                weight = _WEIGHT**2 if instruction.opcode in _ANCHORS else _WEIGHT
                found[reach_of(left[0]) if left else place] += 1 if left else weight
        return found

    @cached_property
    def _loops(self) -> dict[Place, list[frozenset[int]]]:
        """The source's loops that the machine code has, and the blocks of each copy, the largest first."""
        found: dict[Place, list[frozenset[int]]] = {}
        for loop in self._kernel.loops:
            if around := loops_of(self._place(loop.place)):
                found.setdefault(around[-1], []).append(loop.blocks)
        return found

    @cached_property
    def _shares(self) -> dict[int, float]:
        """The share of its place's executions that each block takes: less than 1 in copies of a loop."""
        shares = dict.fromkeys(self._kernel.predecessors, 1.0)
        for largest, *others in self._loops.values():
            copies = [blocks for blocks in others if not blocks & largest]
            for blocks in copies:
                shares |= dict.fromkeys(blocks, 0.0)
            # The smallest does one iteration; the largest may do several at a time.
            for number in largest if copies else ():
                shares[number] *= min(map(self._size, copies)) / self._size(largest)
        return shares

    def _size(self, blocks: frozenset[int]) -> int:
        return sum(len(self._kernel.blocks[number].instructions) for number in blocks)

    def _unrolled(self, place: Place) -> float:
        """How many iterations of the loops around a place one execution of its machine code stands for."""
        factor = 1.0
        for loop in loops_of(place):
            if loop not in self._loops and (reached := self._total[reach_of(loop)]):
                factor *= max(self._total[loop] / reached, 1.0)
        return factor

    def _executed_place(self, calls: tuple[Line, ...]) -> Place:
        """The place that counts for an instruction.

        A function that combines the elements of a reduction is not counted: it belongs to the reduction's statement.
        """
        place = place_of(calls, self._folders)
        for i in range(1, len(place)):
            if self._total[place[:i]] and not self._total[function_of(place[: i + 1])]:
                return place[:i]
        return place

    def _latency(self, instruction: Instruction) -> float:
        if instruction.opcode != "LDG":
            return LATENCIES.get(instruction.opcode, OTHER_LATENCY)
        share = self._counts.from_memory.get(self._place(instruction.place), 0.0)
        return L2_LATENCY + share * (MEMORY_LATENCY - L2_LATENCY)


def occupied(pipes: Counter[str]) -> dict[str, float]:
    """SM cycles that one warp's instructions occupy the issue slots and each pipe."""
    return {pipe: pipes[pipe] * cycles for pipe, cycles in PIPE_CYCLES.items()} | {
        "issue": pipes.total() * PIPE_CYCLES["issue"],
        "fma": (pipes["fma"] + pipes["imad"]) * PIPE_CYCLES["fma"],
    }


def cost_of_launch(
    kernel: Kernel,
    num_warps: int,
    grid: tuple[int, ...],
    counts: LaunchCounts,
    folders: tuple[Path, ...],
    machine: Machine = MACHINE,
) -> LaunchCost:
    """What a launch costs whose programs are like those that were counted; a few of them may stand for many."""
    costs = ProgramCosts(kernel, num_warps, counts, folders)
    of_profile = [costs.of(profile) for profile in counts.profiles]
    num_programs = math.prod(grid)
    scale = num_programs / len(counts.programs)
    instructions: Counter[str] = Counter()
    for profile, times in Counter(counts.programs).items():
        for pipe, count in of_profile[profile][1].items():
            instructions[pipe] += count * times * scale
    cycles = [of_profile[profile][0] for profile in counts.programs]
    in_order = (cycles * math.ceil(scale))[:num_programs]
    mean = sum(cycles) / len(cycles)
    busy = {pipe: machine.us(used / machine.sms) for pipe, used in occupied(instructions).items()}
    issue_us = busy.pop("issue")
    busiest = max(busy, key=busy.__getitem__)
    per_sm = machine.programs_per_sm(kernel, num_warps)
    num_bytes = (counts.bytes_read + counts.bytes_written) * scale
    logits = counts.logits_read * scale
    is_wide = len(grid) > 1 and logits > 0  # over the vocabulary too
    latency_us = machine.us(_last_end(in_order, machine.sms * per_sm))
    mean_latency_us = machine.us(_last_end([mean] * num_programs, machine.sms * per_sm))
    return LaunchCost(
        name=counts.name,
        programs=num_programs,
        num_warps=num_warps,
        registers=kernel.registers,
        spilled_bytes=kernel.spilled_bytes,
        programs_per_sm=per_sm,
        num_bytes=num_bytes,
        per_logit={pipe: 32 * count / logits for pipe, count in sorted(instructions.items())} if is_wide else {},
        memory_us=machine.memory_us(num_bytes),
        issue_us=issue_us,
        pipe_us=busy[busiest],
        busiest_pipe=busiest,
        latency_us=latency_us,
        # Where some programs are shorter, others take their places sooner than where all take as long as the mean.
        mean_latency_us=min(mean_latency_us, latency_us),
    )


def _last_end(cycles: list[float], places: int) -> float:
    """When the last of the programs ends, if they take the places in turn as these get free."""
    ends = [0.0] * min(places, len(cycles))
    for program in cycles:
        heapq.heapreplace(ends, ends[0] + program)
    return max(ends)
