"""The command ``vllm-specplus compare --serve URL``: running servers in turns, its table and files."""

import argparse
import asyncio
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_specplus.compare.measure import in_places, num_same
from vllm_specplus.compare.processes import RefusedError
from vllm_specplus.compare.prompts import Prompt
from vllm_specplus.compare.report import remove_report
from vllm_specplus.compare.results import origin, write_files
from vllm_specplus.compare.served import ServedModel
from vllm_specplus.compare.speeds import Speeds
from vllm_specplus.compare.terminal import INTERRUPTED, NothingMeasuredInterrupt, progress, table_console
from vllm_specplus.top.server import NoSampleError, Server

_TIMES = ("ttft", "itl", "e2el")
_LISTS = ("errors", "generated_texts")  # of a run, one of each answer
_SHOWN = 24  # characters of a text


@dataclass(frozen=True)
class ServedPlan:
    """What is measured; `repeats` are runs of each server at each level of concurrency."""

    urls: list[str]
    model: str
    api_key: str
    prompts: list[Prompt]
    concurrency: list[int]
    max_tokens: int
    temperature: float
    repeats: int


def run(arguments: argparse.Namespace, prompts: list[Prompt]) -> int:
    """Run the command; the output's folder exists.

    Returns:
        0; 1 if a request failed; 130 after Ctrl-C.

    Raises:
        RefusedError: a server does not answer, or refuses a prompt, before anything is measured.
        NothingMeasuredInterrupt: Ctrl-C came before the first run's end.
    """
    plan = ServedPlan(
        [url.rstrip("/") for url in arguments.serve],
        arguments.model,
        arguments.api_key,
        prompts,
        arguments.concurrency,
        arguments.max_tokens,
        arguments.temperature,
        arguments.repeat,
    )
    runs: list[dict[str, Any]] = []
    is_interrupted = False
    try:
        asyncio.run(measure(plan, runs))
    except KeyboardInterrupt:
        if not runs:
            raise NothingMeasuredInterrupt from None
        is_interrupted = True
    console = table_console()
    different = differing_texts(plan, runs)
    said = recommendation(plan, runs, texts_differ=bool(different))
    try:
        write(arguments.out, plan, runs, different, said, is_interrupted=is_interrupted)
    finally:
        print_runs(console, runs)
    for line in (*different, f"The results are in {arguments.out}", said):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if is_interrupted:
        return INTERRUPTED
    return int(any(each["failed"] for each in runs))


async def measure(plan: ServedPlan, runs: list[dict[str, Any]]) -> None:
    """Add each run to `runs`, as soon as it has ended; every second repeat asks the servers in reverse order."""
    servers = [
        ServedModel(url, plan.model, plan.api_key, max_tokens=plan.max_tokens, temperature=plan.temperature)
        for url in plan.urls
    ]
    try:
        for server in servers:
            most = max(plan.concurrency)
            await server.warm_up(in_places(plan.prompts, most)[:most])
        total = len(plan.urls) * len(plan.concurrency) * plan.repeats
        with progress(total) as advance:
            for repeat in range(plan.repeats):
                for level in plan.concurrency:
                    for server in servers[:: -1 if repeat % 2 else 1]:
                        advance(f"{server.url}, concurrency {level}, repeat {repeat + 1} of {plan.repeats}")
                        fields = await server.run(in_places(plan.prompts, level), level)
                        runs.append({"server": server.url, "max_concurrency": level, "repeat": repeat} | fields)
    finally:
        for server in servers:
            await server.close()


def print_runs(console: Console, runs: list[dict[str, Any]]) -> None:
    """Print a row for each server at each concurrency; each number is the median of its runs."""
    table = Table(title="tokens/s: median (lowest to highest); times in ms: median, 99th percentile", box=SIMPLE)
    table.add_column("concurrency", justify="right")
    # An address that is cut off could be another one's.
    table.add_column("server", overflow="fold")
    for name in ("tokens/s", *_TIMES, "tokens per verification", "failed"):
        table.add_column(name, justify="right")
    for level in dict.fromkeys(each["max_concurrency"] for each in runs):
        for server in dict.fromkeys(each["server"] for each in runs):
            mine = [each for each in runs if (each["max_concurrency"], each["server"]) == (level, server)]
            if mine:
                table.add_row(str(level), escape(server), *_cells(mine))
        table.add_section()
    console.print(table)
    for error in sorted({error for each in runs for error in each["errors"] if error}):
        console.print(f"a request failed: {error}", style="bold", highlight=False, markup=False, soft_wrap=True)


