"""Compare the seams of a release of vLLM with the installed one's: ``python ci/next_vllm.py VERSION``.

The release's wheel is fetched. The page is Markdown. The exit code is 1 if a seam is broken.
"""

import argparse
import ast
import importlib.metadata
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from vllm_overlay import download, unpack

from vllm_specplus import compat


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the seams of a release of vLLM with the installed one's.")
    parser.add_argument("version")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        unpack(download(args.version, Path(scratch)), Path(scratch))
        package = Path(scratch) / "vllm"
        print("\n".join(page(args.version, package, importlib.metadata.version("vllm"), compat.vllm_root())))
        return 1 if compat.missing_seams(package) else 0


def page(version: str, new: Path, installed: str, old: Path) -> Iterator[str]:
    """The lines of the page.

    Args:
        version, new: the other vLLM's version and package.
        installed, old: the installed one's.
    """
    broken = {seam: problem for seam in compat.LEDGER if (problem := compat.problem_of(new, seam))}
    changed = [seam for seam in compat.LEDGER if seam not in broken and has_another_body(seam, new, old)]
    yield f"# vLLM {version} beside {installed}"
    yield ""
    yield f"{len(broken)} of {len(compat.LEDGER)} seams are broken."
    if broken:
        places = definitions(new)
        yield ""
        for seam, problem in broken.items():
            found = ", ".join(sorted(places[seam.name.rpartition(".")[2]])[:3])
            yield f"- {problem}" + (f"; the name is defined in {found}" if found else "")
    yield ""
    yield f"{len(changed)} functions behind seams have another body" + (", so look at them:" if changed else ".")
    if changed:
        yield ""
    yield from (f"- {seam} ({seam.why})" for seam in changed)


def has_another_body(seam: compat.Seam, new: Path, old: Path) -> bool:
    """Whether a seam is a function in both versions, and not the same one."""
    sources = {compat.function_source(root, seam) for root in (new, old)}
    return None not in sources and len(sources) == 2


def definitions(root: Path) -> dict[str, set[str]]:
    """The modules that define each class or function of any level, by its name."""
    found = defaultdict(set)
    for path in root.rglob("*.py"):
        module = ".".join(["vllm", *path.relative_to(root).with_suffix("").parts])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name].add(module)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
