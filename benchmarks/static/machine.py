"""What the model assumes of an H100. None of it has been measured here."""

import math
from dataclasses import dataclass

from static.counts import L2_BYTES, SECTOR_BYTES
from static.sass import INPUT_CYCLES, Kernel

# SM cycles that one warp's instruction occupies its pipe. The issue slots are common to all, and `imad` runs on one
# half of `fma`.
PIPE_CYCLES = {"issue": 1 / 4, "fma": 1 / 4, "imad": 1 / 2, "alu": 1 / 2, "xu": 2.0, "lsu": 1.0, "fp64": 1 / 2}
# Cycles until a result is there.
LATENCIES = {
    **dict.fromkeys(("LDS", "LDSM", "LDL"), 30),
    **dict.fromkeys(("SHFL", "REDUX"), 24),
    **dict.fromkeys(("MUFU", "I2F", "F2I", "F2F", "S2R", "S2UR", "POPC", "FLO"), 40),
    "LDC": 60,
    "ATOMG": 400,
    "R2UR": 15,
}
OTHER_LATENCY, BARRIER_CYCLES = 20, 35
MEMORY_LATENCY, L2_LATENCY = 900, 300


@dataclass(frozen=True)
class Machine:
    """What is assumed of an H100; the numbers of registers and so on are those of an SM."""

    sms: int = 132
    clock_ghz: float = 1.7
    memory_tb_per_s: float = 3.0
    gap_us: float = 1.5  # between the launches of a step
    registers: int = 65_536
    warps: int = 64
    programs: int = 32
    shared_bytes: int = 228 << 10
    reserved_bytes: int = 1024  # of it, for each program

    def us(self, cycles: float) -> float:
        return cycles / self.clock_ghz / 1e3

    def memory_us(self, num_bytes: float) -> float:
        return num_bytes / self.memory_tb_per_s / 1e6

    def programs_per_sm(self, kernel: Kernel, num_warps: int) -> int:
        """How many programs an SM holds at once."""
        registers_of_warp = math.ceil(max(kernel.registers, 16) / 8) * 8 * 32
        return min(
            self.programs,
            self.warps // num_warps,
            self.registers // (registers_of_warp * num_warps),
            self.shared_bytes // (kernel.shared_bytes + self.reserved_bytes),
        )


MACHINE = Machine()


def assumptions() -> dict[str, str]:
    """What the model takes for granted, in words."""
    pipes = ", ".join(f"{pipe} {1 / cycles:g}" for pipe, cycles in PIPE_CYCLES.items())
    by_latency: dict[int, list[str]] = {}
    for opcode, latency in LATENCIES.items():
        by_latency.setdefault(latency, []).append(opcode)
    latencies = "; ".join(f"{' '.join(opcodes)} {latency}" for latency, opcodes in by_latency.items())
    return {
        "machine": f"{MACHINE.sms} SMs, {MACHINE.clock_ghz} GHz, memory {MACHINE.memory_tb_per_s:g} TB/s",
        "of an SM": f"{MACHINE.registers} registers, {MACHINE.warps} warps, {MACHINE.programs} programs, "
        f"{MACHINE.shared_bytes >> 10} KiB of shared memory",
        "warp instructions a cycle and SM": pipes,
        "cycles until a result is there": f"load from memory {MEMORY_LATENCY}, from L2 {L2_LATENCY}; {latencies}; "
        f"barrier {BARRIER_CYCLES}; others {OTHER_LATENCY}; inputs read after {INPUT_CYCLES:g}",
        "a load from memory": f"the first of a sector in a launch, if its tensor exceeds {L2_BYTES >> 21} MiB, "
        "half of the L2 cache; all others hit L2",
        "bytes": f"each sector of {SECTOR_BYTES} bytes once a launch, atomic operations left out",
        "a launch": "the largest of memory, issue, busiest pipe, and latency: its programs one after the other",
        "an operation of torch": "a launch that moves its arguments and results",
        "a step": f"the sum of its launches, and {MACHINE.gap_us} us between two",
        "vLLM's step": "float32 copy, temperature, filter, and rejection sampling, as its V2 runner launches them",
    }
