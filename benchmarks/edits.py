"""Engine steps to write an edited file when the request carries the file as it was.

    python benchmarks/edits.py [--quick] [--drafts 4,16,64,128] [--files N] [--ngrams MIN,MAX] [--json FILE]

The pairs of reference and true output: files of Python's standard library, 4 to 16 KiB of ASCII, and each of them with

    rename     one variable called something else everywhere
    insert     a function of another file put in
    delete     a function taken out
    move       a function put elsewhere
    docstring  a docstring's text changed to that of another file's

once with a byte a token, once with a word, a run of whitespace or a punctuation mark a token.

No model runs: the true output is replayed, and a draft is accepted while it equals the output. As in an engine, each
step gives one token more than it accepts. Before the first step there is no output, and a reference drafts all the
same. A drafter sees the tokens that are there, with -1 behind them. Modes: none; prompt lookup (`NgramMatcher`, the
reference as the prompt); `sp_edit` 0 and 1 (`ReferenceText`).

The ideal count is ceil(output tokens / (K + 1)), and one step for each edit. Each renamed place is one edit, a move is
two, the others are one. The goal: `sp_edit` 1 needs at most one step more than that per edit, on average, over all
pairs of a tokenisation and K. No reference holds some tokens: those of a function or docstring from another file, and
those of a new name where it comes first. No drafter of reference text can reach the goal there. So the excess is also
given for the known text alone: without these new tokens and the steps that begin among them. The steps to find back
behind them count.

A replay that gives another text than the true output ends the run without numbers.
"""

import argparse
import ast
import math
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import environment, num_right, write_json
from rich.console import Console
from rich.table import Table

from vllm_specplus.proposers import History, NgramMatcher
from vllm_specplus.proposers.reference_text import ReferenceText

MODES = ("none", "lookup", "sp_edit 0", "sp_edit 1")
KINDS = ("rename", "insert", "delete", "move", "docstring")
MIN_BYTES, MAX_BYTES = 4 << 10, 16 << 10
GOAL_EXCESS = 1.0
SEED = 0
_TOKEN = re.compile(r"\w+|[^\w\s]|\s+")


@dataclass(frozen=True)
class Edit:
    """A file before and after, how many edits lie between, and which characters of the file after are new text."""

    kind: str
    file: str
    before: str
    after: str
    num_edits: int
    new: tuple[int, int]


@dataclass(frozen=True)
class Pair:
    """An edit in tokens: reference and output, [n] and [m] int32, and which output tokens are new, [m] bool."""

    edit: Edit
    reference: np.ndarray
    output: np.ndarray
    is_new: np.ndarray


@dataclass(frozen=True)
class Result:
    """All pairs of one kind (or "all") in one mode; the excess is in steps per edit, in all and of the known text."""

    tokens: str
    drafts: int
    mode: str
    kind: str
    pairs: int
    output_tokens: int
    edits: int
    new_tokens: int
    steps: int
    steps_per_token: float
    excess: float
    excess_known: float
    host_us: float  # per step


@dataclass(frozen=True)
class Piece:
    """A function of a file: its lines [start, end) with its decorators, and the indentation of its first line."""

    start: int
    end: int
    indent: int


def functions(tree: ast.AST) -> list[Piece]:
    """Functions of modules and classes, none within another function."""
    pieces = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef):
            continue
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                start = min([child.lineno, *(d.lineno for d in child.decorator_list)]) - 1
                pieces.append(Piece(start, child.end_lineno or child.lineno, child.col_offset))
    return sorted(pieces, key=lambda piece: piece.start)


def docstrings(tree: ast.AST, source: str) -> list[str]:
    """Docstrings as they stand in the source, quotes included, that occur once."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            text = ast.get_source_segment(source, node.body[0]) or ""
            if text.startswith('"""') and len(text) < 1000 and source.count(text) == 1:
                found.append(text)
    return found


def variables(tree: ast.AST, source: str) -> list[str]:
    """Names that are assigned or passed, by how often the word occurs: 3 to 60 times."""
    names = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    names |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    counts = Counter(re.findall(r"\w+", source))
    rows = [name for name in names if 3 <= counts[name] <= 60 and len(name) > 2 and name != "self"]
    return sorted(rows, key=lambda name: (-counts[name], name))


