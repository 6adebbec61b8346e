"""Kernels compiled to machine code for an H100 without one: what the interpreter lets pass, the compiler does not.

Triton's wheel brings the assembler, so this needs no CUDA. It has to run in a process without TRITON_INTERPRET.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

_POINTERS = {
    torch.bool: "*i1",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class AheadOfTime:
    """Takes a kernel's place and compiles it, for the arguments it is launched with, to sm_90 machine code."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return self.compile

    def compile(self, *args: Any, num_warps: int = 4, **constants: Any) -> None:
        names = self.kernel.arg_names
        values = dict(zip(names, args, strict=False)) | constants
        assert set(values) == set(names)
        signature = dict.fromkeys(names, "constexpr")
        # torch's memory and a vocabulary are mostly multiples of 16, which lets loads be wide. A 1 is a constant.
        attrs = {}
        for i, (parameter, value) in enumerate(zip(self.kernel.params, args, strict=False)):
            is_tensor, is_specialized = isinstance(value, torch.Tensor), not parameter.do_not_specialize
            if value is None or (not is_tensor and value == 1 and is_specialized):
                continue
            signature[parameter.name] = _POINTERS[value.dtype] if is_tensor else "i32"
            if is_tensor or (value % 16 == 0 and is_specialized):
                attrs[(i,)] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(
            fn=self.kernel,
            signature=signature,
            constexprs={name: values[name] for name in names if signature[name] == "constexpr"},
            attrs=attrs,
        )
        options = {"num_warps": num_warps}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert not (fused := fused_with_a_neighbours_number(compiled.asm["sass"])), f"{self.kernel}: {fused}"
        self.compiled.append(compiled)


def fused_with_a_neighbours_number(sass: str) -> list[str]:
    """Fused multiply-adds of a number that came straight from another thread.

    In the last steps of a sum each of two threads adds the other's number to its own. Where its own is a product that
    is fused with the addition, but the other's has been rounded, the two get different sums, and what the kernel takes
    for one number is two.
    """
    neighbours: set[str] = set()
    fused = []
    for line in sass.splitlines():
        # What the scheduler is told, a tab, perhaps a predicate, the instruction: its result's register comes first.
        instruction = line.rpartition("\t")[2]
        registers = re.findall(r"\bR\d+\b", instruction)
        if "FFMA" in instruction and neighbours.intersection(registers[1:]):
            fused.append(instruction)
        if "SHFL" in instruction:
            neighbours.add(registers[0])
        elif registers:
            neighbours.discard(registers[0])
    return fused


def run_without_interpreter(code: str, cache: Path) -> str:
    """What Python code prints in a process that compiles; an assertion shows its errors."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
