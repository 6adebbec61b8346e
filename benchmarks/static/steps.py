"""The steps whose cost is estimated. Each is launched on `meta` tensors, and replayed on a CPU.

*Rows.* `peaked` and `flat` are those of `verify_cases.py`. `ties` are flat rows whose logits are rounded to halves, so
that each holds some twenty values. In `certain` rows one token has nearly all of the mass, and it is the draft.

*Strategies* are called by `vllm_specplus.kernels.verify.verify`, with inputs that are made beforehand. Under greedy all
are one. *vLLM* is the path of `verify_peers.py`: vLLM's Triton kernels, and operations of torch. *drafts* are calls of
the other kernels, each by its function.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from static.drafts import CALLS
from verify_cases import OPTIONS, SETTINGS, Case, Setting, WrongOutputError, check_same, make_case
from verify_peers import VllmPath, find_vllm

import vllm_specplus
from vllm_specplus.kernels import verify as verify_kernels
from vllm_specplus.verify.checks import make_inputs

STRATEGIES = ("rejection", "topp", "target_match")
VLLM, DRAFTS = "vLLM", "drafts"
ROWS = ("peaked", "flat")
# Settings that are hard for the search of the nucleus, and the other variants of kernels.
FURTHER_SETTINGS = {
    "top-p 0.5": Setting(0.8, top_p=0.5),
    "top-p 0.999": Setting(0.8, top_p=0.999),
    "min-p": Setting(0.8, min_p=0.001),
    "top-p 0.1": Setting(0.8, top_p=0.1),
    "top-k 1000": Setting(0.8, top_k=1000),
}
WITH_TIES = ("top-p", "top-p+top-k")
SAMPLED = "T=0.8, sampled drafts"
MANY_DRAFTS = 16
OF_MANY_DRAFTS = {"rejection": ("greedy", "T=0.8", "top-p"), "target_match": ("T=0.8", "top-p")}
OUR_KERNELS = Path(vllm_specplus.__file__).parent / "kernels"
_CERTAIN_LOGIT, _TIE_STEP = 100.0, 0.5
_ALL_SETTINGS = SETTINGS | FURTHER_SETTINGS | {SAMPLED: SETTINGS["T=0.8"]}
# vLLM filters fewer rows by other kernels, in one launch after the other. A few rows would not stand for many.
_MOST_ROWS_SPLIT = 64


class Call(Protocol):
    """A call of the step's own entry point."""

    def run(self) -> Any: ...

    def check(self, output: Any) -> Any:
        """Raise an error if the output is wrong."""


