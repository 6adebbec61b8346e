"""Six ways of drafting on some prompts, in one table; `bash ci/demo.sh` runs it on models of the project's own.

    python examples/demo.py MODEL [--eagle HEAD] [--json FILE] [--logs FOLDER]

MODEL has an MTP head and continues texts, or, with an EAGLE-3 head, answers as a chat model. Each engine runs in a
process of its own, whose output goes to a log file. All stay up and take turns. Every way of drafting must give the
text of the engine without speculation; the exit code says whether it did.
"""

import argparse
import bz2
import csv
import inspect
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_specplus.compare.prompts import Prompt
from vllm_specplus.compare.workloads import workload

MAX_TOKENS = 200
REPEATS = 3
PLAIN = "no speculation"
NGRAM = {"max_ngram_size": 5, "min_ngram_size": 2}
# Drafts of a step, at most. It leaves out those that do not pay; a fixed way would verify them all.
ADAPTIVE_CEILING = 16
MOST_POSITIONS = 5  # whose shares of accepted drafts are shown
# What one engine does, in units of the progress bar: a start takes about as long as ten texts.
START_UNITS = 10
# Between two engines' turns: threads of the one before may wait for work, and so keep a core busy.
TURN_SECONDS = 0.3
HOW_TO_READ = (
    "* marks the fastest way of each prompt. A step is one pass of the target: drafting saves steps. tokens/s also "
    "pays for making and checking the drafts. That is dear beside the steps of a tiny model on a CPU, and far cheaper "
    "beside those of a large model."
)

Results = dict[str, dict[str, Any]]
Answer = tuple[list[int], float, list[int]]


class EngineFailedError(Exception):
    """An engine's process ended without results."""


@dataclass(frozen=True)
class Demo:
    """What is compared.

    Attributes:
        configs: speculative configs by their names in the table; that of `PLAIN` is None.
        prompts: by their names in the table.
    """

    configs: dict[str, dict[str, Any] | None]
    prompts: dict[str, Prompt]

    @property
    def units(self) -> int:
        """What one engine does, in units of the progress bar."""
        return START_UNITS + len(self.prompts) * (1 + REPEATS)


def of_mtp() -> Demo:
    """Texts to continue: a library file, a file to repeat with one name changed, and a JSON list.

    The tiny model has not been trained on either of the two files.
    """
    hybrid = {"method": "mtp", "num_speculative_tokens": 5, "mtp_strategy": "with_ngram"} | NGRAM
    configs = {
        PLAIN: None,
        "mtp": {"method": "mtp", "num_speculative_tokens": 1},
        "ngram": {"method": "ngram", "num_speculative_tokens": 5} | NGRAM,
        "hybrid, append": hybrid | {"adaptive": False},
        "hybrid, override": hybrid | {"match_override_len": 4},
        "hybrid, adaptive": hybrid | {"num_speculative_tokens": ADAPTIVE_CEILING},
    }
    function = inspect.getsource(bz2.open)
    renamed = function.replace("filename", "path")
    rows = [{"id": i, "name": f"item {i}", "price": 10 + i, "in_stock": True} for i in range(8)]
    prompts = {
        "continue a file": inspect.getsource(csv)[:1500],
        "repeat, one name changed": f"{function}\n\n{renamed[:200]}",
        "a JSON list": json.dumps(rows, indent=1)[:-2] + ",\n",
    }
    return Demo(configs, {name: Prompt(name, text) for name, text in prompts.items()})


def of_eagle(head: str) -> Demo:
    """Questions to a chat model. What the plugin drafts for has the old text of the edit as OpenAI's ``prediction``."""
    eagle = {"method": "eagle3", "model": head}
    hybrid = eagle | {"num_speculative_tokens": 5, "num_model_steps": 2, "mtp_strategy": "with_ngram"} | NGRAM
    # Without memory of other requests, since each prompt is repeated.
    suffix = {"method": "suffix", "num_speculative_tokens": 5, "suffix_decoding_max_cached_requests": 0}
    configs = {
        PLAIN: None,
        "eagle": eagle | {"num_speculative_tokens": 2},
        "ngram": {"method": "ngram", "num_speculative_tokens": 5} | NGRAM,
        "suffix": suffix,
        "hybrid, append": hybrid | {"adaptive": False},
        "hybrid, adaptive": hybrid | {"num_speculative_tokens": ADAPTIVE_CEILING},
    }
    prompts = {
        "a chat": workload("chat")[1],
        "code to continue": workload("code")[0],
        "an edit, with a prediction": workload("edit")[0],
        "a list into JSON": workload("json")[0],
    }
    return Demo(configs, prompts)


