"""Compiles kernels to machine code for an H100, on a machine without one.

The compiler refuses more than the interpreter. Triton's wheel brings the assembler, so this needs no CUDA. It needs a
process without TRITON_INTERPRET.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
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
    """Takes a kernel's place. A launch compiles the kernel for its arguments, to sm_90 machine code."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return self.compile

    def compile(self, *args: Any, num_warps: int = 4, **constants: Any) -> None:
        names = self.kernel.arg_names
        assert {*names[: len(args)], *constants} == {*names}
        signature: dict[str, Any] = dict.fromkeys(names, "constexpr")
        constexprs: dict[Any, Any] = {(names.index(name),): value for name, value in constants.items()}
        attrs: dict[Any, Any] = {}
        for i, (parameter, value) in enumerate(zip(self.kernel.params, args, strict=False)):
            is_specialized = not parameter.do_not_specialize
            signature[parameter.name] = _specialize(value, is_specialized, (i,), constexprs, attrs)
        source = triton.compiler.ASTSource(fn=self.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
        options = {"num_warps": num_warps}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert not (fused := fused_with_a_neighbours_number(compiled.asm["sass"])), f"{self.kernel}: {fused}"
        self.compiled.append(compiled)


def _specialize(
    value: Any, is_specialized: bool, path: tuple[int, ...], constexprs: dict[Any, Any], attrs: dict[Any, Any]
) -> Any:
    """The type of an argument, or of each field of a group, as a launch finds it; note constants and divisibility.

    Torch's memory and a vocabulary are mostly multiples of 16, which lets loads be wide. A 1 is a constant. Fields of a
    group are always specialized.
    """
    if isinstance(value, tuple):
        fields = [_specialize(field, True, (*path, i), constexprs, attrs) for i, field in enumerate(value)]
        return type(value)(*fields)
    if isinstance(value, torch.Tensor):
        attrs[path] = [["tt.divisibility", 16]]
        return _POINTERS[value.dtype]
    if value is None or isinstance(value, tl.constexpr) or (value == 1 and is_specialized):
        constexprs[path] = value
        return "constexpr"
    if value % 16 == 0 and is_specialized:
        attrs[path] = [["tt.divisibility", 16]]
    return "i32"


def fused_with_a_neighbours_number(sass: str) -> list[str]:
    """Fused multiply-adds of a number that came straight from another thread.

    In the last steps of a sum each of two threads adds the other's number to its own. A thread may fuse its own product
    with the addition, while the other's product has been rounded. The two then get different sums, where the kernel
    expects one number.
    """
    neighbours: set[str] = set()
    fused = []
    for line in sass.splitlines():
        # Scheduling, a tab, perhaps a predicate, the instruction. Its first register is the result's.
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
    """Run Python code in a process that compiles, and return its output. Raise AssertionError with its errors."""
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