class Source:
    """A file and what can be edited in it."""

    def __init__(self, path: Path):
        self.name = path.name
        self.text = path.read_text(encoding="ascii")
        self.lines = self.text.splitlines(keepends=True)
        tree = ast.parse(self.text)
        self.functions = functions(tree)
        self.docstrings = docstrings(tree, self.text)
        self.variables = variables(tree, self.text)

    @property
    def is_editable(self) -> bool:
        return len(self.functions) >= 4 and bool(self.docstrings) and bool(self.variables)

    def block(self, piece: Piece) -> str:
        return "".join(self.lines[piece.start : piece.end])

    def joined(self, *parts: tuple[int, int] | str) -> str:
        """Ranges of lines and text, one after another."""
        return "".join(p if isinstance(p, str) else "".join(self.lines[p[0] : p[1]]) for p in parts)


def make_edits(source: Source, other: Source, rng: np.random.Generator) -> Iterator[Edit]:
    """One edit of each kind; what is put in comes from the other file."""

    def edit(kind: str, after: str, num_edits: int, new_from: int = 0, num_new: int = 0) -> Edit:
        return Edit(kind, source.name, source.text, after, num_edits, (new_from, new_from + num_new))

    def pick(rows: Sequence[Any]) -> Any:
        return rows[int(rng.integers(len(rows)))]

    end = len(source.lines)
    old = pick(source.variables[:5])
    name = pick([f"{old}_value", f"the_{old}", f"renamed{rng.integers(100)}"])
    after, count = re.subn(rf"\b{old}\b", name, source.text)
    first = re.search(rf"\b{old}\b", source.text)
    yield edit("rename", after, count, first.start() if first else 0, len(name))

    at, block = pick(source.functions), other.block(pick(other.functions))
    block += "\n" * (1 if at.indent else 2)
    start = len(source.joined((0, at.start)))
    yield edit("insert", source.joined((0, at.start), block, (at.start, end)), 1, start, len(block))

    gone = pick(source.functions)
    yield edit("delete", source.joined((0, gone.start), (gone.end, end)), 1)

    number = int(rng.integers(len(source.functions)))
    moved = source.functions[number]
    # Before another function than the one that it stands before.
    to = pick([piece for i, piece in enumerate(source.functions) if i not in (number, number + 1)])
    block = source.block(moved) + "\n" * (1 if to.indent else 2)
    if to.start < moved.start:
        after = source.joined((0, to.start), block, (to.start, moved.start), (moved.end, end))
    else:
        after = source.joined((0, moved.start), (moved.end, to.start), block, (to.start, end))
    yield edit("move", after, 2)

    one, another = pick(source.docstrings), pick(other.docstrings)
    yield edit("docstring", source.text.replace(one, another), 1, source.text.index(one), len(another))