def serve(model: str, demo: Demo, name: str, parent: Connection) -> None:
    """Start one engine, tell the parent, and answer each prompt that it names, until it names None.

    An answer is its token ids, the seconds that it took, and what it added to each of `counters`.

    Args:
        model: the model's folder.
        demo: what is compared.
        name: of the engine's speculative config.
        parent: the other end.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        speculative_config=demo.configs[name],
        dtype="float32",  # a token's choice does not depend on how many are computed at once
        max_model_len=4096,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=512 << 20,
        disable_log_stats=False,
    )

    def ask(prompt: Prompt) -> list[Any]:
        extra = {"prediction": {"type": "content", "content": prompt.reference}} if prompt.reference else None
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=not prompt.messages, extra_args=extra)
        if prompt.messages:
            return llm.chat(list(prompt.messages), params, use_tqdm=False)
        return llm.generate([prompt.text], params, use_tqdm=False)

    parent.send("has started")
    while (asked := parent.recv()) is not None:
        before, start = counters(llm), time.perf_counter()
        answers = ask(demo.prompts[asked])
        seconds = time.perf_counter() - start
        counts = [b - a for a, b in zip(before, counters(llm), strict=True)]
        parent.send((list(answers[0].outputs[0].token_ids), seconds, counts))


def summary(answers: list[Answer]) -> dict[str, Any]:
    """What the answers of one engine to one prompt show. The first is not measured.

    A new engine is slow at first, and an adaptive one has to learn what its passes bring.
    """
    token_ids = answers[0][0]
    measured = answers[1:]
    steps, drafts, accepted, *by_position = (sum(numbers) for numbers in zip(*(a[2] for a in measured), strict=True))
    return {
        "token_ids": token_ids,
        "is_always_the_same": all(again == token_ids for again, *_ in measured),
        "tokens_per_second": sorted(len(again) / seconds for again, seconds, _ in measured),
        "steps_per_100_tokens": 100 * steps / sum(len(again) for again, *_ in measured),
        "tokens_per_verification": 1 + accepted / drafts if drafts else 1.0,
        "accepted_by_position": [n / drafts if drafts else 0.0 for n in by_position],
    }


def counters(llm: Any) -> list[int]:
    """vLLM's counts so far: steps, verifications, accepted drafts, and accepted drafts by position."""
    found = {m.name.removeprefix("vllm:"): m for m in llm.get_metrics()}
    counts = [found["iteration_tokens_total"].count]
    if "spec_decode_num_drafts" not in found:
        return [*counts, 0, 0]
    counts += [found[f"spec_decode_num_{name}"].value for name in ("drafts", "accepted_tokens")]
    return [*map(int, counts), *found["spec_decode_num_accepted_tokens_per_pos"].values]


def run_in_child(model: str, demo: Demo, name: str, log: Path, parent: Connection) -> None:
    """Serve the parent; all that anything here prints goes to the log."""
    with log.open("wb") as file:
        # The descriptors themselves, since libraries in C++ and vLLM's own processes print too.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    serve(model, demo, name, parent)


class Child:
    """An engine in a process of its own, since a process can start only one engine once numba is loaded.

    Its methods raise EngineFailedError with the end of the engine's log.
    """

    def __init__(self, model: str, demo: Demo, name: str, logs: Path):
        self._name = name
        self._log = logs / f"{name.replace(', ', '-').replace(' ', '-')}.log"
        context = get_context("spawn")
        self._connection, childs = context.Pipe()
        arguments = model, demo, name, self._log, childs
        self._process = context.Process(target=run_in_child, args=arguments, daemon=True)
        self._process.start()
        # Or the pipe stays open when the child has ended.
        childs.close()

    def wait_until_started(self) -> None:
        """Wait until the engine has started."""
        self._receive()

    def answer(self, prompt: str) -> Answer:
        """Let the engine answer a prompt; see `serve`."""
        self._send(prompt)
        return self._receive()

    def end(self) -> None:
        """Let the engine end, and wait for that."""
        self._send(None)
        self._process.join()

    def _send(self, message: str | None) -> None:
        with suppress(BrokenPipeError):  # its end is told by `_receive`
            self._connection.send(message)

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
            code = self._process.exitcode
            message = (
                f"error: the engine of {self._name!r} ended with exit code {code}; its whole output is in {self._log}"
            )
            raise EngineFailedError(f"{end}\n\n{message}") from None


