"""Machine code of sm_90, as the tools that come with Triton print it: instructions, basic blocks and loops.

Each instruction knows its place in the source with the calls that led there, the outermost first, and what its control
code says. That is how long it stalls the warp, which of six scoreboards it waits for, and which it sets.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Line = tuple[str, int]

NUM_SCOREBOARDS = 6
INPUT_CYCLES = 12.0  # until an instruction has read its registers
_NO_SCOREBOARD = 7
_MOST_ROUNDS = 20

_FILE_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([^;]*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/")
_ENCODING = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")

_PIPES = {
    "fma": ("FFMA", "FMUL", "FADD", "HFMA2", "HMUL2", "HADD2"),
    "imad": ("IMAD",),
    "xu": ("MUFU", "I2F", "F2I", "F2F", "FRND", "POPC", "FLO", "REDUX"),
    "fp64": ("DADD", "DMUL", "DFMA", "DSETP"),
    "lsu": (
        *("LDG", "STG", "LDS", "STS", "LDL", "STL", "LD", "ST", "LDSM", "STSM", "SHFL"),
        *("ATOM", "ATOMG", "ATOMS", "RED", "REDG", "LDGSTS"),
    ),
    "control": (
        *("BRA", "EXIT", "BSSY", "BSYNC", "BREAK", "BMOV", "BRX", "JMP", "CALL", "RET", "WARPSYNC", "YIELD", "NOP"),
        *("BAR", "S2R", "CS2R", "LDC", "DEPBAR", "LDGDEPBAR", "MEMBAR", "ERRBAR", "NANOSLEEP", "BPT", "ENDCOLLECTIVE"),
    ),
}
_PIPE_OF = {opcode: pipe for pipe, opcodes in _PIPES.items() for opcode in opcodes}
_UNIFORM = ("R2UR", "S2UR", "VOTEU")


@dataclass(frozen=True)
class Instruction:
    """One instruction; `wait` holds a bit for each scoreboard, `sets` are the one for its result and for its inputs."""

    predicate: str | None
    text: str
    place: tuple[Line, ...]
    stall: int
    wait: int
    sets_result: int | None
    sets_inputs: int | None

    @property
    def opcode(self) -> str:
        return re.split(r"[.\s]", self.text, maxsplit=1)[0]

    @property
    def pipe(self) -> str:
        if self.opcode in _UNIFORM or (self.opcode.startswith("U") and self.opcode not in _PIPE_OF):
            return "uniform"
        return _PIPE_OF.get(self.opcode, "alu")

    @property
    def target(self) -> str | None:
        """Where it branches to. `BRA.DIV` is left out, since warps of these kernels do not diverge there."""
        found = _TARGET.search(self.text)
        return found[1] if found and self.opcode == "BRA" and not self.text.startswith("BRA.DIV") else None

    @property
    def may_end(self) -> bool:
        """Whether it ends the program, at least for some threads."""
        return self.opcode in ("EXIT", "RET")

    @property
    def falls_through(self) -> bool:
        if self.target is not None:
            return self.predicate is not None or bool(re.match(r"\S+ !?U?P\d", self.text))
        return not self.may_end or self.predicate is not None


@dataclass
class Block:
    """A run of instructions that are executed together, and the numbers of the blocks that may follow."""

    instructions: list[Instruction]
    successors: list[int] = field(default_factory=list)


@dataclass
class Kernel:
    """A kernel's machine code. The first block is its beginning."""

    blocks: list[Block]
    registers: int
    spilled_bytes: int  # in local memory
    shared_bytes: int

    @cached_property
    def predecessors(self) -> dict[int, list[int]]:
        """Of each block that can be reached."""
        found: dict[int, list[int]] = {0: []}
        waiting = [0]
        while waiting:
            block = waiting.pop()
            for successor in self.blocks[block].successors:
                if successor not in found:
                    found[successor] = []
                    waiting.append(successor)
                found[successor].append(block)
        return found

    @cached_property
    def loops(self) -> list["Loop"]:
        """The loops, the largest first."""
        found = []
        for tail, head in self._back_edges():
            blocks, waiting = {head}, [tail]
            while waiting:
                block = waiting.pop()
                if block not in blocks:
                    blocks.add(block)
                    waiting += self.predecessors[block]
            found.append(Loop(self.blocks[tail].instructions[-1].place, frozenset(blocks)))
        return sorted(found, key=lambda loop: -len(loop.blocks))

    def _back_edges(self) -> Iterator[tuple[int, int]]:
        is_open = {0: True}
        path: list[tuple[int, Iterator[int]]] = [(0, iter(self.blocks[0].successors))]
        while path:
            block, successors = path[-1]
            for successor in successors:
                if is_open.get(successor):
                    yield block, successor
                elif successor not in is_open:
                    is_open[successor] = True
                    path.append((successor, iter(self.blocks[successor].successors)))
                    break
            else:
                is_open[block] = False
                path.pop()


@dataclass(frozen=True)
class Loop:
    """A loop: the place of the branch back to its head, and its blocks."""

    place: tuple[Line, ...]
    blocks: frozenset[int]


