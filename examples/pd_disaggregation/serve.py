"""Serve a model by two servers, one that prefills and one that decodes, behind a proxy.

    python examples/pd_disaggregation/serve.py MODEL --speculative-config '{...}' [options of vllm serve]

Both servers have the same options, so the draft model's KV cache is filled by the first one too. They hand the caches
over in a folder, by vLLM's ExampleConnector. docs/deployment.md says what it asks for.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import httpx
import uvicorn
from proxy import create_app

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
HOST = "127.0.0.1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000, help="the proxy's")
    parser.add_argument("--shared-folder", help="where the caches are handed over; a temporary folder otherwise")
    for role, port in (("prefill", 8100), ("decode", 8200)):
        parser.add_argument(f"--{role}-port", type=int, default=port)
        parser.add_argument(
            f"--{role}-env",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="a variable of its environment, such as CUDA_VISIBLE_DEVICES=0 or VLLM_CPU_OMP_THREADS_BIND=0",
        )
    args, options = parser.parse_known_args()

    # The servers are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        shared = args.shared_folder or folder
        with (
            _server("prefill", args.model, args.prefill_port, args.prefill_env, shared, options) as prefill,
            _server("decode", args.model, args.decode_port, args.decode_env, shared, options) as decode,
        ):
            for process, port in ((prefill, args.prefill_port), (decode, args.decode_port)):
                _wait_until_healthy(process, port)
            with socket.create_server((HOST, args.port)) as listener:
                print(f"proxy: http://{HOST}:{args.port}", flush=True)
                asyncio.run(_run_proxy(args.prefill_port, args.decode_port, listener))


@contextmanager
def _server(
    role: str, model: str, port: int, environment: Sequence[str], shared: str, options: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, and stop it at the end."""
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": ROLES[role],
        "kv_connector_extra_config": {"shared_storage_path": shared},
    }
    command = ["vllm", "serve", model, "--host", HOST, "--port", str(port), "--block-size", "32"]
    # The connector hands over whole prompts alone, so none is computed in parts or taken from a cache.
    command += ["--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
    command += ["--kv-transfer-config", json.dumps(transfer), *options]
    variables = dict(entry.split("=", 1) for entry in environment)
    environ = {"VLLM_PLUGINS": "specplus", **os.environ, **variables}
    process = subprocess.Popen(command, env=environ, start_new_session=True)
    print(f"{role} server: process {process.pid}, http://{HOST}:{port}", flush=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        # A server that was killed leaves its engine behind.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=10).close()
            return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"the server at port {port} ended with {process.returncode}")


async def _run_proxy(prefill_port: int, decode_port: int, listener: socket.socket) -> None:
    # A completion may take any time. A connection that is idle for 5 s is closed by the server, so the proxy is faster.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
    ways = {"timeout": httpx.Timeout(None, connect=10), "limits": limits}
    async with (
        httpx.AsyncClient(base_url=f"http://{HOST}:{prefill_port}", **ways) as prefill,
        httpx.AsyncClient(base_url=f"http://{HOST}:{decode_port}", **ways) as decode,
    ):
        config = uvicorn.Config(create_app(prefill, decode), log_level="warning")
        await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    main()