def measure_all(model: str, demo: Demo, logs: Path, console: Console) -> dict[str, Results]:
    """Start all engines, two at a time, and let them answer in turns; where there is no terminal, lines tell of it.

    A machine is faster at one time than at another, which turns even out. Every second round is backwards.
    """
    columns = SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=demo.units * len(demo.configs))

        def tell(doing: str) -> None:
            progress.update(task, description=doing)
            if not console.is_terminal:
                console.print(doing, highlight=False)

        children: dict[str, Child] = {}
        for names in batched(demo.configs, 2):
            tell(f"starts {' and '.join(names)}")
            children |= {name: Child(model, demo, name, logs) for name in names}
            for name in names:
                children[name].wait_until_started()
                progress.update(task, advance=START_UNITS)
        answers: dict[str, dict[str, list[Answer]]] = {name: {p: [] for p in demo.prompts} for name in children}
        for i_round in range(1 + REPEATS):
            tell(f"round {i_round} of {REPEATS}" if i_round else "warms up")
            for name in list(children)[:: -1 if i_round % 2 else 1]:
                time.sleep(TURN_SECONDS)
                for prompt in demo.prompts:
                    answers[name][prompt].append(children[name].answer(prompt))
                    progress.update(task, advance=1)
        for child in children.values():
            child.end()
    return {name: {prompt: summary(found) for prompt, found in of.items()} for name, of in answers.items()}


def batched(names: Iterable[str], size: int) -> Iterator[list[str]]:
    """The names, `size` at a time."""
    rest = iter(names)
    while batch := list(islice(rest, size)):
        yield batch


def report(results: dict[str, Results], console: Console) -> bool:
    """Print the table; return whether every text equals the one without speculation."""
    table = Table(title=f"greedy, up to {MAX_TOKENS} tokens, median (min to max) of {REPEATS} runs", box=SIMPLE)
    table.add_column("prompt\n  drafting", no_wrap=True)
    for column in (
        "tokens/s",
        "steps per\n100 tokens",
        "tokens per\nverification",
        "% accepted\nby position",
        "same\ntext",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    equal = True
    for prompt, plain in results[PLAIN].items():
        speeds = {name: statistics.median(result[prompt]["tokens_per_second"]) for name, result in results.items()}
        fastest = max(speeds, key=lambda name: speeds[name])
        table.add_row(prompt)
        for name, result in results.items():
            mine = result[prompt]
            same = mine["token_ids"] == plain["token_ids"] and mine["is_always_the_same"]
            equal &= same
            low, *_, high = mine["tokens_per_second"]
            table.add_row(
                f"  {name}",
                f"{'* ' if name == fastest else ''}{speeds[name]:.0f} ({low:.0f} to {high:.0f})",
                f"{mine['steps_per_100_tokens']:.0f}",
                f"{mine['tokens_per_verification']:.2f}",
                shown_shares(mine["accepted_by_position"]),
                "yes" if same else "NO",
                style="bold" if name == fastest else None,
            )
        table.add_section()
    console.print(table)
    console.print(HOW_TO_READ, highlight=False)
    return equal


def shown_shares(shares: list[float]) -> str:
    """Shares as percentages, the first few of them."""
    first = " ".join(f"{100 * share:.0f}" for share in shares[:MOST_POSITIONS])
    return f"{first} ..." if len(shares) > MOST_POSITIONS else first or "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a model, with an MTP head if there is no --eagle")
    parser.add_argument("--eagle", metavar="HEAD", help="folder of an EAGLE-3 head for the model, which then answers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="for the engines' logs (default: a new one)")
    args = parser.parse_args()
    demo = of_eagle(args.eagle) if args.eagle else of_mtp()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="specplus-demo-"))
    logs.mkdir(parents=True, exist_ok=True)

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Wide enough for the table where the output is no terminal.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(f"The engines' logs are in {logs}", highlight=False, soft_wrap=True)
    try:
        results = measure_all(args.model, demo, logs, console)
    except EngineFailedError as error:
        print(error, file=sys.stderr)
        return 1

    equal = report(results, console)
    if args.json:
        args.json.write_text(json.dumps({"configs": demo.configs, "results": results}, indent=1) + "\n")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
