"""The command ``vllm-specplus compare``: what it does, its files, its exit status."""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_specplus.compare import served_command
from vllm_specplus.compare.configurations import Configuration, read_configurations
from vllm_specplus.compare.measure import Plan, measure
from vllm_specplus.compare.measurements import Measurements
from vllm_specplus.compare.processes import RefusedError
from vllm_specplus.compare.prompts import Prompt, check_model, read_prompts
from vllm_specplus.compare.report import can_plot, report_files, write_report
from vllm_specplus.compare.results import RESULT_FILES, UnwritableError, as_data, write_results
from vllm_specplus.compare.tables import print_tables
from vllm_specplus.compare.terminal import INTERRUPTED, NothingMeasuredInterrupt, progress, table_console
from vllm_specplus.compare.workloads import workload


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0; 1 if a configuration failed or gave a wrong text; 2 if the command was refused or cannot write a result; 130
        after Ctrl-C, SIGTERM or SIGHUP.
    """
    try:
        with _interrupted_by_signals():
            if arguments.serve:
                return _run_served(arguments)
            plan = _plan(arguments)
            with _folder(arguments.out) as logs:
                measurements, data = _measure_plan(plan, logs)
                return _report(arguments.out, measurements, data)
    except (RefusedError, UnwritableError) as problem:
        print(problem, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # Nothing was measured, so earlier results stay; or the page is being made, and the results are written.
        return INTERRUPTED


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """What was measured is kept after `kill`, a batch system's end of time, and where a terminal is closed."""

    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def interrupt(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            # To write to a closed terminal is an error.
            with open(os.devnull, "w") as nowhere:
                for descriptor in terminals:
                    os.dup2(nowhere.fileno(), descriptor)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_served(arguments: argparse.Namespace) -> int:
    served_command.check_options(arguments)
    prompts = _prompts(arguments)
    with _folder(arguments.out) as logs:
        code = served_command.run(arguments, prompts)
        # No engine has written any; those of an earlier comparison stay.
        with suppress(OSError):
            logs.rmdir()
        return code


def _prompts(arguments: argparse.Namespace) -> list[Prompt]:
    return read_prompts(arguments.prompts) if arguments.prompts else workload(arguments.workload)


def _plan(arguments: argparse.Namespace) -> Plan:
    if not arguments.config:
        raise RefusedError("--config is needed: a speculative config, or --serve for a running server")
    configurations = [*map(_with_draft_model, read_configurations(arguments.baseline, arguments.config))]
    prompts = _prompts(arguments)
    model = check_model(arguments.model)
    plan = Plan(
        model,
        configurations,
        prompts,
        arguments.concurrency,
        arguments.max_tokens,
        arguments.temperature,
        arguments.repeat,
        tuple(arguments.engine_args),
        arguments.one_at_a_time,
    )
    _check_repeated(plan)
    return plan


def _with_draft_model(configuration: Configuration) -> Configuration:
    """The configuration with its draft model checked, whose ``~`` vLLM would not know."""
    config, named = configuration.config, configuration.draft_model
    if not (config and named):
        return configuration
    found = check_model(named, f"{configuration.name}: ")
    return replace(configuration, config=config | {"model": found}) if config.get("model") == named else configuration


def _check_repeated(plan: Plan) -> None:
    """Refuse configurations that would draft a prompt's answer from the same prompt's answer before."""
    for level in plan.concurrency:
        needed = plan.num_needed(level)
        for configuration in plan.configurations:
            if needed > len(plan.prompts) and configuration.shares_answers:
                raise RefusedError(
                    f"{configuration.name} drafts from all earlier answers, and at --concurrency {level} prompts come "
                    f'again: it needs {needed} prompts, not {len(plan.prompts)}, or "suffix_decoding_scope": "salt"'
                )


@contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """Make the output's folder and that of the logs in it; take away what was made if nothing is measured."""
    logs, made, earlier = out / "logs", None, set()
    try:
        made = next((path for path in reversed((logs, *logs.parents)) if not path.exists()), None)
        earlier = set(logs.iterdir()) if logs.is_dir() else set()
        logs.mkdir(parents=True, exist_ok=True)
        probe = out / ".results.json.part"
        probe.touch()
        probe.unlink()
        for name in (*RESULT_FILES, *report_files()):
            if (out / name).is_dir():
                raise IsADirectoryError(0, f"{name} there is a folder")
    except OSError as problem:
        if made is not None and made.is_dir():
            shutil.rmtree(made)
        raise RefusedError(f"cannot write to {out}: {problem.strerror or problem}") from None
    try:
        yield logs
    except (RefusedError, NothingMeasuredInterrupt):
        if made is not None:
            shutil.rmtree(made)
        else:
            for log in set(logs.iterdir()) - earlier:
                log.unlink()
        raise


def _measure_plan(plan: Plan, logs: Path) -> tuple[Measurements, dict[str, Any]]:
    measurements = Measurements(plan.configurations, plan.concurrency)
    with progress(plan.num_units) as advance:
        measure(plan, measurements, logs, advance)
    return measurements, as_data(plan, measurements)


def _report(out: Path, measurements: Measurements, data: dict[str, Any]) -> int:
    console = table_console()
    said = f"The results are in {out}"
    if not can_plot():
        said += f". matplotlib (the extra plot) draws the plots: python -m vllm_specplus.compare.report {out}"
    try:
        write_results(out, data)
        write_report(out, data)
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    finally:
        print_tables(console, data)
    if measurements.is_interrupted:
        return INTERRUPTED
    return int(bool(measurements.failures or measurements.defective()))
