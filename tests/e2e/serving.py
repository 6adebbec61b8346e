"""`vllm serve` as a user starts it."""

import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

_START_SECONDS = 480
_ROOT = Path(__file__).parents[2]


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a server that finds `tests`, and what is in some folders, beside what this process finds."""
    return os.pathsep.join(filter(None, [*map(str, folders), str(_ROOT), os.environ.get("PYTHONPATH")]))


@dataclass(frozen=True)
class Server:
    """A running server."""

    address: str
    log_file: Path
    pid: int

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.address}{path}", timeout=60) as answer:
            return answer.read().decode()

    def log(self) -> str:
        return self.log_file.read_text()

    def metric(self, name: str, path: str = "/metrics") -> float:
        """The sum of all samples of a metric."""
        lines = (line for line in self.get(path).splitlines() if line.startswith(name))
        return sum(float(line.split()[-1]) for line in lines if line[len(name)] in "{ ")


@contextmanager
def serve(model: Path, folder: Path, *options: str, **environment: str) -> Iterator[Server]:
    """Start a server of `model` under the name "tiny", wait until it answers, and stop it at the end without a fault.

    Args:
        model: the folder of the weights.
        folder: gets its log.
        options: further options of the command.
        environment: further variables of its environment.
    """
    port = str(free_port())
    log_file = folder / "log"
    common = ("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port, "--max-model-len", "512")
    common += ("--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(64 << 20))
    # The engine gets processes of its own, as it does for a user.
    inherited = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log_file.open("w") as out:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("vllm"), "serve", model, *common, *options],
            env={**inherited, "VLLM_LOGGING_LEVEL": "INFO", **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        server = Server(f"http://127.0.0.1:{port}", log_file, process.pid)
        try:
            _wait_until_healthy(server, process)
            yield server
            # No answer shows a fault of drafting, so the log has to.
            assert "a fault in" not in server.log()
        except BaseException:
            print(server.log()[-4000:])
            raise
        finally:
            process.terminate()
            process.wait(60)


def free_port() -> int:
    """A port that stays free until the server binds it, seconds later.

    The system gives ports of its own range to connections and to whoever asks for any port, so that range is left out.
    Python's own generator would give two runs of the suite the same port: vLLM seeds it. Both would bind it, too.
    """
    first_of_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, first_of_system), 100):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    pytest.fail("no free port among 100")


def _wait_until_healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, server.log()[-4000:]
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"not healthy after {_START_SECONDS} s: {server.log()[-4000:]}")
