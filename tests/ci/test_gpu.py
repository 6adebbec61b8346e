"""`ci/gpu.sh` as far as a machine without a GPU can tell: what it packs, that every stage runs through, and that what
fails is said."""

import importlib.util
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
from argparse import Namespace
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ci" / "gpu"
sys.path.append(str(FOLDER))
import configs  # noqa: E402
import engines  # noqa: E402
import kernel_cases  # noqa: E402
import launches  # noqa: E402
import pack  # noqa: E402
import prepare  # noqa: E402
from stages import _LEAST_SECONDS, Stage, run_all, stages  # noqa: E402

MOST_SECONDS = 9 * 60
STAGES = ("kernels", "drafting", "verify", "step", "engine")

# Imports what an engine on a GPU imports. What asks for the GPU itself is answered for it.
AS_ON_A_GPU = """
import types
import torch
properties = types.SimpleNamespace(multi_processor_count=132, major=9, minor=0, total_memory=80 << 30, name="GPU")
torch.cuda.get_device_properties = lambda *args: properties
torch.cuda.get_device_capability = lambda *args: (9, 0)
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
import vllm.platforms
import vllm.platforms.cuda
vllm.platforms._current_platform = vllm.platforms.cuda.NonNvmlCudaPlatform()
import vllm.compilation.backends
import vllm.model_executor.models.mimo_mtp
import vllm.v1.attention.backends.triton_attn
import vllm.v1.worker.gpu.model_runner
import vllm.v1.worker.gpu_worker
from importlib.metadata import version
print(vllm.__file__, version("vllm"))
out, x = torch.empty(3, 4), torch.randn(3, 8)
torch.ops._C.silu_and_mul(out, x)
assert torch.equal(out, torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
"""


def command_line():
    """The module of the command line, which is named as the interpreter wants it."""
    spec = importlib.util.spec_from_file_location("gpu_command_line", FOLDER / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpu(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(ROOT / "ci" / "gpu.sh"), *args], capture_output=True, text=True)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack") / "pack"
    static = folder.with_name("static.json")
    static.write_text("{}")
    done = gpu("--pack", str(folder), "--static", str(static))
    assert done.returncode == 0, done.stderr
    return folder