@dataclass(frozen=True)
class Shape:
    num_reqs: int = 64
    num_rows: int = 5  # of each request: its drafts and one
    vocab_size: int = 151_936
    dtype: str = "bfloat16"

    @property
    def all_rows(self) -> int:
        return self.num_reqs * self.num_rows

    @property
    def logits_bytes(self) -> int:
        return self.all_rows * self.vocab_size * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Step:
    """One call, by its method (a strategy, vLLM, or drafts), its setting (or a drafting function) and rows."""

    method: str
    setting: str
    rows: str
    shape: Shape

    @property
    def name(self) -> str:
        many = f"{MANY_DRAFTS} drafts" if self.has_many_drafts and self.rows in ROWS else ""
        return ", ".join(part for part in (self.method, self.setting, self.rows, many) if part)

    @property
    def has_many_drafts(self) -> bool:
        """Whether it is one of the steps with `MANY_DRAFTS`."""
        return self.shape.num_rows == MANY_DRAFTS + 1

    @property
    def is_of_all_strategies(self) -> bool:
        """Whether it stands for every strategy: under greedy they are one."""
        return self.method in STRATEGIES and self.setting == "greedy"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where the source of its kernels lies."""
        return (vllm_folder(),) if self.method == VLLM else (OUR_KERNELS,)

    def num_replayed(self, most: int) -> int:
        """How many of its requests are replayed, of `most` that may be; in `certain` rows all are alike."""
        return 1 if self.rows == "certain" else min(most, self.shape.num_reqs)

    def call(self, num_reqs: int, device: str) -> Call:
        """The call for `num_reqs` requests."""
        shape = replace(self.shape, num_reqs=num_reqs)
        if self.method == DRAFTS:
            return CALLS[self.setting](shape, device)
        case = make_rows(self.rows, _ALL_SETTINGS[self.setting], shape, device, is_sampled=self.setting == SAMPLED)
        if self.method == VLLM:
            return VllmCall(case, num_reqs / self.shape.num_reqs)
        return VerifyCall(case, self.method)


def steps(shape: Shape) -> Iterator[Step]:
    """All steps of a shape, and some with many drafts."""
    for method in (*STRATEGIES, VLLM):
        for setting in SETTINGS:
            is_another_name = method in STRATEGIES[1:] and setting == "greedy"
            is_split = method == VLLM and "top-p" in setting and shape.all_rows <= _MOST_ROWS_SPLIT
            if not (is_another_name or is_split):
                yield from (Step(method, setting, rows, shape) for rows in ROWS)
    for method in STRATEGIES:
        for setting in FURTHER_SETTINGS:
            yield from (Step(method, setting, rows, shape) for rows in ROWS)
        yield from (Step(method, setting, "ties", shape) for setting in WITH_TIES)
    yield from (Step("rejection", SAMPLED, rows, shape) for rows in ROWS)
    many = replace(shape, num_rows=MANY_DRAFTS + 1)
    for method, settings in OF_MANY_DRAFTS.items():
        yield from (Step(method, setting, "certain", many) for setting in settings)
        yield Step(method, "top-p", "peaked", many)
    yield from (Step(DRAFTS, function, "", shape) for function in CALLS)


class VerifyCall:
    """One strategy for one case."""

    def __init__(self, case: Case, strategy: str) -> None:
        setting = case.setting
        self.case, self.strategy = case, "greedy" if setting.is_greedy else strategy
        self.inputs = make_inputs(
            logits=case.logits,
            cu_num_rows=case.cu_num_rows,
            draft_token_ids=case.draft_token_ids,
            temperature=case.fill(setting.temperature, torch.float32),
            top_p=None if setting.top_p is None else case.fill(setting.top_p, torch.float32),
            top_k=None if setting.top_k is None else case.fill(setting.top_k, torch.int64),
            min_p=None if setting.min_p is None else case.fill(setting.min_p, torch.float32),
            seeds=case.seeds,
            positions=case.positions,
            strategy=self.strategy,
            policy="normal",
            max_rows=case.num_drafts + 1,
            draft_logits=case.draft_logits,
            **{"verify_window": 0, "max_candidate_len": None} | OPTIONS.get(self.strategy, {}),
        )

    def run(self) -> Any:
        return verify_kernels.verify(self.inputs)

    def check(self, output: Any) -> int:
        return check_same(self.case, self.strategy, output)


class _OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, for which vLLM's code chooses its sizes."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


class VllmCall(VllmPath):
    """vLLM's path for one case; a part of the requests takes that part of a GPU's processors."""

    filters_run_on_cpu = True

    def __init__(self, case: Case, share: float) -> None:
        super().__init__(case, vllm_folder())
        self.vllm.platform.num_sms = max(1, round(type(self.vllm.platform).num_sms * share))
        vars(sys.modules["vllm.v1.sample.ops.topk_topp_triton"])["_SPLIT_MAX_BATCH"] = 0
        self._filter = self.vllm.apply_filters
        self._processed: dict[int, torch.Tensor] = {}

    def check(self, output: Any) -> int:
        """Say so where vLLM's answer is not as defined: its filter may leave out logits that tie at the border."""
        try:
            return super().check(output)
        except WrongOutputError as error:
            print(f"vLLM: {error}", file=sys.stderr)
            return 0

    def _process(self, start: int, end: int) -> torch.Tensor:
        """As the base class's, once for each chunk: the check asks for it again."""
        if self.case.logits.device.type != "cpu":
            return super()._process(start, end)
        if start not in self._processed:
            self.vllm.apply_filters = lambda z, *filters: self._filter(z.as_subclass(_OnGpu), *filters)
            self._processed[start] = super()._process(start, end).as_subclass(torch.Tensor)
            self.vllm.apply_filters = self._filter
        return self._processed[start]


@cache
def vllm_folder() -> Path:
    """vLLM's package. It is asked for before its modules are imported, since these take the package's place."""
    return find_vllm(None)


def make_rows(kind: str, setting: Setting, shape: Shape, device: str, is_sampled: bool) -> Case:
    """The case of a kind of rows, with the draft model's logits if drafts are sampled; on `meta` without numbers."""
    num_drafts, dtype = shape.num_rows - 1, getattr(torch, shape.dtype)
    if device == "meta":
        case = _without_numbers(setting, shape)
    else:
        like = kind if kind in ROWS else "flat"
        case = make_case(like, setting, shape.num_reqs, num_drafts, shape.vocab_size, device, seed=0)
    logits = case.logits
    if kind == "ties":
        logits = (logits / _TIE_STEP).round() * _TIE_STEP
    elif kind == "certain":
        logits = logits.scatter(1, case.draft_token_ids.clamp(min=0)[:, None], _CERTAIN_LOGIT)
    if kind not in ROWS:
        drafts = torch.where(case.draft_token_ids < 0, -1, logits.argmax(dim=1))
        case = replace(case, draft_token_ids=drafts)
    # A draft model that knows as much, but is less sure.
    draft_logits = logits.to(dtype) * 0.9 if is_sampled else None
    return replace(case, logits=logits.to(dtype), draft_logits=draft_logits)


def _without_numbers(setting: Setting, shape: Shape) -> Case:
    def vector(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    return Case(
        setting,
        shape.num_reqs,
        shape.num_rows - 1,
        torch.empty(shape.all_rows, shape.vocab_size, dtype=torch.bfloat16, device="meta"),
        vector(shape.all_rows),
        vector(shape.num_reqs),
        vector(shape.all_rows),
        vector(shape.num_reqs + 1, torch.int32),
    )
