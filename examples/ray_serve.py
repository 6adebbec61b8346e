"""Serve a model by Ray Serve, several replicas of an engine behind one address.

    python examples/ray_serve.py MODEL [--replicas 2]

Ray's own application does not know this plugin's fields of a request. Here each replica answers HTTP by vLLM's
application instead, so `prediction`, `aux_info` and `/specplus/stats` work as they do with `vllm serve`.
"""

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import ray
import vllm
from ray import serve
from ray.serve.llm import LLMConfig, LLMServer, build_llm_deployment

HYBRID = {"method": "mtp", "num_speculative_tokens": 5, "num_model_steps": 2, "mtp_strategy": "with_ngram"}


def main() -> None:
    args = parse_args()
    # Ray waits for ever where the port is not free. A cluster that runs already may serve at it.
    if "address" not in args.ray:
        try:
            socket.create_server((args.host, args.port)).close()
        except (OSError, OverflowError) as error:
            refuse(f"--host {args.host} --port {args.port} is not allowed: an address that is free ({error})")
    # Otherwise the engine of a killed replica would live on, with the memory that the next one needs.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "true")
    ray.init(**args.ray)
    serve.start(http_options={"host": args.host, "port": args.port})
    # `serve.ingress` without an application asks LLMServer for its engine's.
    server = serve.ingress()(LLMServer)
    try:
        deployment = build_llm_deployment(config(args), deployment_cls=server)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("vllm."):
            raise
        # Ray would print its workers' logs after the error.
        ray.shutdown()
        versions = f"Ray {ray.__version__} does not run beside vLLM {vllm.__version__}"
        refuse(f"{versions}: {error}. Install 'vllm<0.33'")
    serve.run(deployment, blocking=True)


def refuse(reason: str) -> NoReturn:
    """End the script with one line."""
    print(reason, file=sys.stderr)
    sys.exit(2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--served-model-name", help="the model's name for clients (default: its folder's)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=2, help="engines (default: %(default)s)")
    parser.add_argument("--cpus", type=int, default=1, help="cores of each engine (default: %(default)s)")
    for option, default, meaning in (
        ("speculative-config", HYBRID, "vLLM's and this plugin's keys"),
        ("engine-args", {}, "further arguments of vLLM's engine"),
        ("ray", {}, 'arguments of ray.init, such as \'{"address": "auto"}\' for a running cluster'),
    ):
        text = f"{meaning} (default: {json.dumps(default)})"
        parser.add_argument(f"--{option}", type=json_object, default=default, metavar="JSON", help=text)
    return parser.parse_args()


def json_object(text: str) -> dict[str, Any]:
    """Read an option; argparse shows the message of the error."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a JSON object")
    return value


def config(args: argparse.Namespace) -> LLMConfig:
    """Return Ray's description of the deployment, with GPUs where the cluster has some."""
    on_gpu = "GPU" in ray.cluster_resources()
    # On a CPU each engine would bind its threads to the same cores.
    variables = {"VLLM_PLUGINS": "specplus", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options: dict[str, Any] = {"bundle_per_worker": {"CPU": args.cpus} | ({"GPU": 1} if on_gpu else {})}
    return LLMConfig(
        model_loading_config={
            "model_id": args.served_model_name or Path(args.model).name,
            "model_source": args.model,
        },
        engine_kwargs={"speculative_config": args.speculative_config, **args.engine_args},
        deployment_config={"num_replicas": args.replicas},
        accelerator_config={"kind": "gpu" if on_gpu else "cpu"},
        placement_group_config=options,
        runtime_env={"env_vars": {name: os.environ.get(name, value) for name, value in variables.items()}},
    )


if __name__ == "__main__":
    main()
