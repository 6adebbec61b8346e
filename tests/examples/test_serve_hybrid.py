"""The script that serves a model: it looks at the port before it starts vLLM."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "serve_hybrid.sh"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder whose ``vllm`` only prints its arguments."""
    command = tmp_path / "vllm"
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o755)
    return tmp_path


def serve(commands: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    words = ["bash", str(SCRIPT), "a model", *options]
    return subprocess.run(words, env=os.environ | {"PATH": path}, capture_output=True, text=True)


@pytest.mark.parametrize("form", ["--port {}", "--port={}", "--port 1 --port {} --seed 7"])
def test_a_port_in_use_is_told_in_one_line(form: str, commands: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve(commands, *form.format(port).split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"port {port} is in use; choose another one with --port\n"


def test_a_free_port_is_served(commands: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = serve(commands, "--port", str(port))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("serve a model --served-model-name hybrid ")
    assert done.stdout.endswith(f"--port {port}\n")
