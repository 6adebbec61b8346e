"""Short runs on Model Runner V2, also with asynchronous scheduling, and on V1 to compare with."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tests.e2e.engines import PROMPTS, Engine, engine
from tests.triton_cpu.interpreted_cpu import scheduling
from vllm_specplus.engine import widths

# Texts are short and few: a step takes a tenth of a second or more under the interpreter.
FEW = PROMPTS[:4]
MAX_TOKENS = 20
_ROOT = Path(__file__).parents[3]


def tokens(e: Engine, prompts: list[list[int]] = FEW, **sampling: Any) -> list[list[int]]:
    return e.tokens(prompts, **{"max_tokens": MAX_TOKENS} | sampling)


def v1_tokens(model: Path, config: dict[str, Any] | None, **args: Any) -> list[list[int]]:
    """The texts of `FEW` from an engine on the V1 model runner, in a process of its own."""
    env = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    del env["TRITON_INTERPRET"]
    folders = [f for f in env["PYTHONPATH"].split(os.pathsep) if not f.endswith("triton_cpu")]
    env["PYTHONPATH"] = os.pathsep.join(folders)
    command = [sys.executable, "-m", "tests.e2e.v2.engines", json.dumps([str(model), config, args])]
    done = subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def async_engine(
    model: Path, config: dict[str, Any] | None, *, chooses_widths: bool = False, **args: Any
) -> Iterator[Engine]:
    """Start an engine with asynchronous scheduling, where it `chooses_widths` with steps of several widths."""
    with asynchronous(chooses_widths=chooses_widths), engine(model, config, async_scheduling=True, **args) as e:
        scheduler = e.llm.llm_engine.engine_core.engine_core.scheduler
        assert isinstance(scheduler, AsyncScheduler)
        yield e


@contextmanager
def asynchronous(*, chooses_widths: bool = False) -> Iterator[None]:
    """Let configs have asynchronous scheduling, which vLLM takes away on a CPU.

    Unless an engine `chooses_widths`, each step has all slots. Under the interpreter a slot takes as long as a step, so
    hardly any would be chosen.
    """
    platform = type(current_platform)
    with (
        patch.object(platform, "check_and_update_config", scheduling.keeping(platform.check_and_update_config)),
        patch.dict(os.environ, {scheduling.VARIABLE: "1"}),
        nullcontext() if chooses_widths else patch.object(widths, "reason_for_fixed_width", lambda setup: "of a test"),
    ):
        yield


def main() -> None:
    import tests.conftest  # noqa: F401  # vLLM's engine in this process

    model, config, args = json.loads(sys.argv[1])
    with engine(Path(model), config, **args) as e:
        print(json.dumps(tokens(e)))


if __name__ == "__main__":
    main()
