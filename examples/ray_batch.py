"""Answer a file of prompts by several engines, which Ray Data starts, feeds, and starts again if they die.

    python examples/ray_batch.py MODEL PROMPTS RESULTS [--workers 2]

Each line of PROMPTS is a JSON object: {"prompt": TEXT}, and "prediction": TEXT if much of the answer is known before.
The folder RESULTS gets Parquet files of rows with "id", the line's number from 0, "prompt", "text" and "num_tokens".
Started again with the same folder, the script answers only the lines whose ids are not in it. A line that the engine
refuses, such as a prompt that is too long, costs the others nothing: the script tells of it and ends with status 1.
Mend it where it stands: a folder whose prompts are not those of the lines with their ids is refused.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from pydantic import BaseModel, ConfigDict, ValidationError
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

HYBRID = {"method": "mtp", "num_speculative_tokens": 5, "num_model_steps": 2, "mtp_strategy": "with_ngram"}
SAMPLING = {"temperature": 0, "max_tokens": 256}
# The columns of the results, by Ray Data's names.
COLUMNS = {"id": "id", "prompt": "prompt", "text": "generated_text", "num_tokens": "num_generated_tokens"}
# What Ray Data says of a row that its engine refused.
ERROR = "__inference_error__"


class Line(BaseModel):
    """A line of the prompts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str
    prediction: str | None = None


def main() -> None:
    args = parse_args()
    try:
        args.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"{args.results} is not allowed: a folder ({error.strerror})")
    rows = read_rows(args.prompts, args.sampling_params)
    done = finished_ids(args.results, rows)
    left = [row for row in rows if row["id"] not in done]
    print(f"{len(done)} of {len(rows)} rows were there", flush=True)
    if not left:
        return

    # Otherwise the engine of a killed worker would live on, with the memory that the next one needs.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "true")
    ray.init(**args.ray)
    ray.data.DataContext.get_current().enable_progress_bars = False
    # A batch is what an engine gets at once, what it answers again if it dies, and what a file holds.
    dataset = ray.data.from_items(left, override_num_blocks=math.ceil(len(left) / args.batch_size))
    answers = processor(args)(dataset)
    for block in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
        answered = []
        for row in block.to_pylist():
            if row[ERROR]:
                print(f"row {row['id']}: {row[ERROR]}", file=sys.stderr, flush=True)
            else:
                # Beside a row that was refused, the others have its columns too.
                answered.append({name: row[name] for name in COLUMNS})
        save(answered, done, args.results)
        print(f"{len(done)} of {len(rows)} rows", flush=True)
    if len(done) < len(rows):
        sys.exit(f"{len(rows) - len(done)} rows have no answer: mend those that were refused, or start again")


def refuse(reason: str) -> NoReturn:
    """End the script with one line."""
    print(reason, file=sys.stderr)
    sys.exit(2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--workers", type=int, default=2, help="engines (default: %(default)s)")
    parser.add_argument("--cpus", type=int, default=1, help="cores of each engine (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a batch (default: %(default)s)")
    for option, default, meaning in (
        ("speculative-config", HYBRID, "vLLM's and this plugin's keys"),
        ("sampling-params", SAMPLING, "of every row"),
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


def read_rows(prompts: Path, sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the lines as rows of the dataset; end the script at the first one that is none."""
    rows: list[dict[str, Any]] = []
    try:
        with prompts.open(encoding="utf-8") as file:
            for number, text in enumerate(file):
                line = Line.model_validate_json(text)
                prediction = None if line.prediction is None else {"type": "content", "content": line.prediction}
                # Rows of a dataset have the same columns, so a row without a prediction says so.
                extra = sampling_params.get("extra_args", {}) | {"prediction": prediction}
                rows.append(
                    {"id": number, "prompt": line.prompt, "sampling_params": sampling_params | {"extra_args": extra}}
                )
    except OSError as error:
        refuse(f"{prompts} cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        refuse(f"{prompts} is not UTF-8: {error}")
    except ValidationError as error:
        first = error.errors()[0]
        refuse(": ".join([f"{prompts}, line {len(rows) + 1}", *map(str, first["loc"]), first["msg"]]))
    return rows


def finished_ids(folder: Path, rows: list[dict[str, Any]]) -> set[int]:
    """Return the ids of the rows that the folder has; end the script if it has a row of other prompts."""
    found: dict[int, str] = {}
    for file in folder.glob("*.parquet"):
        found |= {row["id"]: row["prompt"] for row in pq.read_table(file, columns=["id", "prompt"]).to_pylist()}
    for number, prompt in sorted(found.items()):
        if number >= len(rows) or rows[number]["prompt"] != prompt:
            refuse(f"{folder} is not allowed: its row {number} has another prompt than line {number + 1}")
    return set(found)


def save(answers: Iterable[dict[str, Any]], done: set[int], folder: Path) -> None:
    """Write a file of the answers whose ids are not among `done`, whole or not at all, and add the ids."""
    new = sorted((row for row in answers if row["id"] not in done), key=lambda row: row["id"])
    if not new:
        return
    file = folder / f"{new[0]['id']:09}.parquet"
    unfinished = file.with_suffix(".unfinished")
    pq.write_table(pa.Table.from_pylist(new), unfinished)
    unfinished.replace(file)
    done.update(row["id"] for row in new)


def processor(args: argparse.Namespace) -> Any:
    """Return Ray Data's vLLM processor, with a GPU for each worker of an engine where the cluster has GPUs."""
    resources = {"CPU": args.cpus} | ({"GPU": 1} if "GPU" in ray.cluster_resources() else {})
    # On a CPU each engine would bind its threads to the same cores.
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
    config = vLLMEngineProcessorConfig(
        model_source=args.model,
        engine_kwargs={"speculative_config": args.speculative_config, **args.engine_args},
        runtime_env={"env_vars": {name: os.environ.get(name, value) for name, value in variables.items()}},
        placement_group_config={"bundle_per_worker": resources},
        concurrency=(args.workers, args.workers),
        batch_size=args.batch_size,
        # vLLM's metrics for Ray need Ray Serve.
        log_engine_metrics=False,
        # A prompt that is too long would end the script, and do so again whenever it is started.
        should_continue_on_error=True,
        # The engine turns text into tokens and back.
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
    )
    # What surrounds the engines is light, and they may hold every core. Without a limit each batch starts a process.
    light = {"num_cpus": 0, "compute": ray.data.TaskPoolStrategy(size=1)}
    return build_processor(config, postprocess=results_of, preprocess_map_kwargs=light, postprocess_map_kwargs=light)


def results_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that was answered."""
    return {name: row[source] for name, source in COLUMNS.items()}


if __name__ == "__main__":
    main()
