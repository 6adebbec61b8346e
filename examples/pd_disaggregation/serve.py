"""Serve a model by two servers, one that prefills and one that decodes, behind a proxy.

    python examples/pd_disaggregation/serve.py MODEL --speculative-config '{...}' [options of vllm serve]

Both servers have the same options, so the draft model's KV cache is filled by the first one too. They hand the caches
over in a folder, by vLLM's ExampleConnector, or from memory to memory with `--connector NixlConnector`.
docs/deployment.md says what each asks for.
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
from typing import Any

import httpx
import uvicorn
from proxy import create_app

EXAMPLE, NIXL = "ExampleConnector", "NixlConnector"
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
# Where NIXL's agents find each other.
NIXL_PORTS = {"prefill": "5600", "decode": "5601"}
HOST = "127.0.0.1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000, help="the proxy's")
    parser.add_argument("--connector", choices=(EXAMPLE, NIXL), default=EXAMPLE, help="(default: %(default)s)")
    parser.add_argument("--shared-folder", help=f"of {EXAMPLE}, where the caches lie; a temporary folder otherwise")
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
            _server("prefill", args, shared, options) as prefill,
            _server("decode", args, shared, options) as decode,
        ):
            for process, port in ((prefill, args.prefill_port), (decode, args.decode_port)):
                _wait_until_healthy(process, port)
            with socket.create_server((HOST, args.port)) as listener:
                print(f"proxy: http://{HOST}:{args.port}", flush=True)
                asyncio.run(_run_proxy(args.prefill_port, args.decode_port, listener))


def _transfer(connector: str, role: str, shared: str) -> dict[str, Any]:
    """The KV transfer config of a server."""
    transfer: dict[str, Any] = {"kv_connector": connector, "kv_role": ROLES[role]}
    if connector == EXAMPLE:
        transfer["kv_connector_extra_config"] = {"shared_storage_path": shared}
    return transfer


@contextmanager
def _server(
    role: str, args: argparse.Namespace, shared: str, options: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, and stop it at the end."""
    port, environment = str(vars(args)[f"{role}_port"]), vars(args)[f"{role}_env"]
    command = ["vllm", "serve", args.model, "--host", HOST, "--port", port]
    command += ["--kv-transfer-config", json.dumps(_transfer(args.connector, role, shared))]
    if args.connector == EXAMPLE:
        # It hands over whole prompts alone, so none is computed in parts or taken from a cache.
        command += ["--block-size", "32", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
    command += options
    variables = dict(entry.split("=", 1) for entry in environment)
    defaults = {"VLLM_PLUGINS": "specplus", "VLLM_NIXL_SIDE_CHANNEL_PORT": NIXL_PORTS[role]}
    environ = {**defaults, **os.environ, **variables}
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
