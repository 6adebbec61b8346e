"""Compiles kernels to machine code for an H100, on a machine without one.

The compiler refuses more than the interpreter. Triton's wheel brings the assembler, so this needs no CUDA. It needs a
process without TRITON_INTERPRET.
"""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)

_POINTERS = {
    torch.bool: "*i1",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """A launch that was recorded, not run: the kernel, its grid, and its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]  # num_warps and others that the kernel does not see

    @classmethod
    def of(cls, kernel: Any, grid: Any, *args: Any, **named: Any) -> "Launch":
        """The launch ``kernel[grid](*args, **named)``."""
        options = {name: named.pop(name) for name in [*named] if name not in kernel.arg_names}
        bound = inspect.signature(kernel.fn).bind(*args, **named)
        bound.apply_defaults()
        grid = grid(bound.arguments) if callable(grid) else grid
        return cls(kernel, tuple(grid), dict(bound.arguments), options)

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def num_warps(self) -> int:
        return self.options.get("num_warps", 4)

    def compile(self) -> Any:
        """Triton's compiled kernel for these arguments: sm_90 machine code."""
        signature: dict[str, Any] = {}
        constexprs: dict[Any, Any] = {}
        attrs: dict[Any, Any] = {}
        for i, parameter in enumerate(self.kernel.params):
            value, name = self.arguments[parameter.name], parameter.name
            if parameter.is_constexpr:
                signature[name], constexprs[(i,)] = "constexpr", value
            else:
                signature[name] = _specialize(value, not parameter.do_not_specialize, (i,), constexprs, attrs)
                if parameter.do_not_specialize_on_alignment:
                    attrs.pop((i,), None)
        source = triton.compiler.ASTSource(fn=self.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
        return triton.compile(source, target=TARGET, options=self.options)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record every launch of a Triton kernel in place of running it. Tensors may be on the ``meta`` device."""
    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launches.append(Launch.of(kernel, grid, *args, **named))

    with mock.patch.object(triton.JITFunction, "run", record):
        yield launches


class AheadOfTime:
    """Takes a kernel's place. A launch compiles the kernel for its arguments, to sm_90 machine code."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def compile_launch(*args: Any, **named: Any) -> None:
            compiled = Launch.of(self.kernel, grid, *args, **named).compile()
            assert not (fused := fused_with_a_neighbours_number(compiled.asm["sass"])), f"{self.kernel}: {fused}"
            self.compiled.append(compiled)

        return compile_launch


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
    if isinstance(value, float):
        return "fp32"
    if value % 16 == 0 and is_specialized:
        attrs[path] = [["tt.divisibility", 16]]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def fused_with_a_neighbours_number(sass: str) -> list[str]:
    """Fused multiply-adds of a number that came straight from another thread.

    In the last steps of a sum each of two threads adds the other's number to its own. A thread may fuse its own product
    with the addition, while the other's product has been rounded. The two then get different sums, where the kernel
    expects one number.
    """
    neighbours: set[str] = set()
    fused = []
    for line in sass.splitlines():
        # Behind a label registers have what they had at the jump.
        if line.rstrip().endswith(":"):
            neighbours.clear()
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
