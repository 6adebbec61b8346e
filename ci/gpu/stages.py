"""The stages, most valuable first: their commands, their time limits, and how they are run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_LOG_LINES = 60
# For all stages, a run without a GPU; it is only to end.
_DRY_LIMIT = 900.0
# For a command behind one that took all the time of its stage: it shows what that one had written until then.
_LEAST_SECONDS = 10.0


@dataclass(frozen=True)
class Stage:
    """Commands that run one after the other, also if one fails.

    limit: seconds of all of them together. What is left for the last ones may be less than they are given.
    """

    name: str
    limit: float
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Outcome:
    stage: str
    ok: bool
    seconds: float
    problems: list[str]


def stages(out: Path, packed: Path | None, site: Path, model: Path, dry: bool) -> list[Stage]:
    """What there is to run; without a GPU in tiny sizes.

    Args:
        out: takes the results.
        packed: the folder that ``pack.py`` made, None if dry.
        site: the folder of Python packages that ``prepare.py`` made.
        model: the folder of the tiny model.
        dry: there is no GPU.
    """

    def script(path: str, *args: str) -> tuple[str, ...]:
        return (sys.executable, str(_ROOT / path), *args)

    csv, report = str(out / "verify.csv"), str(out / "verify.json")
    sizes = ["--batches", "1,64", "--drafts", "4", "--vocabs", "151936", "--vllm", str(site)]
    if packed:
        commit = json.loads((packed / "pack.json").read_text())["commit"]
        sizes += ["--git-commit", commit] if commit else []
    if dry:
        sizes = ["--tiny", "--batches", "2", "--drafts", "1", "--settings", "T=0.8", "--logits", "peaked"]
    verify = [script("benchmarks/verify.py", *sizes, "--csv", csv, "--json", report)]
    verify.append(script("benchmarks/plot.py", csv, "--drafts", "1" if dry else "4"))
    static = packed / "static.json" if packed else None
    if static and not static.exists():
        print("verify: no static.json was packed, so nothing stands beside the measured times", flush=True)
    elif static:
        verify.append(script("benchmarks/modelled.py", str(static), report, "--json", str(out / "modelled.json")))
    flags = ["--dry"] if dry else []
    step = script("ci/gpu/engines.py", "--steps", str(model), str(out / "step.json"), *flags)
    engine = script("ci/gpu/engines.py", "--speed", str(model), str(out / "engine.json"), *flags)
    launches = str((packed or model.parent) / "launches.pickle")
    return [
        Stage("kernels", 100.0, (script("ci/gpu/kernel_cases.py", str(out / "kernels.json"), *flags),)),
        Stage("drafting", 40.0, (script("ci/gpu/launches.py", launches, str(out / "drafting.json"), *flags),)),
        Stage("verify", 90.0, tuple(verify)),
        Stage("step", 85.0, (step,)),
        Stage("engine", 135.0, (engine,)),
    ]


def run_stage(stage: Stage, out: Path, env: Mapping[str, str], dry: bool) -> Outcome:
    """Run a stage and write its log; a command that is not done at the limit is ended, with all that it has started.

    The others still run, for a short while.
    """
    began, problems = time.monotonic(), []
    limit = _DRY_LIMIT if dry else stage.limit
    with (out / f"{stage.name}.log").open("wb") as log:
        for command in stage.commands:
            name, left = Path(command[1]).name, limit - (time.monotonic() - began)
            process = subprocess.Popen(command, env=env, cwd=_ROOT, stdout=log, stderr=log, start_new_session=True)
            try:
                code = process.wait(max(left, _LEAST_SECONDS))
                if code != 0:
                    problems.append(f"{name} exited with {code}")
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(3)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                problems.append(f"{name} was not done after {limit:.0f} s")
    return Outcome(stage.name, not problems, round(time.monotonic() - began, 1), problems)


def run_all(
    chosen: list[Stage],
    out: Path,
    env: Mapping[str, str],
    dry: bool,
    others_failed: Callable[[], list[str]] = list,
) -> list[Outcome]:
    """Run stages, and write what has come out so far after each; last of all what failed, with the end of its log.

    others_failed: what has failed beside them, asked at the end.
    """
    outcomes: list[Outcome] = []
    for stage in chosen:
        print(f"{stage.name}: starts", flush=True)
        outcomes.append(run_stage(stage, out, env, dry))
        last = outcomes[-1]
        print(f"{last.stage}: {'ok' if last.ok else 'FAILED'} in {last.seconds} s", flush=True)
        (out / "outcomes.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    failed = others_failed()
    failed += [end_of_log(out, each.stage, "; ".join(each.problems)) for each in outcomes if not each.ok]
    if missed := missed_goals(out):
        failed.append("\n".join(["===== goals that were missed", *missed]))
    (out / "failed.txt").write_text("\n\n".join(failed) + "\n" if failed else "nothing failed\n")
    print((out / "failed.txt").read_text(), end="")
    return outcomes


def end_of_log(out: Path, name: str, what: str) -> str:
    """What failed under a name, and the last lines of its log."""
    lines = (out / f"{name}.log").read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join([f"===== {name}: {what}", *lines])


def missed_goals(out: Path) -> list[str]:
    """The goals that `verify.json` and `step.json` say were missed, as far as the files are there."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((out / name).read_text()) if (out / name).exists() else {}

    missed = [
        f"{goal['name']}: {goal['value']:.2f}, goal {goal['limit']}"
        for goal in read("verify.json").get("goals", [])
        if not goal["met"]
    ]
    return missed + [
        f"{name}: {found['beyond']:.1f} launches and copies a step beyond stock, goal {found['most_beyond']}"
        for name, found in read("step.json").items()
        if found.get("met") is False
    ]
