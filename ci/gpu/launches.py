"""Launches of the kernels that draft: recorded under Triton's interpreter, and repeated by compiled code on the device.

    python ci/gpu/launches.py FILE --record     where there is no GPU
    python ci/gpu/launches.py FILE JSON [--dry]

The tests of these kernels hold the interpreter to the specification. So compiled code has to write what the interpreter
wrote, bit for bit. ``kernel_cases.py`` has the kernels that verify.
"""

import argparse
import copy
import importlib
import io
import itertools
import json
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jobs import run_jobs

_ROOT = Path(__file__).parents[2]
_PACKAGE = "vllm_specplus.kernels."
_TESTS = (
    *("test_counts.py", "test_drafts.py", "test_inputs.py", "test_ngram.py"),
    *("arbiter/test_arbiter.py", "arbiter/test_offers.py"),
)
# For `pytest -k`. Left out are tests that draw hundreds of cases, since others launch the same kernels.
_ALL = "not compile and not proposers and not models_drafts_and and not equals_the_specification"
_FEW = "prefer or padding"
# Of one kernel, and of one variant: what the compiler makes one piece of machine code for.
MOST_VARIANTS, MOST_LAUNCHES = 12, 8


class Launch(NamedTuple):
    """One launch; `arguments` has all tensors as they were before it and after it, as `torch.save` writes them."""

    module: str
    kernel: str
    grid: tuple[int, ...]
    arguments: bytes


class Recorder:
    """A plugin of pytest that notes launches: some of each variant, evenly chosen among all that the tests make."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Any, list[Launch]]] = {}
        self._seen: dict[Any, int] = {}
        self._random = random.Random(0)

    def launches(self) -> list[list[Launch]]:
        """Those of each variant."""
        return [launches for variants in self._found.values() for launches in variants.values()]

    def pytest_configure(self) -> None:
        """Wrap the interpreter's launches."""
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def noting(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            room = self._room(function.fn, args, kwargs)
            before = copy.deepcopy((args, kwargs)) if room is not None else None
            run(function, *args, grid=grid, warmup=warmup, **kwargs)
            if room is not None:
                launches, place = room
                file = io.BytesIO()
                torch.save((before, (args, kwargs)), file)
                launch = Launch(function.fn.__module__, function.fn.__name__, tuple(grid), file.getvalue())
                launches[place : place + 1] = [launch]

        InterpretedFunction.run = noting

    def _room(self, function: Any, args: Any, kwargs: Any) -> tuple[list[Launch], int] | None:
        """Where to put a launch, by reservoir sampling; None: nowhere."""
        if not function.__module__.startswith(_PACKAGE):
            return None
        name, variant = f"{function.__module__}.{function.__name__}", variant_of((args, kwargs))
        variants = self._found.setdefault(name, {})
        if variant not in variants and len(variants) == MOST_VARIANTS:
            return None
        launches = variants.setdefault(variant, [])
        seen = self._seen[name, variant] = self._seen.get((name, variant), 0) + 1
        place = len(launches) if len(launches) < MOST_LAUNCHES else self._random.randrange(seen)
        return (launches, place) if place < MOST_LAUNCHES else None


def variant_of(value: Any) -> Any:
    """What Triton compiles for: types, constants, and numbers that it may take for constants."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(variant_of, value))
    if isinstance(value, dict):
        return tuple((name, value[name] if name.isupper() else variant_of(value[name])) for name in sorted(value))
    if isinstance(value, int):
        return value == 1, value % 16 == 0
    return repr(value)


def record(file: Path, which: str) -> None:
    """Run tests of the kernels, those that `pytest -k` finds by `which`, and write some of their launches.

    Raises:
        RuntimeError: a test fails.
    """
    import pytest

    recorder = Recorder()
    tests = [str(_ROOT / "tests" / "kernels" / name) for name in _TESTS]
    code = pytest.main(
        ["-q", "-p", "no:cacheprovider", "--rootdir", str(_ROOT), "-m", "not slow", "-k", which, *tests], [recorder]
    )
    if code != 0:
        raise RuntimeError(f"the tests of the kernels exited with {int(code)}")
    # Plain tuples, since a script's classes have another name where it is imported.
    file.write_bytes(pickle.dumps([[tuple(launch) for launch in each] for each in recorder.launches()]))


def read(file: Path) -> list[list[Launch]]:
    """The launches of each variant that `record` has written."""
    return [[Launch(*launch) for launch in each] for each in pickle.loads(file.read_bytes())]


def repeat(job: tuple[list[Launch], str]) -> dict[str, Any]:
    """Repeat the launches of a variant on a device; `first_wrong` tells of the first that fails."""
    launches, device = job
    wrong: list[str] = []
    for launch in launches:
        try:
            (args, kwargs), expected = torch.load(io.BytesIO(launch.arguments), device, weights_only=False)
            getattr(importlib.import_module(launch.module), launch.kernel)[launch.grid](*args, **kwargs)
            wrong += itertools.islice(differences((args, kwargs), expected), 1)
        except Exception as error:
            # Also what a compiler or a driver raises is the result of this launch, and the others go on.
            wrong.append(f"{type(error).__name__}: {str(error)[:400]}")
    kernel = f"{launches[0].module.removeprefix(_PACKAGE)}.{launches[0].kernel}"
    return {"kernel": kernel, "launches": len(launches), "wrong": len(wrong), "first_wrong": wrong[:1]}


def differences(found: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Where two arguments, or what they hold, differ in a bit."""
    if isinstance(expected, torch.Tensor):
        pair = [tensor.contiguous().view(torch.uint8) for tensor in (found, expected)]
        if not torch.equal(*pair):
            yield f"{where}: {found.tolist()} is not {expected.tolist()}"[:400]
    elif isinstance(expected, tuple | list):
        names = getattr(expected, "_fields", range(len(expected)))
        for name, one, other in zip(names, found, expected, strict=True):
            yield from differences(one, other, f"{where}.{name}")
    elif isinstance(expected, dict):
        for name in expected:
            yield from differences(found[name], expected[name], f"{where}.{name}")


def main() -> int:
    """Record, or write the results as they come; 1 if a launch fails."""
    parser = argparse.ArgumentParser(description="Launches of the kernels that draft.")
    parser.add_argument("file", type=Path, help="the launches")
    parser.add_argument("json", type=Path, nargs="?", help="takes the results")
    parser.add_argument("--record", action="store_true", help="write the launches, under Triton's interpreter")
    parser.add_argument("--dry", action="store_true", help="record a few, and repeat them under the interpreter")
    args = parser.parse_args()
    if args.record or args.dry:
        record(args.file, _FEW if args.dry else _ALL)
    if args.json is None:
        return 0
    variants = read(args.file)
    results: list[dict[str, Any]] = []
    device = "cpu" if args.dry else "cuda"
    for result in run_jobs(repeat, [(launches, device) for launches in variants], device):
        results.append(result)
        done = {name: sum(r[name] for r in results) for name in ("launches", "wrong")}
        left = len(variants) - len(results)
        args.json.write_text(json.dumps(done | {"variants_left": left, "variants": results}, indent=1))
    print(f"{done['launches']} launches of {len(variants)} variants, {done['wrong']} wrong")
    return int(done["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
