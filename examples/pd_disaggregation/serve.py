"""Serve a model by two servers, one that prefills and one that decodes, behind a proxy.

    python examples/pd_disaggregation/serve.py MODEL --speculative-config '{...}' [options of vllm serve]

Both servers have the same options, so the draft model's KV cache is filled by the first one too. They hand the caches
over in a folder, by vLLM's ExampleConnector, or from memory to memory with `--connector NixlConnector`.
docs/deployment.md says what each asks for.
"""

import argparse
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
from contextlib import ExitStack, contextmanager, suppress
from threading import Thread
from typing import Any

import proxy

EXAMPLE, NIXL = "ExampleConnector", "NixlConnector"
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
# Where NIXL's agents find each other.
NIXL_PORTS = {"prefill": "5600", "decode": "5601"}
HOST = "127.0.0.1"
# ExampleConnector hands over whole prompts alone, so none is computed in parts or taken from a cache.
EXAMPLE_OPTIONS = ("--block-size", "32", "--no-enable-prefix-caching", "--no-enable-chunked-prefill")
# For a server to end by itself; what is left of it is killed then.
STOP_SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--host", default=HOST, help="the proxy's (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="the proxy's (default: %(default)s)")
    parser.add_argument("--connector", choices=(EXAMPLE, NIXL), default=EXAMPLE, help="(default: %(default)s)")
    parser.add_argument("--shared-folder", help=f"of {EXAMPLE}, where the caches lie; a temporary folder otherwise")
    for role, port in (("prefill", 8100), ("decode", 8200)):
        parser.add_argument(f"--{role}-port", type=int, default=port)
        parser.add_argument(
            f"--{role}-env",
            type=_variable,
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="a variable of its environment, such as CUDA_VISIBLE_DEVICES=0 or VLLM_CPU_OMP_THREADS_BIND=0",
        )
    args, options = parser.parse_known_args()
    _refuse_options_of_this_script(parser, args.connector, options)

    # The servers are stopped on the way out. uvicorn ends the proxy at SIGTERM, but knows nothing of SIGHUP: an
    # exception raised for it in a request's task would be caught there, and the proxy would go on.
    signal.signal(signal.SIGTERM, lambda caught, _: sys.exit(128 + caught))
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with ExitStack() as running:
        listener = running.enter_context(_listener(parser, args))
        shared = args.shared_folder or running.enter_context(tempfile.TemporaryDirectory())
        servers = {role: running.enter_context(_server(role, args, shared, options)) for role in ROLES}
        for role, server in servers.items():
            _wait_until_healthy(role, server, vars(args)[f"{role}_port"])
            Thread(target=_tell_the_end, args=(role, server), daemon=True).start()
        print(f"proxy: http://{args.host}:{args.port}", flush=True)
        proxy.run(f"http://{HOST}:{args.prefill_port}", f"http://{HOST}:{args.decode_port}", listener)


def _refuse_options_of_this_script(parser: argparse.ArgumentParser, connector: str, options: Sequence[str]) -> None:
    """A server would take the last one of an option, and so not what it needs here."""
    own = {"--kv-transfer-config", *(EXAMPLE_OPTIONS if connector == EXAMPLE else ())}
    for option in options:
        name = option.split("=")[0].split(".")[0].replace("_", "-")
        # vLLM takes a part of a name for the whole.
        if name.startswith("--") and any(each.startswith((name, name.replace("--", "--no-", 1))) for each in own):
            parser.exit(2, f"{name} is not allowed: with --connector {connector} this script sets it\n")


def _variable(entry: str) -> tuple[str, str]:
    name, separator, value = entry.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{entry!r} is not allowed: NAME=VALUE")
    return name, value


def _listener(parser: argparse.ArgumentParser, args: argparse.Namespace) -> socket.socket:
    """The proxy's socket. All three ports have to be free: an older server would answer in place of the new one."""
    with ExitStack() as tried:
        for option in ("prefill_port", "decode_port", "port"):
            port = vars(args)[option]
            host = args.host if option == "port" else HOST
            try:
                listener = socket.create_server((host, port))
            except (OSError, OverflowError) as error:
                given = f"--{option.replace('_', '-')} {port}"
                if host != HOST:
                    given = f"--host {host} {given}"
                parser.exit(2, f"{given} is not allowed: a free port, and another for each ({error})\n")
            if option != "port":
                tried.enter_context(listener)
    return listener


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
    port = str(vars(args)[f"{role}_port"])
    command = ["vllm", "serve", args.model, "--host", HOST, "--port", port]
    command += ["--kv-transfer-config", json.dumps(_transfer(args.connector, role, shared))]
    if args.connector == EXAMPLE:
        command += EXAMPLE_OPTIONS
    command += options
    environ = {"VLLM_PLUGINS": "specplus", **os.environ, "VLLM_NIXL_SIDE_CHANNEL_PORT": NIXL_PORTS[role]}
    environ |= dict(vars(args)[f"{role}_env"])
    server = subprocess.Popen(command, env=environ, start_new_session=True)
    try:
        print(f"{role} server: process {server.pid}, http://{HOST}:{port}", flush=True)
        yield server
    finally:
        server.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                server.wait(STOP_SECONDS)
        finally:
            # A server that was killed leaves its engine behind.
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def _wait_until_healthy(role: str, server: subprocess.Popen[bytes], port: int) -> None:
    # A proxy that the environment names knows nothing of this machine's ports.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while server.poll() is None:
        try:
            direct.open(f"http://{HOST}:{port}/health", timeout=10).close()
            return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"the {role} server ended with {server.returncode}")


def _tell_the_end(role: str, server: subprocess.Popen[bytes]) -> None:
    print(f"the {role} server ended with {server.wait()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
