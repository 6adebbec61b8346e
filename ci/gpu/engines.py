"""Whole vLLM engines on Model Runner V2, each in a process of its own: equal greedy texts, then what they cost.

    python ci/gpu/engines.py (--steps | --speed) MODEL JSON [--dry]

All start at once. Those that have their texts wait, and are measured one after the other. An engine that fails or is
late leaves the others alone; its log is printed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs import AS_MANY_PASSES, CONFIGS, DRY_SPEED, DRY_STEPS, MOST_BEYOND, NONE, OF_SPEED, OF_STEPS
from rich.console import Console
from rich.table import Table

START_SECONDS, MEASURE_SECONDS = {"--steps": 40, "--speed": 85}, 12
DRY_SECONDS = 600
LOG_LINES = 40
# The least share of a batch's texts that are as without speculation. Rounding depends on the batch, and may turn a few.
LEAST_SAME = 0.9


class Child:
    """An engine's process and files."""

    def __init__(self, name: str, model: Path, folder: Path, options: list[str]) -> None:
        self.name, self._folder = name, folder
        self.log = folder / f"{name}.log"
        script = str(Path(__file__).parent / "engine.py")
        with self.log.open("wb") as file:
            command = [sys.executable, script, name, str(model), str(folder), *options]
            self._process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    @property
    def is_ready(self) -> bool:
        return self._file("ready").exists()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def measure(self, seconds: float) -> dict[str, Any] | None:
        """Let it measure; its results, or None if there are none in time."""
        self._file("go").touch()
        end = time.monotonic() + seconds
        while not self._file("json").exists():
            if self.has_ended or time.monotonic() > end:
                return None
            time.sleep(0.05)
        return json.loads(self._file("json").read_text())

    def stop(self) -> None:
        """End it and all that it has started."""
        if not self.has_ended:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end_of_log(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def _file(self, ending: str) -> Path:
        return self._folder / f"{self.name}.{ending}"


def run(
    names: list[str], measured: tuple[str, ...], model: Path, kind: str, dry: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and results of each engine in turn; `error` says that it has none."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for name in names:
            options = [kind] if name in measured else []
            children.append(Child(name, model, Path(folder), options + (["--dry"] if dry else [])))
        try:
            end = time.monotonic() + (DRY_SECONDS if dry else START_SECONDS[kind])
            while time.monotonic() < end and not all(c.is_ready or c.has_ended for c in children):
                time.sleep(0.1)
            for child in children:
                found = child.measure(DRY_SECONDS if dry else MEASURE_SECONDS) if child.is_ready else None
                child.stop()
                yield child.name, found or {"error": child.end_of_log()}
        finally:
            for child in children:
                child.stop()


def beyond(name: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a step of an engine launches and copies beyond one with as many passes, and its goal; {} if unknown."""
    steps = [results.get(each, {}).get("steps") for each in (name, AS_MANY_PASSES)]
    if name not in MOST_BEYOND or None in steps:
        return {}
    own, others = (each["launches_per_step"] + each["copies_per_step"] for each in steps)
    return {"beyond": own - others, "most_beyond": MOST_BEYOND[name], "met": own - others <= MOST_BEYOND[name]}


def compare_texts(rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> None:
    """Enter in each row of speeds how many of its texts are as without speculation; null if that is unknown."""
    others = {(row["batch"], row["prompts"]): row["texts"] for row in base}
    for row in rows:
        texts, plain = row["texts"], others.get((row["batch"], row["prompts"]))
        row["same_texts"] = None
        if texts is not None and plain is not None:
            row["same_texts"] = sum(one == other for one, other in zip(texts, plain, strict=True))


def show_speeds(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """Print the speeds of all engines by batch, also as multiples of the speed without speculation."""
    table = Table(title="tokens/s, the best of a few runs")
    for name in ("batch", "prompts", "drafting", "tokens/s", "over none", "steps per 100 tokens", "same texts"):
        table.add_column(name, justify="left" if name in ("prompts", "drafting") else "right")
    rows = [(row, name) for name, found in results.items() for row in found.get("speed", [])]
    places = list(dict.fromkeys((row["batch"], row["prompts"]) for row, _ in rows))
    plain = {(row["batch"], row["prompts"]): row["tokens_per_second"] for row, name in rows if name == NONE}
    for place in places:
        for row, name in rows:
            if (row["batch"], row["prompts"]) == place:
                table.add_row(str(place[0]), place[1], name, *cells(row, plain.get(place)))
        table.add_section()
    console.print(table)


def cells(row: dict[str, Any], plain: float | None) -> list[str]:
    """The numbers of a row of the table."""
    speed = row["tokens_per_second"]
    if speed is None:
        return ["no time"]
    same = "" if row["same_texts"] is None else f"{row['same_texts']} of {len(row['texts'])}"
    return [f"{speed:,.0f}", f"{speed / plain:.2f}" if plain else "", f"{row['steps_per_100_tokens']:.0f}", same]


def problem(found: dict[str, Any]) -> str | None:
    """What is wrong with an engine's results; None if nothing is."""
    if "error" in found:
        return f"FAILED\n{found['error']}\n"
    if found["same_text"] is False:
        return "FAILED: another text than without speculation"
    # Then equal texts would show little.
    if found.get("accepted") == 0:
        return "FAILED: no draft was accepted"
    for row in found.get("speed", []):
        where = f"batch {row['batch']}, {row['prompts']}"
        if row["tokens_per_second"] is None:
            return f"FAILED: {where}: no time was left to measure it"
        same, number = row["same_texts"], len(row["texts"])
        if same is not None and same < LEAST_SAME * number:
            return f"FAILED: {where}: only {same} of {number} texts are as without speculation"
    return None


def main() -> int:
    """Write and print the results; 1 if there is a problem with one of the engines."""
    parser = argparse.ArgumentParser(description="Greedy equality and cost of whole engines.")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--steps", action="store_const", const="--steps", dest="kind")
    kind.add_argument("--speed", action="store_const", const="--speed", dest="kind")
    parser.add_argument("model", type=Path)
    parser.add_argument("json", type=Path)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    of_steps = args.kind == "--steps"
    measured = OF_STEPS if of_steps else OF_SPEED
    if args.dry:
        measured = DRY_STEPS if of_steps else DRY_SPEED
    names = list(measured if of_steps or args.dry else CONFIGS)
    # An exit ends the engines too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results: dict[str, dict[str, Any]] = {}
    for name, found in run(names, measured, args.model, args.kind, args.dry):
        results[name] = found
        base = results.get(NONE, {}).get("texts")
        if "error" not in found:
            # Null where there is nothing to compare with. The engine without speculation is the first.
            found["same_text"] = None if base is None else found["texts"] == base
            found |= beyond(name, results)
            compare_texts(found.get("speed", []), results.get(NONE, {}).get("speed", []))
            print(name, {key: value for key, value in found.items() if key not in ("texts", "speed")}, flush=True)
        if said := problem(found):
            print(f"{name}: {said}", flush=True)
        args.json.write_text(json.dumps(results, indent=1))
    if not of_steps:
        show_speeds(Console(width=100), results)
    return int(any(problem(found) for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