def make_all_edits(num_files: int) -> list[Edit]:
    """The pairs as text; the same in every run on one Python."""
    sources = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if MIN_BYTES <= path.stat().st_size <= MAX_BYTES and path.read_bytes().isascii():
            source = Source(path)
            if source.is_editable:
                sources.append(source)
    chosen = sources[:: max(1, len(sources) // num_files)][:num_files]
    rng = np.random.default_rng(SEED)
    # The last file is the first one's other.
    return [edit for i, source in enumerate(chosen) for edit in make_edits(source, chosen[i - 1], rng)]


class Bytes:
    """A token for each byte."""

    def __call__(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids, and where in the text each of them begins."""
        return list(text.encode("ascii")), list(range(len(text)))


class Words:
    """A token for each word, run of whitespace or punctuation mark; ids in the order of sight."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids, and where in the text each of them begins."""
        found = list(_TOKEN.finditer(text))
        return [self._ids.setdefault(match[0], len(self._ids)) for match in found], [match.start() for match in found]


def make_pair(edit: Edit, tokenize: Callable[[str], tuple[list[int], list[int]]]) -> Pair:
    (reference, _), (output, starts) = tokenize(edit.before), tokenize(edit.after)
    is_new = [edit.new[0] <= start < edit.new[1] for start in starts]
    return Pair(edit, np.array(reference, np.int32), np.array(output, np.int32), np.array(is_new, bool))


def make_drafter(mode: str, pair: Pair, ngrams: tuple[int, int]) -> Callable[[np.ndarray, int, int], list[int]]:
    """Drafts for (tokens [reference + output] int32, how many output tokens there are, max_drafts)."""
    num_prompt, (shortest, longest) = len(pair.reference), ngrams
    if mode == "none":
        return lambda tokens, num_output, max_drafts: []
    if mode == "lookup":
        matcher = NgramMatcher(1, num_prompt + len(pair.output), min_ngram_size=shortest, max_ngram_size=longest)
        prompts = np.array([num_prompt])

        def look_up(tokens: np.ndarray, num_output: int, max_drafts: int) -> list[int]:
            history = History(["request"], tokens[None], prompts + num_output, prompts)
            return matcher.match(history, None, np.array([max_drafts])).to_lists()[0]

        return look_up
    text = ReferenceText(pair.reference, edit=mode == "sp_edit 1", min_ngram_size=shortest, max_ngram_size=longest)
    return lambda tokens, num_output, max_drafts: text.draft(
        tokens[num_prompt : num_prompt + num_output], max_drafts
    ).tolist()


@dataclass(frozen=True)
class Replay:
    """Steps to write an output, how many of them begin at a new token, and the seconds that drafting took."""

    pair: Pair
    num_steps: int
    num_new_steps: int
    seconds: float


def replay(pair: Pair, mode: str, num_drafts: int, ngrams: tuple[int, int]) -> Replay:
    """Write the output.

    Raises:
        AssertionError: what comes out is not the output, or there are too many drafts.
    """
    draft = make_drafter(mode, pair, ngrams)
    truth, at = pair.output.tolist(), len(pair.reference)
    # Nothing behind what is there, so that no token can be looked up before its time.
    tokens = np.concatenate([pair.reference, np.full(len(truth), -1, np.int32)])
    output: list[int] = []
    num_steps, num_new_steps, seconds = 0, 0, 0.0
    while len(output) < len(truth):
        start = time.perf_counter()
        drafts = draft(tokens, len(output), num_drafts)
        seconds += time.perf_counter() - start
        if len(drafts) > num_drafts:
            raise AssertionError(f"{mode}: {len(drafts)} drafts, allowed are {num_drafts}")
        done = len(output)
        right = num_right(drafts, truth[done : done + num_drafts])
        output += [*drafts[:right], *truth[done + right : done + right + 1]]
        tokens[at + done : at + len(output)] = output[done:]
        num_steps += 1
        num_new_steps += int(pair.is_new[done])
    if output != truth:
        raise AssertionError(f"{mode}: the replay of {pair.edit.kind} in {pair.edit.file} is not its output")
    return Replay(pair, num_steps, num_new_steps, seconds)


def summary(tokens: str, num_drafts: int, mode: str, kind: str, replays: Sequence[Replay]) -> Result:
    """Several replays as one."""
    pairs = [row.pair for row in replays]
    num_output, num_edits = sum(len(pair.output) for pair in pairs), sum(pair.edit.num_edits for pair in pairs)
    steps = sum(row.num_steps for row in replays)
    known_steps = steps - sum(row.num_new_steps for row in replays)
    ideal = sum(math.ceil(len(pair.output) / (num_drafts + 1)) for pair in pairs) + num_edits
    known_ideal = sum(math.ceil((~pair.is_new).sum() / (num_drafts + 1)) for pair in pairs) + num_edits
    return Result(
        tokens=tokens,
        drafts=num_drafts,
        mode=mode,
        kind=kind,
        pairs=len(pairs),
        output_tokens=num_output,
        edits=num_edits,
        new_tokens=int(sum(pair.is_new.sum() for pair in pairs)),
        steps=steps,
        steps_per_token=steps / num_output,
        excess=(steps - ideal) / num_edits,
        excess_known=(known_steps - known_ideal) / num_edits,
        host_us=1e6 * sum(row.seconds for row in replays) / steps,
    )


def run_setting(tokens: str, pairs: Sequence[Pair], num_drafts: int, ngrams: tuple[int, int]) -> list[Result]:
    """All modes of one tokenisation and K, by kind and in all."""
    results = []
    for mode in MODES:
        replays = [replay(pair, mode, num_drafts, ngrams) for pair in pairs]
        for kind in (*KINDS, "all"):
            chosen = [row for row in replays if kind in (row.pair.edit.kind, "all")]
            results.append(summary(tokens, num_drafts, mode, kind, chosen))
    return results


def goals(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The goal as it reads, and for the known text: name, value, limit, met."""
    rows = []
    for result in results:
        if result.mode != "sp_edit 1" or result.kind != "all":
            continue
        size = (result.tokens, result.drafts)
        kinds = [r for r in results if (r.tokens, r.drafts) == size and r.mode == result.mode and r.kind in KINDS]
        values = {"all text": result.excess, "known text": result.excess_known}
        values["known text, the worst kind"] = max(row.excess_known for row in kinds)
        for name, value in values.items():
            name = f"{result.tokens}, K = {result.drafts}: excess per edit, {name}"
            rows.append({"name": name, "value": value, "limit": GOAL_EXCESS, "met": value <= GOAL_EXCESS})
    return rows


def show(console: Console, results: Sequence[Result]) -> None:
    """Print the tables: steps per output token, and the excess of sp_edit 1."""
    steps = Table(title="engine steps per output token; host microseconds per step of sp_edit 1")
    for name in ("tokens", "K", "edit", *MODES, "host"):
        steps.add_column(name, justify="right")
    excess = Table(title="sp_edit 1: steps beyond the ideal count, per edit")
    for name in ("tokens", "K", "edit", "edits", "output tokens", "new tokens", "steps", "excess", "known text"):
        excess.add_column(name, justify="right", overflow="fold")
    cells: dict[tuple[str, int, str], dict[str, Result]] = {}
    for result in results:
        cells.setdefault((result.tokens, result.drafts, result.kind), {})[result.mode] = result
    for (tokens, num_drafts, kind), modes in cells.items():
        row, name = modes["sp_edit 1"], (tokens, str(num_drafts), kind)
        steps.add_row(*name, *(f"{modes[mode].steps_per_token:.4f}" for mode in MODES), f"{row.host_us:.0f}")
        numbers = (row.edits, row.output_tokens, row.new_tokens, row.steps)
        excess.add_row(*name, *(f"{n:,}" for n in numbers), f"{row.excess:.2f}", f"{row.excess_known:.2f}")
    console.print(steps, excess)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description="Steps to write an edited file, with the file as reference.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--drafts", type=sizes, help="drafts per step; default 4,16,64,128")
    parser.add_argument("--files", type=int, help="default 20")
    parser.add_argument("--ngrams", type=sizes, default=[3, 16], help="shortest and longest n-gram; default 3,16")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args(argv)
    args.drafts = args.drafts or ([4, 16] if args.quick else [4, 16, 64, 128])
    args.files = args.files or (2 if args.quick else 20)
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a replay is wrong."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    edits, (shortest, longest) = make_all_edits(args.files), args.ngrams
    results: list[Result] = []
    try:
        for tokens, tokenize in (("bytes", Bytes()), ("words", Words())):
            pairs = [make_pair(edit, tokenize) for edit in edits]
            for num_drafts in args.drafts:
                results += run_setting(tokens, pairs, num_drafts, (shortest, longest))
    except AssertionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(console, results)
    rows = goals(results)
    for row in rows:
        verdict = "met" if row["met"] else "not met"
        console.print(f"{row['name']}: {row['value']:.2f} (goal {row['limit']}): {verdict}")
    about = environment("numpy", "numba")
    shown = f"{len(edits)} pairs, n-grams of {shortest} to {longest} tokens"
    console.print(f"{shown}; {about['cpu']}, load {about['load_average']:.1f}")
    if args.json:
        report = {"environment": about, "files": args.files, "ngrams": args.ngrams, "goals": rows}
        write_json(args.json, report | {"results": [asdict(result) for result in results]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