def _cells(runs: list[dict[str, Any]]) -> Iterator[str]:
    def median(name: str) -> float:
        return statistics.median(each[name] for each in runs)

    speeds = [each["output_throughput"] for each in runs]
    yield f"{statistics.median(speeds):,.1f} ({min(speeds):,.1f} to {max(speeds):,.1f})"
    for name in _TIMES:
        yield f"{median(f'median_{name}_ms'):,.1f}, {median(f'p99_{name}_ms'):,.1f}"
    lengths = [each["spec_decode_acceptance_length"] for each in runs if "spec_decode_acceptance_length" in each]
    yield f"{statistics.median(lengths):.2f}" if lengths else "-"
    yield str(sum(each["failed"] for each in runs))


def recommendation(plan: ServedPlan, runs: list[dict[str, Any]], *, texts_differ: bool) -> str:
    """One sentence: which server to use, and how sure that is. One whose requests failed is not recommended."""
    if len(plan.urls) == 1:
        return "One server has no rival: name another one with --serve, or give --config instead."
    speeds: dict[tuple[str, int], dict[int, float]] = {}
    for each in runs:
        by_repeat = speeds.setdefault((each["server"], each["max_concurrency"]), {})
        by_repeat[each["repeat"]] = each["output_throughput"]
    failed = {each["server"] for each in runs if each["failed"]}
    fit = [url for url in plan.urls if url not in failed]
    advice = Speeds(speeds).advice(fit, plan.concurrency, plan.urls[0])
    if advice is None:
        return "No server can be recommended: no two of them answered all requests."
    return f"{advice.said}; their greedy texts differ." if texts_differ else f"{advice.said}."


def differing_texts(plan: ServedPlan, runs: list[dict[str, Any]]) -> list[str]:
    """A line for each server and concurrency with greedy texts that the first server gave in no repeat."""
    first, *others = plan.urls
    lines = []
    for level in plan.concurrency if plan.temperature == 0 else ():
        names = [prompt.name for prompt in in_places(plan.prompts, level)]
        expected = _texts(runs, first, level)
        for url in others:
            pairs = [pair for pair in zip(names, expected, _texts(runs, url, level), strict=False) if all(pair[1:])]
            different = [(name, min(known), min(given - known)) for name, known, given in pairs if given - known]
            if different:
                name, known, new = different[0]
                lines.append(
                    f"{url} gives other greedy texts than {first} at concurrency {level}: {len(different)} of "
                    f"{len(pairs)}, first for prompt {name}, {_first_difference(known, new)}"
                )
    return lines


def _texts(runs: list[dict[str, Any]], server: str, level: int) -> list[set[str]]:
    """The texts that a server has given at each place of the prompts."""
    mine = [each for each in runs if (each["server"], each["max_concurrency"]) == (server, level)]
    answers = [zip(each["generated_texts"], each["errors"], strict=True) for each in mine]
    return [{text for text, error in place if not error} for place in zip(*answers, strict=True)]


def _first_difference(expected: str, found: str) -> str:
    at = num_same(expected, found)
    same, wanted, given = expected[:at][-_SHOWN:], expected[at : at + _SHOWN], found[at : at + _SHOWN]
    return f"behind {same!r}: {given!r} and not {wanted!r}"


def write(
    folder: Path,
    plan: ServedPlan,
    runs: list[dict[str, Any]],
    different: list[str],
    said: str,
    *,
    is_interrupted: bool,
) -> None:
    """Write ``results.json`` and ``results.csv``, each in one piece. The page of an earlier comparison goes."""
    settings = {
        "servers": plan.urls,
        "model_id": plan.model,
        "num_prompts": len(plan.prompts),
        "concurrency": plan.concurrency,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "repeat": plan.repeats,
    }
    columns = [name for name in dict.fromkeys(name for each in runs for name in each) if name not in _LISTS]
    data = {"settings": settings, "interrupted": is_interrupted, "runs": runs, "differing_texts": different}
    data["recommendation"] = said
    write_files(folder, origin() | data, columns, runs)
    remove_report(folder)


def check_options(arguments: argparse.Namespace) -> None:
    """Raise RefusedError for options that go with engines of the command's own alone."""
    engine_options = {
        "--config": arguments.config,
        "--baseline": arguments.baseline != "none",
        "--engine-args": arguments.engine_args,
        "--one-at-a-time": arguments.one_at_a_time,
    }
    for name, is_given in engine_options.items():
        if is_given:
            raise RefusedError(f"{name} is not allowed with --serve, whose servers run already")
    for url in arguments.serve:
        try:
            Server(url, arguments.api_key)
        except NoSampleError as problem:
            raise RefusedError(f"--serve: {problem}") from None
    if len({url.rstrip("/") for url in arguments.serve}) < len(arguments.serve):
        raise RefusedError("--serve names the same server twice")