def read_kernel(compiled: Any) -> Kernel:
    """The machine code of a kernel that Triton has compiled."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        listing = _run(knobs.nvidia.nvdisasm.path, "-c", "-gi", "-hex", file.name)
        resources = _RESOURCES.findall(_run(knobs.nvidia.cuobjdump.path, "-res-usage", file.name))
    registers, stack, shared, local = map(int, resources[-1])
    return Kernel(parse(listing), registers, stack + local, max(shared, compiled.metadata.shared))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def parse(listing: str) -> list[Block]:
    """The blocks of a listing of `nvdisasm -c -gi -hex`."""
    starts: dict[str, int] = {}  # the instruction behind each label
    heads: list[tuple[str | None, str, tuple[Line, ...]]] = []
    codes: list[int] = []
    place: tuple[Line, ...] = ()
    told: list[Line] = []
    for line in listing.splitlines():
        if found := _FILE_LINE.search(line):
            told.append((found[1], int(found[2])))
        elif found := _LABEL.match(line):
            starts[found[1]] = len(heads)
        elif found := _INSTRUCTION.match(line):
            if told:  # the innermost comes first; it holds until the next
                place, told = tuple(reversed(told)), []
            heads.append((found[1], found[2], place))
        elif (found := _ENCODING.match(line)) and len(codes) < len(heads):
            codes.append(int(found[1], 16))
    instructions = [_decode(*head, code) for head, code in zip(heads, codes, strict=True)]
    return _blocks(instructions, starts)


def _decode(predicate: str | None, text: str, place: tuple[Line, ...], code: int) -> Instruction:
    """An instruction with its control code, which is in the upper bits of the second half of its encoding."""
    result, inputs = code >> 46 & 7, code >> 49 & 7
    return Instruction(
        predicate,
        text,
        place,
        stall=code >> 41 & 15,
        wait=code >> 52 & 63,
        sets_result=None if result == _NO_SCOREBOARD else result,
        sets_inputs=None if inputs == _NO_SCOREBOARD else inputs,
    )


def _blocks(instructions: list[Instruction], starts: dict[str, int]) -> list[Block]:
    """Cut at each target of a branch, behind each branch, and behind each end, also one under a condition."""
    cuts = {0, *starts.values()}
    cuts |= {i + 1 for i, instruction in enumerate(instructions) if instruction.target or instruction.may_end}
    edges = sorted(cut for cut in cuts if cut < len(instructions))
    number = {start: i for i, start in enumerate(edges)}
    blocks = []
    for start, end in zip(edges, [*edges[1:], len(instructions)], strict=True):
        block = Block(instructions[start:end])
        last = block.instructions[-1]
        if last.falls_through and end < len(instructions):
            block.successors.append(number[end])
        if last.target is not None:
            block.successors.append(number[starts[last.target]])
        blocks.append(block)
    return blocks


def cycles_of_blocks(
    kernel: Kernel, latency_of: Callable[[Instruction], float], times: Mapping[int, float]
) -> dict[int, float]:
    """The cycles that one warp takes for each block that can be reached, alone on the machine.

    It waits as the control codes say. What a block finds pending on a scoreboard is what the blocks before it leave, on
    average by how often these are executed.

    Args:
        latency_of: the cycles until an instruction's result is there.
        times: how often each block is executed.
    """
    cycles: dict[int, float] = {}
    left = dict.fromkeys(kernel.predecessors, (0.0,) * NUM_SCOREBOARDS)
    for _ in range(_MOST_ROUNDS):
        before = left.copy()
        for number, predecessors in sorted(kernel.predecessors.items()):
            weights = {p: times[p] for p in predecessors}
            if not any(weights.values()):  # of blocks that are never executed each counts the same
                weights = dict.fromkeys(predecessors, 1.0)
            pending = [
                sum(weight * left[p][i] for p, weight in weights.items()) / (sum(weights.values()) or 1.0)
                for i in range(NUM_SCOREBOARDS)
            ]
            cycles[number], left[number] = _replay_block(kernel.blocks[number], pending, latency_of)
        if all(abs(x - y) < 1 for number in left for x, y in zip(left[number], before[number], strict=True)):
            break
    return cycles


def _replay_block(
    block: Block, pending: list[float], latency_of: Callable[[Instruction], float]
) -> tuple[float, tuple[float, ...]]:
    """The cycles of a block, and how long each scoreboard is still pending at its end."""
    ready, now = [*pending], 0.0
    for instruction in block.instructions:
        now = max([now, *(ready[i] for i in range(NUM_SCOREBOARDS) if instruction.wait >> i & 1)])
        if instruction.sets_result is not None:
            ready[instruction.sets_result] = max(ready[instruction.sets_result], now + latency_of(instruction))
        if instruction.sets_inputs is not None:
            ready[instruction.sets_inputs] = max(ready[instruction.sets_inputs], now + INPUT_CYCLES)
        now += max(instruction.stall, 1)
    return now, tuple(max(0.0, at - now) for at in ready)
