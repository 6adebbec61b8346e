"""Short runs on Model Runner V2, and engines in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm.sampling_params import StructuredOutputsParams

from tests.e2e.engines import PROMPTS, Engine, engine
from tests.e2e.references import ask, stats

# A step takes a tenth of a second and more under the interpreter, so texts are short and few.
FEW = PROMPTS[:4]
MAX_TOKENS = 20
_ROOT = Path(__file__).parents[2]


def tokens(e: Engine, prompts: list[list[int]] = FEW, **sampling: Any) -> list[list[int]]:
    return e.tokens(prompts, **{"max_tokens": MAX_TOKENS} | sampling)


def elsewhere(
    runner: int,
    model: Path,
    config: dict[str, Any] | None,
    prompts: list[list[int]] = FEW,
    sampling: dict[str, Any] | None = None,
    **args: Any,
) -> dict[str, Any]:
    """What an engine in another process does: ``{"tokens": ..., "drafted": ..., "accepted": ..., "stats": ...}``.

    Args:
        runner: 1 or 2, the model runner.
        model, config, args: of the engine. ``async_scheduling=True`` holds, though vLLM has it off on a CPU.
        prompts, sampling: of the requests; ``json`` is a schema of the output, ``extra`` each one's ``extra_args``.
    """
    env = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)}
    if runner == 1:
        del env["TRITON_INTERPRET"]
        folders = [f for f in env["PYTHONPATH"].split(os.pathsep) if not f.endswith("triton_cpu")]
        env["PYTHONPATH"] = os.pathsep.join(folders)
    asked = json.dumps([str(model), config, prompts, sampling or {}, args])
    command = [sys.executable, "-m", "tests.e2e_v2.engines", asked]
    done = subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _keep_async_scheduling() -> None:
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_keep(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    platform.check_and_update_config = staticmethod(check_and_keep)


def main() -> None:
    import tests.conftest  # noqa: F401

    model, config, prompts, sampling, args = json.loads(sys.argv[1])
    if args.get("async_scheduling"):
        _keep_async_scheduling()
    if "json" in sampling:
        sampling["structured_outputs"] = StructuredOutputsParams(json=sampling.pop("json"))
    with engine(Path(model), config, **args) as e:
        scheduler = e.llm.llm_engine.engine_core.engine_core.scheduler
        extra = sampling.pop("extra", None)
        found = ask(e, prompts, extra, **sampling) if extra else tokens(e, prompts, **sampling)
        result: dict[str, Any] = {"tokens": found, "scheduler": type(scheduler).__name__}
        if config is not None:
            counts = e.counts()
            result |= {"drafted": counts.drafted, "accepted": counts.accepted, "stats": stats(e)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
