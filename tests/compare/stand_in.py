"""An engine that counts instead of computing: it says what it was asked, at a speed that its config names."""

import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from pydantic import TypeAdapter

from vllm_specplus.compare.counts import Counts
from vllm_specplus.compare.processes import RefusedError
from vllm_specplus.compare.prompts import Prompt
from vllm_specplus.compare.runs import PARTS, Best, EngineOptions, Profile, Run

NAME = "tests.compare.stand_in:serve"
TOKENS = [5, 6, 7, 8]


class StandIn:
    """`num_speculative_tokens` is how many times as fast as without speculation it is; `model` is what goes wrong."""

    def __init__(self, options: EngineOptions, prompts: list[Prompt], max_tokens: int):
        config = options.config or {}
        self.speed = config.get("num_speculative_tokens", 1)
        self.fault = config.get("model", "")
        self.prompts = prompts
        self.num_runs = 0
        if "--nonsense" in options.words:
            raise RefusedError("--engine-args: unrecognized arguments: --nonsense")
        if self.fault == "refuses":
            raise RefusedError("a prompt has no token")
        if self.fault == "start":
            raise ValueError("no memory\nis left")
        if self.fault == "validation":
            TypeAdapter(int).validate_python("x")

    def samples_wrongly(self) -> bool:
        return self.fault == "samples wrongly"

    def warm_up(self, concurrency: int) -> None:
        return None

    def run(self, order: Sequence[int], concurrency: int, temperature: float, before: Sequence[int]) -> Run:
        self.num_runs += 1
        if self.fault == "killed" and self.num_runs == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault in signal.Signals.__members__ and self.num_runs == 2:
            os.kill(os.getppid(), signal.Signals[self.fault])
        tokens = [list(TOKENS) for _ in order]
        if self.fault in ("other text", "near tie"):
            tokens[-1] = [5, 6, 9]
        if self.fault == "near tie, then other text":
            tokens[0], tokens[-1] = [5, 6, 9], [5, 666]
        counts = Counts(2, {"model": 4}, {"model": [1, 1]}) if self.speed > 1 else Counts()
        num_tokens = sum(map(len, tokens))
        seconds = num_tokens / (100 * self.speed) * (1 + self.num_runs / 100)
        return Run(seconds, tokens, len(order), 3 * len(order), counts)

    def profile(self, temperature: float) -> Profile:
        texts = [[("a", "target"), ("<b>", "model")] for _ in self.prompts]
        return Profile(texts, dict.fromkeys(PARTS, 0.2))

    def best_two(self, number: int, token_ids: list[int]) -> list[Best]:
        if token_ids == [5]:
            return [Best(6, "six", 20.0), Best(7, "seven", 10.0)]
        assert token_ids == [5, 6]
        return [Best(7, "seven", 20.0), Best(9, "nine", 19.9)]

    def text(self, token_ids: list[int]) -> str:
        return f"<{token_ids[0]}>"

    def dtype(self) -> str:
        return "bfloat16" if os.environ.get("STAND_IN_BF16") else "float32"


def serve(pipe: Connection, *args: Any) -> None:
    stand_in = StandIn(*args)
    pipe.send("ready")
    while True:
        try:
            method, *rest = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(stand_in, method)(*rest))
