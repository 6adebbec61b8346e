"""An engine that dies of a fault of vLLM's own amid a server's requests, and what the server's log has of them."""

import base64
import json
import random
import re
import string
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.e2e.serving import Server, python_path, serve
from tests.e2e.v1.test_predicted_outputs import CONFIG
from vllm_specplus.requests.options import RESOLVED_ENTRY

# The options of a server whose engine is to die, and its environment. No answer comes to its end before.
_OPTIONS = ("--worker-extension-cls", f"{__name__}.DyingWorker", "--enable-log-requests")
_OPTIONS += ("--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))
_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": python_path()}
_SECONDS_OF_REST = 3.0
_NUM_RUNNING, _NUM_NEW = 6, 6
_WINDOW = 8  # bytes, or tokens of one byte, that must not be in the log in a row
_WINDOW_OF_OUTPUT = 24  # the model's own words are also in logs
_LENGTH_OF_OUTPUT = 200  # a search for more takes long


class DyingWorker:
    """vLLM adds this class to its worker's."""

    def die_of_the_next_requests(self) -> None:
        """Let the step fail in which requests begin; before it the engine rests, so that several come together."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        execute = runner.execute_model

        def fail_or_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.scheduled_new_reqs:
                raise RuntimeError("out of memory")
            return execute(scheduler_output, *args, **kwargs)

        runner.execute_model = fail_or_execute
        time.sleep(_SECONDS_OF_REST)


@dataclass
class _Stream:
    """A streaming request, what has come of its answer, and whether it ended with an error."""

    path: str
    body: dict[str, Any]
    secrets: list[bytes]
    text: str = ""
    has_failed: bool = False


def _secret(rng: random.Random) -> str:
    """A text that is nowhere else by chance."""
    return "".join(rng.choices(string.ascii_lowercase, k=40))


def _streams(first: int, number: int) -> Iterator[_Stream]:
    """Requests with references in each form, some of them chats."""
    for i in range(first, first + number):
        rng = random.Random(i)
        prompt, reference = _secret(rng), _secret(rng)
        body = {"model": "tiny", "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}
        if i % 3 == 0:
            body["messages"] = [{"role": "user", "content": prompt}]
            body["prediction"] = {"type": "content", "content": reference}
            body["aux_info"] = True
        else:
            body["prompt"] = prompt
            forms = {"sp_advice_prompt": reference, "sp_advice_prompt_token_ids": list(reference.encode())}
            name = list(forms)[i % 3 - 1]
            body["vllm_xargs"] = {name: forms[name]}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        yield _Stream(path, body, [prompt.encode(), reference.encode()])


def _read(server: Server, stream: _Stream, has_begun: threading.Semaphore) -> None:
    with httpx.stream("POST", server.address + stream.path, json=stream.body, timeout=120) as response:
        stream.has_failed = response.status_code == 500
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                stream.has_failed = True
                continue
            for choice in chunk["choices"]:
                stream.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            if stream.text:
                has_begun.release()


def check_a_dying_engine(model: Path, folder: Path) -> None:
    """Start a server and let its engine die: nothing of its clients is in the log, which goes into the folder."""
    options = ["--speculative-config", json.dumps(CONFIG), *_OPTIONS]
    with serve(model, folder, *options, VLLM_PLUGINS="specplus", **_ENVIRONMENT) as server:
        _let_it_die(server)


def _let_it_die(server: Server) -> None:
    """Let the engine die: all streams end with an error, and nothing that a client wrote or got is in the log."""
    running, new = list(_streams(0, _NUM_RUNNING)), list(_streams(_NUM_RUNNING, _NUM_NEW))
    with ThreadPoolExecutor(_NUM_RUNNING + _NUM_NEW + 1) as pool:
        has_begun = [threading.Semaphore(0) for _ in running]
        reads = [pool.submit(_read, server, *each) for each in zip(running, has_begun, strict=True)]
        assert all(each.acquire(timeout=120) for each in has_begun)
        method = {"method": "die_of_the_next_requests"}
        rest = pool.submit(httpx.post, f"{server.address}/collective_rpc", json=method, timeout=60)
        time.sleep(_SECONDS_OF_REST / 3)
        reads += [pool.submit(_read, server, stream, threading.Semaphore(0)) for stream in new]
        rest.result().raise_for_status()
        for read in reads:
            read.result()
    assert all(stream.has_failed for stream in running + new)
    log = server.log()
    (dump,) = re.findall("Dumping scheduler output for model execution: .*", log)
    # The step had new requests with references of this length, and drafts of those that ran.
    length = len(new[0].secrets[1])
    assert re.search(rf"'{RESOLVED_ENTRY}': {{[^}}]*'token_ids': {length} tokens", dump), dump
    assert re.search(r"'[1-9]\d* drafts'", dump), dump
    for stream in running + new:
        for secret in stream.secrets:
            assert forms_in(log, secret) == set()
        assert forms_in(log, stream.text.strip()[:_LENGTH_OF_OUTPUT].encode(), _WINDOW_OF_OUTPUT) == set()


def forms_in(log: str, secret: bytes, window: int = _WINDOW) -> set[str]:
    """The forms in which some bytes in a row of a secret are in a log; its tokens are its bytes."""
    # Tokens of four or eight bytes are the text with zeros in between.
    without_zeros = re.sub(r"\\x00|\\u0000|\x00", "", log).encode()
    numbers = " ".join(["", *re.findall(r"\d+", log), ""])
    packed = re.sub(r"\s", "", log)
    found = set()
    for start in range(len(secret) - window + 1):
        part = secret[start : start + window]
        if len(set(part)) < window // 2:
            # Spaces and the like are in every log.
            continue
        if part in without_zeros:
            found.add("text")
        if f" {' '.join(map(str, part))} " in numbers:
            found.add("token ids")
        for width in (1, 4, 8):
            data = np.frombuffer(part, np.uint8).astype(f"<u{width}").tobytes()
            if data.hex() in packed.lower():
                found.add("hex")
            # The first and the last characters depend on what is around.
            for shift, num_first in enumerate((0, 2, 3)):
                num_last = (0, 3, 2)[(shift + len(data)) % 3]
                encoded = base64.b64encode(bytes(shift) + data).decode()
                if encoded[num_first : len(encoded) - num_last] in packed:
                    found.add("base64")
    return found