def test_the_pack_is_small_and_for_the_other_machine(packed: Path) -> None:
    files = [path for path in packed.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 60 << 20
    names = [path.name for path in (packed / "wheels").iterdir()]
    assert all(name.endswith("any.whl") or "cp312" in name or "abi3" in name for name in names)
    wanted = [line for line in (FOLDER / "wheels.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(names) == len(wanted)
    with tarfile.open(packed / "vllm.tar.gz") as archive:
        members = archive.getnames()
    assert "vllm/v1/worker/gpu/model_runner.py" in members
    assert not [name for name in members if name.endswith((".so", ".pyc"))]
    assert {path.name for path in packed.iterdir()} == {
        *("wheels", "sources", "model", "launches.pickle", "vllm.tar.gz", "pack.json", "static.json")
    }


@pytest.mark.slow
def test_vllms_python_files_are_enough_to_import_an_engine(packed: Path, tmp_path: Path) -> None:
    """With the stand-in for compiled parts; without it they are not."""
    site = tmp_path / "site"
    few = tmp_path / "few"
    (few / "wheels").mkdir(parents=True)
    for name in ("vllm.tar.gz", "pack.json"):
        (few / name).symlink_to(packed / name)
    (wheel,) = (packed / "wheels").glob("diskcache-*.whl")
    (few / "wheels" / wheel.name).symlink_to(wheel)
    prepare.prepare(few, site)
    path = os.pathsep.join(map(str, (site, ROOT, ROOT / "tests" / "triton_cpu")))
    env = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", AS_ON_A_GPU], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    where, version = done.stdout.split()[-2:]
    assert where.startswith(str(site))
    assert version == pack.vllm_version()
    (site / "vllm" / "_C_stable_libtorch.py").write_text("")
    done = subprocess.run([sys.executable, "-c", AS_ON_A_GPU], env=env, capture_output=True, text=True)
    assert done.returncode != 0


def test_a_pack_that_is_too_large_or_not_new_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(pack.PackError, match="is not empty"):
        pack.pack(tmp_path)
    monkeypatch.setattr(pack, "fetch", lambda *args: None)
    monkeypatch.setattr(pack, "make_trained", lambda folder: None)
    monkeypatch.setattr(pack, "MOST_BYTES", 1 << 20)
    with pytest.raises(pack.PackError, match="MiB; allowed: 1"):
        pack.pack(tmp_path / "new")


def test_every_stage_runs_through_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = gpu(str(out), "--dry")
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((out / "outcomes.json").read_text())
    assert [(o["stage"], o["ok"]) for o in outcomes] == [(n, True) for n in STAGES]
    assert (out / "failed.txt").read_text() == "nothing failed\n"
    kernels = json.loads((out / "kernels.json").read_text())
    assert (kernels["cases"], kernels["wrong"], kernels["groups_left"]) == (kernel_cases.DRY_CASES, 0, 0)
    drafting = json.loads((out / "drafting.json").read_text())
    assert drafting["launches"] > drafting["wrong"] == drafting["variants_left"] == 0
    assert json.loads((out / "verify.json").read_text())["results"]
    assert (out / "verify.svg").exists()
    assert json.loads((out / "step.json").read_text())["hybrid"]["steps"]["host_us"]["execute_model"] > 0
    engine = json.loads((out / "engine.json").read_text())
    assert set(engine) == set(configs.DRY_SPEED)
    for found in engine.values():
        assert found["same_text"] is True
        assert tuple(row["batch"] for row in found["speed"]) == configs.DRY_BATCHES
        for row in found["speed"]:
            assert row["tokens_per_second"] > 0
            assert row["same_texts"] == len(row["texts"]) == (1 if row["batch"] == 1 else 2 * row["batch"])
    log = (out / "engine.log").read_text()
    assert all(
        re.search(rf"^│ +{batch} │.* {name} ", log, re.MULTILINE) for batch in configs.DRY_BATCHES for name in engine
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either OUT or --pack DIR"),
        (["out", "--pack", "dir"], "give either OUT or --pack DIR"),
        (["out"], "OUT goes with either --with DIR or --dry"),
        (["out", "--dry", "--with", "dir"], "OUT goes with either --with DIR or --dry"),
        (["out", "--with", "nowhere"], "nowhere: that is no folder that --pack made"),
        (["out", "--dry", "--static", "file"], "--static goes with --pack"),
        (["--pack", "dir", "--static", "nowhere"], "--static nowhere: there is no such file"),
        (["out", "--dry", "--stages", "kernels,speed"], "speed; allowed: kernels, drafting, verify, step, engine"),
        ([str(ROOT / "ci"), "--dry"], "is not empty; OUT is a new folder"),
    ],
)
def test_bad_arguments_are_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command_line().parse_args(args)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_stage_that_fails_or_is_late_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages._LEAST_SECONDS", 5.0)
    python = sys.executable

    def stage(name: str, *codes: str, limit: float = 60.0) -> Stage:
        return Stage(name, limit, tuple((python, "-c", code) for code in codes))

    chosen = [
        stage("fails", "print('why it fails'); raise SystemExit(3)", "print('goes on')"),
        stage("late", "import time; print('so far', flush=True); time.sleep(99)", "print('shows it')", limit=2.0),
        stage("works", "print('fine')"),
    ]
    outcomes = run_all(chosen, tmp_path, os.environ, dry=False)
    assert [(o.stage, o.ok) for o in outcomes] == [("fails", False), ("late", False), ("works", True)]
    assert (tmp_path / "fails.log").read_text() == "why it fails\ngoes on\n"
    assert outcomes[1].seconds < 20
    assert (tmp_path / "late.log").read_text() == "so far\nshows it\n"
    failed = (tmp_path / "failed.txt").read_text()
    assert "===== fails: -c exited with 3\nwhy it fails" in failed
    assert "-c was not done after 2 s" in failed
    assert "so far" in failed
    assert "fine" not in failed


@pytest.mark.parametrize("error", [EOFError("cut off"), subprocess.TimeoutExpired("pip", 45.0)])
def test_a_folder_that_cannot_be_prepared_leaves_the_stages_alone(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error

    module = command_line()
    works = Stage("kernels", 60.0, ((sys.executable, "-c", "print('fine')"),))
    for name, stand_in in (
        ("prepare", fail),
        ("build_suffix_trees", lambda *args: None),
        ("stages", lambda *args: [works]),
    ):
        monkeypatch.setattr(module, name, stand_in)
    args = Namespace(out=tmp_path / "out", packed=tmp_path, dry=False, stages=["kernels"])
    assert module.run(args, tmp_path) == 1
    assert (tmp_path / "out" / "kernels.log").read_text() == "fine\n"
    assert f"cannot be prepared: {error!r}" in (tmp_path / "out" / "failed.txt").read_text()


def test_a_build_of_suffix_trees_that_fails_is_told(tmp_path: Path) -> None:
    log, module = tmp_path / "suffix-build.log", command_line()
    for command, told in (
        ("echo fine", "nothing failed"),
        ("echo no compiler; exit 3", "trees exited with 3\nno comp"),
    ):
        with log.open("wb") as file:
            building = subprocess.Popen(["bash", "-c", command], stdout=file)
        building.wait()
        run_all([], tmp_path, os.environ, False, lambda building=building: module.failed_build(building, tmp_path))
        assert told in (tmp_path / "failed.txt").read_text()


def test_missed_goals_are_told(tmp_path: Path) -> None:
    goals = [{"name": name, "value": 3.0, "limit": 2.5, "met": name == "met"} for name in ("met", "missed")]
    (tmp_path / "verify.json").write_text(json.dumps({"goals": goals}))
    rows = {"none": {}, "hybrid": {"beyond": 3.0, "most_beyond": 4, "met": True}}
    rows["hybrid-suffix"] = {"beyond": 9.5, "most_beyond": 8, "met": False}
    (tmp_path / "step.json").write_text(json.dumps(rows))
    run_all([], tmp_path, os.environ, dry=False)
    assert (tmp_path / "failed.txt").read_text().splitlines() == [
        "===== goals that were missed",
        "missed: 3.00, goal 2.5",
        "hybrid-suffix: 9.5 launches and copies a step beyond stock, goal 8",
    ]


def test_all_stages_fit_into_nine_minutes(packed: Path, tmp_path: Path) -> None:
    every = stages(tmp_path, packed, tmp_path, tmp_path, dry=False)
    # Behind the limit each further command has a short while, and to end one takes three seconds.
    late = sum(_LEAST_SECONDS * (len(stage.commands) - 1) + 3 * len(stage.commands) for stage in every)
    assert sum(stage.limit for stage in every) + late <= MOST_SECONDS - 45  # for unpacking
    assert any("modelled.py" in command[1] for stage in every for command in stage.commands)


def test_five_thousand_cases_reach_every_rule() -> None:
    groups = kernel_cases.groups()
    assert len(set(groups)) == len(groups)
    assert -(-kernel_cases.NUM_CASES // len(groups)) * len(groups) >= 5000
    assert {group.strategy for group in groups} == set(kernel_cases.STRATEGIES)
    assert {group.policy for group in groups} == {"normal", "accept_all", "reject_all"}


def test_every_strategy_has_cases_with_the_vocabularies_of_served_models() -> None:
    found = {(group.strategy, group.vocab_size) for group in kernel_cases.large_groups() if group.is_large}
    assert found == set(itertools.product(kernel_cases.STRATEGIES, (151_936, 262_144)))
    assert not any(group.is_large for group in kernel_cases.groups())


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(len(kernel_cases.large_groups())))
def test_cases_with_large_vocabularies_are_right(seed: int) -> None:
    """As the GPU gets them, since no random case of the other tests is as large."""
    group = kernel_cases.large_groups()[seed]
    result = kernel_cases.check_group((seed, group, kernel_cases.LARGE_CASES, "cpu"))
    assert result["wrong"] == 0, result["first_wrong"]


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel_cases.reference.verify
    monkeypatch.setattr(kernel_cases.kernels, "verify", lambda inputs, workspace: right(inputs))
    shape = next(kernel_cases.groups()[0].shapes(1, seed=0))
    checker = kernel_cases.Checker("cpu")
    assert checker.wrong(shape) is None

    def wrong(inputs, workspace):
        output = right(inputs)
        return replace(output, num_tokens=output.num_tokens + 1)

    monkeypatch.setattr(kernel_cases.kernels, "verify", wrong)
    assert checker.wrong(shape).startswith("called: Shape(")


def test_launches_of_every_kernel_that_drafts_are_packed(packed: Path) -> None:
    """Those that verify have cases of their own."""
    found = {(launch.module, launch.kernel) for launch in itertools.chain(*recorded(packed))}
    folder = ROOT / "vllm_specplus" / "kernels"
    expected = {
        (f"vllm_specplus.kernels.{'.'.join(path.relative_to(folder).with_suffix('').parts)}", name)
        for path in folder.rglob("*.py")
        if path.parent.name != "verify"
        for name in re.findall(r"^def (_\w*kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert found == expected


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_launch_that_writes_something_else_is_found(
    is_broken: bool, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pads(positions, states, num_drafts, invalid, marks, num_rows, **options) -> None:
        assert num_rows == len(positions)
        marks.copy_(positions > num_drafts[states.long()])
        if invalid is not None:
            marks |= invalid
        marks[-1] ^= is_broken

    chosen = [each for each in recorded(packed) if each[0].kernel == "_padding_kernel"]
    assert chosen
    for each in chosen:
        monkeypatch.setattr(f"{each[0].module}.{each[0].kernel}", defaultdict(lambda: pads))
        result = launches.repeat((each, "cpu"))
        assert result["launches"] == len(each)
        assert result["wrong"] == (len(each) if is_broken else 0)


def recorded(packed: Path) -> list[list[launches.Launch]]:
    return launches.read(packed / "launches.pickle")


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ({"texts": [[1, 2]]}, 0),
        ({"texts": [[1, 2]], "accepted": 3}, 0),
        ({"texts": [[1, 3]]}, 1),
        ({"texts": [[1, 2]], "accepted": 0}, 1),
        ({"error": "the end of its log"}, 1),
    ],
)
def test_another_text_and_an_engine_that_fails_are_said(
    found: dict, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "run", lambda *args: iter([("none", {"texts": [[1, 2]]}), ("mtp", dict(found))]))
    monkeypatch.setattr(engines.signal, "signal", lambda *args: None)
    args = Namespace(kind="--speed", model=tmp_path, json=tmp_path / "out.json", dry=False)
    monkeypatch.setattr(engines.argparse.ArgumentParser, "parse_args", lambda self: args)
    assert engines.main() == code
    written = json.loads(args.json.read_text())["mtp"]
    assert written.get("same_text") == (None if "error" in found else found["texts"] == [[1, 2]])
    printed = capsys.readouterr().out
    assert ("mtp: FAILED" in printed) == (code == 1)
    assert ("mtp: FAILED\nthe end of its log" in printed) == ("error" in found)


@pytest.mark.parametrize(
    ("same", "speeds", "said"),
    [
        (20, [300.0, 900.0], None),
        (18, [300.0, 900.0], None),
        (17, [300.0, 900.0], "FAILED: batch 16, all: only 17 of 20 texts are as without speculation"),
        (20, [300.0, None], "FAILED: batch 16, all: no time was left to measure it"),
    ],
)
def test_speeds_are_shown_by_batch_and_their_texts_compared(
    same: int, speeds: list[float | None], said: str | None
) -> None:
    def rows(speeds: list[float | None], texts: list[str]) -> list[dict]:
        found = zip(((1, "a list", texts[:1]), (16, "all", texts)), speeds, strict=True)
        steps = {"steps_per_100_tokens": 55.0}
        return [
            {"batch": batch, "prompts": kind, "tokens_per_second": speed, "texts": speed and of} | steps
            for (batch, kind, of), speed in found
        ]

    plain = [f"text {i}" for i in range(20)]
    results = {
        "none": {"same_text": True, "speed": rows([200.0, 600.0], plain)},
        "mtp": {"same_text": True, "speed": rows(speeds, plain[:same] + ["another"] * (20 - same))},
        "ngram": {"same_text": True},
    }
    for found in results.values():
        engines.compare_texts(found.get("speed", []), results["none"]["speed"])
    assert engines.problem(results["none"]) is None
    assert engines.problem(results["mtp"]) == said
    console = Console(width=100, file=io.StringIO())
    engines.show_speeds(console, results)
    lines = [line.strip("│").split("│") for line in console.file.getvalue().splitlines() if line.startswith("│")]
    shown = [[cell.strip() for cell in line] for line in lines]
    assert shown[:3] == [
        ["1", "a list", "none", "200", "1.00", "55", "1 of 1"],
        ["1", "a list", "mtp", "300", "1.50", "55", "1 of 1"],
        ["16", "all", "none", "600", "1.00", "55", "20 of 20"],
    ]
    last = ["900", "1.50", "55", f"{same} of 20"] if speeds[1] else ["no time", "", "", ""]
    assert shown[3:] == [["16", "all", "mtp", *last]]


def test_launches_are_held_to_their_goal() -> None:
    steps = {"mtp": {"steps": {"launches_per_step": 20.0, "copies_per_step": 3.0}}, "none": {"texts": []}}
    assert engines.beyond("hybrid", steps) == {}
    assert engines.beyond("mtp", steps) == {}
    for number, met in ((23.0, True), (25.0, False)):
        steps["hybrid"] = {"steps": {"launches_per_step": number, "copies_per_step": 4.0}}
        assert engines.beyond("hybrid", steps) == {"beyond": number - 19, "most_beyond": 4, "met": met}
