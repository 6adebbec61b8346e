"""Record traces for `benchmarks/replay.py` from a real engine: greedy texts, and what a draft model drafts along them.

    python benchmarks/record.py MODEL (PROMPTS | --workload NAME ...) --out FILE [--speculative-config JSON]
                                [--max-tokens N] [--chat]

PROMPTS is a JSON file: a list of ``{"kind", "name", "prompt"}``, perhaps with ``"reference"``. A prompt and a reference
are text or a list of token ids. `--workload` takes prompts of `vllm-specplus compare` instead. A workload's name is
their kind, what it asks goes into the model's chat template if there is one, and `edit` brings references.

FILE gets the same list with token ids throughout, and with ``"output"``: the greedy continuation, and ``"drafts"``:
``drafts[i]`` is what the draft model drafts once ``output[:i + 1]`` is known. The last one is empty, since a request
that has ended is drafted for no more.

The engine verifies with ``accept_policy: reject_all``, so each step gives one token of the target's own and a full list
of drafts. That works with every draft model that vLLM runs: MTP and EAGLE heads, and draft models. V1 on a CPU.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from common import first_problem
from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from vllm_specplus.compare.command import positive
from vllm_specplus.compare.workloads import WORKLOADS, workload
from vllm_specplus.config import SpecPlusConfigError, parse_json, resolve
from vllm_specplus.config.errors import setting, show
from vllm_specplus.config.rules import METHODS_WITHOUT_MODEL

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine's scheduler is in this process
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

DEFAULT_CONFIG = {"method": "mtp", "num_speculative_tokens": 3}
ACCEPTS_NOTHING = {"accept_policy": "reject_all"}
KINDS = [name for name in WORKLOADS if name != "mixed"]


def _text_or_ids(value: Any) -> Any:
    is_ids = isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)
    if not value or not (is_ids or isinstance(value, str)):
        raise ValueError(f"must be text or a list of token ids, got {show(value)}")
    return value


TextOrIds = Annotated[Any, AfterValidator(_text_or_ids)]


class PromptRow(BaseModel):
    """A prompt as PROMPTS has it."""

    model_config = ConfigDict(extra="forbid")

    kind: str
    name: str
    prompt: TextOrIds
    reference: TextOrIds | None = None


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The rows of PROMPTS; one without a reference has no such key.

    Raises:
        ValueError: the file cannot be read, or is no such list; the message is one line.
    """
    try:
        rows = TypeAdapter(list[PromptRow]).validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    except ValidationError as error:
        problem = first_problem(error, "the file")
        raise ValueError(f"{path}: needs a list of kind, name and prompt: {problem}") from None
    if not rows:
        raise ValueError(f"{path}: needs a list of kind, name and prompt: it is empty")
    return [row.model_dump(exclude_none=True) for row in rows]


def config_of_draft_model(text: str) -> dict[str, Any]:
    """The config in `text`, whose drafts are a model's alone."""
    try:
        config = parse_json(text)
        options = resolve(config | ACCEPTS_NOTHING).options
    except SpecPlusConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if options is None or options.method in METHODS_WITHOUT_MODEL or options.is_hybrid:
        key = "mtp_strategy" if options is not None and options.is_hybrid else "method"
        raise argparse.ArgumentTypeError(
            f"{setting(key, config.get(key))} is not allowed: only the drafts of a model are recorded"
        )
    return config


def record(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Generate every prompt; return the traces."""
    from vllm import LLM, SamplingParams

    config = (args.speculative_config or DEFAULT_CONFIG) | ACCEPTS_NOTHING
    llm = LLM(
        model=args.model,
        speculative_config=config,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        max_num_seqs=args.batch,
        disable_log_stats=True,
    )
    tokenizer = llm.get_tokenizer()

    def ids(text: str | list[int], chat: bool) -> list[int]:
        if not isinstance(text, str):
            return text
        if chat:
            message = [{"role": "user", "content": text}]
            return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
        return list(tokenizer.encode(text, add_special_tokens=False))

    has_template = tokenizer.chat_template is not None
    drafts_by_request = capture_drafts(llm)
    prompts = [ids(row["prompt"], args.chat or (has_template and row.get("is_question", False))) for row in rows]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=True)
    traces = []
    for row, prompt, result in zip(rows, prompts, outputs, strict=True):
        output = list(result.outputs[0].token_ids)
        drafts = drafts_by_request[result.request_id]
        if len(drafts) not in (len(output) - 1, len(output)):
            raise SystemExit(f"{row['name']}: {len(output)} tokens and {len(drafts)} lists of drafts")
        trace = {"kind": row["kind"], "name": row["name"], "prompt": prompt, "output": output}
        trace["drafts"] = [*drafts, []][: len(output)]
        if "reference" in row:
            trace["reference"] = ids(row["reference"], False)
        traces.append(trace)
    return traces


def workload_rows(kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The prompts of `vllm-specplus compare`'s workloads as PROMPTS has them, and whether each is a question."""
    rows = []
    for kind in kinds:
        for prompt in workload(kind):
            text = prompt.messages[0]["content"] if prompt.text is None else prompt.text
            row = {"kind": kind, "name": prompt.name, "prompt": text, "is_question": prompt.text is None}
            rows.append(row | ({"reference": prompt.reference} if prompt.reference else {}))
    return rows


def capture_drafts(llm: Any) -> dict[str, list[list[int]]]:
    """From now on, the drafts of each request, a list a step; the dict grows while the engine runs."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    found: dict[str, list[list[int]]] = {}
    update = scheduler.update_draft_token_ids

    def capture(draft_token_ids: Any) -> None:
        for req_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = scheduler.requests.get(req_id)
            # A request in the middle of its prompt has drafts that nobody verifies.
            if request is not None and request.num_output_tokens:
                found.setdefault(_external_id(req_id), []).append(list(drafts))
        update(draft_token_ids)

    scheduler.update_draft_token_ids = capture
    return found


def _external_id(req_id: str) -> str:
    """The id under which vLLM's front end knows a request: it adds a random suffix for the engine."""
    return req_id.rsplit("-", 1)[0] if "-" in req_id else req_id


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="folder of the target model")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("prompts", metavar="PROMPTS", type=Path, nargs="?", help="JSON file of prompts")
    prompts.add_argument("--workload", choices=KINDS, nargs="+", help="prompts that `vllm-specplus compare` brings")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the traces go")
    parser.add_argument(
        "--speculative-config",
        type=config_of_draft_model,
        metavar="JSON",
        help=f"default: {json.dumps(DEFAULT_CONFIG)}",
    )
    parser.add_argument("--max-tokens", type=positive, default=400, metavar="N")
    parser.add_argument("--max-model-len", type=positive, default=4096, metavar="N")
    parser.add_argument("--batch", type=positive, default=16, metavar="N", help="requests at a time")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chat", action="store_true", help="put prompts into the model's chat template")
    parser.add_argument("--ignore-eos", action="store_true", help="write on after the end of a text")
    args = parser.parse_args()
    try:
        rows = workload_rows(args.workload) if args.workload else read_prompts(args.prompts)
        # A recording takes long: it does not begin where it cannot be kept.
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.open("a").close()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out {args.out}: cannot be written: {error}", file=sys.stderr)
        return 2
    traces = record(args, rows)
    args.out.write_text(json.dumps(traces) + "\n")
    tokens = sum(len(trace["output"]) for trace in traces)
    print(f"{args.out}: {len(traces)} traces, {tokens} output tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
