"""The command line of ``ci/gpu.sh``, which says what it does."""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from pack import PackError, pack
from prepare import build_suffix_trees, prepare
from stages import end_of_log, run_all, stages

from vllm_specplus.testing.tiny_model import make_random

_ROOT = Path(__file__).parents[2]
_STAGES = ("kernels", "drafting", "verify", "step", "engine")


def chosen_stages(text: str) -> list[str]:
    """Names of stages out of a list with commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in _STAGES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; allowed: {', '.join(_STAGES)}")
    return names


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments, checked; a wrong one ends the process with a message."""
    parser = argparse.ArgumentParser("ci/gpu.sh", description="All that a GPU has to tell.")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="a new folder for the results")
    parser.add_argument(
        "--pack", type=Path, metavar="DIR", help="gather what the GPU's machine lacks, and do nothing else"
    )
    parser.add_argument("--static", type=Path, metavar="FILE", help="with --pack: what static_cost.py --json wrote")
    parser.add_argument("--with", type=Path, metavar="DIR", dest="packed", help="the folder that --pack made")
    parser.add_argument("--dry", action="store_true", help="without a GPU, tiny, under Triton's interpreter")
    parser.add_argument("--stages", type=chosen_stages, default=list(_STAGES), help=", ".join(_STAGES))
    args = parser.parse_args(argv)
    if (args.out is None) == (args.pack is None):
        parser.error("give either OUT or --pack DIR")
    if args.static and not args.pack:
        parser.error("--static goes with --pack")
    if args.static and not args.static.is_file():
        parser.error(f"--static {args.static}: there is no such file")
    if args.out and args.dry == bool(args.packed):
        parser.error("OUT goes with either --with DIR or --dry")
    if args.packed and not (args.packed / "pack.json").is_file():
        parser.error(f"--with {args.packed}: that is no folder that --pack made")
    if args.out and args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty; OUT is a new folder")
    return args


def environment(site: Path, dry: bool) -> dict[str, str]:
    """Of the stages: vLLM on its V2 runner and without a network; under the interpreter if dry."""
    env = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "specplus",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        # Otherwise Triton rounds the attention's float32 to TF32, and texts depend on which kernel ran.
        "TRITON_F32_DEFAULT": "ieee",
    }
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if dry:
        env |= {"TRITON_INTERPRET": "1"}
        path.append(str(_ROOT / "tests" / "triton_cpu"))
    else:
        path.insert(0, str(site))
    return env | {"PYTHONPATH": os.pathsep.join(path)}


def failed_build(building: subprocess.Popen[bytes] | None, out: Path) -> list[str]:
    """What to say of the suffix trees' build, if it has failed."""
    if building is None or not building.poll():
        return []
    return [end_of_log(out, "suffix-build", f"the build of suffix trees exited with {building.returncode}")]


def run(args: argparse.Namespace, scratch: Path) -> int:
    """Run the stages; 1 if one fails."""
    site, model, building = scratch / "site", scratch / "model", None
    failed: list[str] = []
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    if args.dry:
        make_random(model)
    else:
        model = args.packed.resolve() / "model"
        try:
            prepare(args.packed, site)
        except (OSError, EOFError, ValueError, KeyError, subprocess.SubprocessError, tarfile.TarError) as error:
            # The stages that need no vLLM can still tell something.
            failed.append(f"===== preparation: {args.packed} cannot be prepared: {error!r}")
            print(failed[0], file=sys.stderr)
        with (out / "suffix-build.log").open("wb") as log:
            building = build_suffix_trees(args.packed, site, log)
    every = stages(out, args.packed and args.packed.resolve(), site, model, args.dry)
    try:
        env = environment(site, args.dry)
        chosen = [stage for stage in every if stage.name in args.stages]
        outcomes = run_all(chosen, out, env, args.dry, lambda: [*failed, *failed_build(building, out)])
    finally:
        if building and building.poll() is None:
            building.kill()
            building.wait()
    return int(bool(failed) or any(not outcome.ok for outcome in outcomes))


def main() -> int:
    """Pack, or run the stages."""
    args = parse_args()
    if args.pack is None:
        with tempfile.TemporaryDirectory() as scratch:
            return run(args, Path(scratch))
    try:
        size = pack(args.pack, args.static)
    except (PackError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.pack}: {size / (1 << 20):.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
