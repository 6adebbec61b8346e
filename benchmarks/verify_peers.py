"""vLLM's and FlashInfer's code for the same work, called as they call it, and the check of each.

*vLLM*: the work of its V2 runner's `RejectionSampler` for a batch without logits processors, in the same order. First
come the float32 copy, temperature, top-k and top-p of `Sampler.apply_sampling_params`, then `rejection_sample`. As
there, it works on chunks of requests whose float32 copy stays within 1 GiB. Its functions are loaded from its files,
which need be neither compiled nor installed. No `Sampler` is built, since that takes the whole configuration of an
engine. Its state per request is left out. The device reads parameters from host memory there, and from device memory
here. Questions about them on the host are left out too. `vllm.platforms`, `vllm.triton_utils` and packages whose
`__init__` would load the engine are replaced by stand-ins. Its sampling filter does not run under Triton's interpreter
(a loop's index is a plain integer there), so settings with a filter are left out.

*FlashInfer*: softmax in torch, then `top_k_renorm_probs`, `top_p_renorm_probs` and `chain_speculative_sampling`. A
one-hot draft distribution is made beforehand, not timed. Its sampling of every row, drafts or none, is a method apart.
It draws its own random numbers, so it is only checked that drafts are copied and that every drawn token is in the
nucleus.
"""

import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu_clock import DEVICE
from verify_cases import Case, Setting, WrongOutputError, check_nucleus, check_same, check_tokens

from vllm_specplus.verify import VerifyOutput

CHUNK_BYTES = 1 << 30  # MAX_CHUNK_BYTES of vllm/v1/worker/gpu/spec_decode/rejection_sampler.py

# Packages whose modules are wanted without what their `__init__` imports.
_SHELLS = ("", "model_executor", "v1/watermarking", "v1/watermarking/prfs", "v1/worker/gpu/spec_decode")


class UnavailableError(Exception):
    """A peer cannot do this here; the message says why."""


class _Platform:
    """The members that vLLM's sampling code uses of its platform."""

    device_type = DEVICE
    num_sms = 132  # where there is no GPU: an H100's

    def is_cuda_alike(self) -> bool:
        return self.device_type == "cuda"

    is_cuda = is_cuda_alike

    def num_compute_units(self, device: int = 0) -> int:
        if not torch.cuda.is_available():
            return self.num_sms
        return torch.cuda.get_device_properties(device).multi_processor_count


def find_vllm(folder: Path | None) -> Path:
    """vLLM's package folder: in `folder` if given, else the installed one.

    Raises:
        UnavailableError: it is not there.
    """
    if folder is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise UnavailableError("vLLM is not installed; --vllm names a folder with its files")
        return Path(spec.submodule_search_locations[0])
    if not (folder / "vllm" / "v1").is_dir():
        raise UnavailableError(f"{folder} does not hold vLLM's files")
    return folder / "vllm"


def vllm_version(root: Path) -> str | None:
    """The version that vLLM's files say they are."""
    path = root / "_version.py"
    found = re.search(r"__version__ = version = '(.+)'", path.read_text()) if path.exists() else None
    return found.group(1) if found else None


@cache
def _load_vllm(root: Path) -> types.SimpleNamespace:
    """The functions that are timed.

    Raises:
        UnavailableError: they cannot be imported.
    """
    try:
        import triton
        import triton.language as tl
        from triton.language.extra import libdevice

        for shell in _SHELLS:
            module = types.ModuleType(".".join(["vllm", *Path(shell).parts]))
            module.__path__ = [str(root / shell)]
            sys.modules[module.__name__] = module
        triton_utils, platforms = types.ModuleType("vllm.triton_utils"), types.ModuleType("vllm.platforms")
        vars(triton_utils).update(tl=tl, triton=triton, tldevice=libdevice, HAS_TRITON=True)
        vars(platforms).update(current_platform=_Platform())
        sys.modules |= {module.__name__: module for module in (triton_utils, platforms)}
        gpu = "vllm.v1.worker.gpu"
        return types.SimpleNamespace(
            apply_temperature=importlib.import_module(f"{gpu}.sample.gumbel").apply_temperature,
            apply_filters=importlib.import_module("vllm.v1.sample.ops.topk_topp_triton").apply_top_k_top_p_triton,
            platform=platforms.current_platform,
            rejection_sample=importlib.import_module(f"{gpu}.spec_decode.rejection_sampler_utils").rejection_sample,
        )
    except Exception as error:
        # Whatever a vLLM of another version or half of one raises, the other methods can be timed.
        raise UnavailableError(f"vLLM cannot be imported: {error!r}") from error


class VllmPath:
    """One case as vLLM's `RejectionSampler` sees it."""

    filters_run_on_cpu = False

    def __init__(self, case: Case, root: Path) -> None:
        """Raises UnavailableError."""
        self.vllm, self.case = _load_vllm(root), case
        setting, device = case.setting, case.logits.device
        if device.type == "cpu" and setting.top_p is not None and not self.filters_run_on_cpu:
            raise UnavailableError("vLLM's top-p kernel does not run under Triton's interpreter")
        width = case.num_drafts + 1
        self.requests = torch.arange(case.batch, dtype=torch.int32, device=device)
        self.request_of_row = self.requests.repeat_interleave(width)
        self.place_of_row = torch.arange(width, dtype=torch.int32, device=device).repeat(case.batch)
        # vLLM keeps the token fed in at each row: the draft tested there is that of the next row.
        self.fed_in = case.draft_token_ids.roll(1).to(torch.int32).clamp(min=0)
        self.temperature = case.fill(setting.temperature, torch.float32)
        self.top_p = None if setting.top_p is None else case.fill(setting.top_p, torch.float32)
        self.top_k = None if setting.top_k is None else case.fill(setting.top_k, torch.int32)
        step = max(1, CHUNK_BYTES // (4 * case.logits.shape[1]) // width)
        self.chunks = [(start, min(start + step, case.batch)) for start in range(0, case.batch, step)]

    def run(self) -> VerifyOutput:
        """Sample all requests; past `num_tokens`, `token_ids` holds anything."""
        parts = [self._verify(*chunk) for chunk in self.chunks]
        if len(parts) == 1:
            return VerifyOutput(*parts[0])
        return VerifyOutput(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def check(self, output: VerifyOutput) -> int:
        """Check filter and temperature by definition, and the sampling by our torch backend on what they left.

        Raises:
            WrongOutputError: one of them is wrong.
        """
        processed = torch.cat([self._process(*chunk) for chunk in self.chunks])
        case, setting = self.case, self.case.setting
        if not setting.is_greedy:
            in_nucleus = processed > float("-inf")
            check_nucleus(case, in_nucleus)
            # A division may be off by a unit or two in the last place.
            if not torch.allclose(
                processed.where(in_nucleus, 0.0), case.scaled().where(in_nucleus, 0.0), rtol=1e-6, atol=0
            ):
                raise WrongOutputError("logits are not scaled by the temperature")
            setting = Setting(1.0)
        slots = torch.arange(output.token_ids.shape[1], device=case.logits.device)
        tokens = torch.where(slots < output.num_tokens[:, None], output.token_ids.long(), -1)
        filtered = replace(case, logits=processed, setting=setting)
        return check_same(filtered, "rejection", VerifyOutput(tokens, output.num_tokens))

    def _rows(self, start: int, end: int) -> slice:
        width = self.case.num_drafts + 1
        return slice(start * width, end * width)

    def _process(self, start: int, end: int) -> torch.Tensor:
        rows = self._rows(start, end)
        logits, request_of_row = self.case.logits[rows], self.request_of_row[rows]
        if self.case.setting.is_greedy:
            return logits
        z = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        self.vllm.apply_temperature(z, request_of_row, self.temperature)
        top_k = None if self.top_k is None else self.top_k[request_of_row]
        top_p = None if self.top_p is None else self.top_p[request_of_row]
        return z if top_k is None and top_p is None else self.vllm.apply_filters(z, top_k, top_p)

    def _verify(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows(start, end)
        return self.vllm.rejection_sample(
            self._process(start, end),
            None,
            self.fed_in[rows],
            self.case.cu_num_rows[start : end + 1] - rows.start,
            self.case.positions[rows],
            self.requests[start:end],
            self.request_of_row[rows],
            self.place_of_row[rows],
            self.temperature,
            self.case.seeds,
            self.case.num_drafts,
        )


class FlashInferPath:
    """One case for FlashInfer: the chain of drafts, or every row sampled by itself."""

    def __init__(self, case: Case, chain: bool) -> None:
        """Raises UnavailableError."""
        if case.setting.is_greedy:
            raise UnavailableError("FlashInfer's sampling has no greedy form")
        if case.logits.device.type != "cuda":
            raise UnavailableError("FlashInfer needs a GPU")
        try:
            self.sampling = importlib.import_module("flashinfer.sampling")
        except Exception as error:
            # Whatever it raises without its own libraries, the other methods can be timed.
            raise UnavailableError(f"FlashInfer cannot be imported: {error!r}") from error
        self.case, self.chain = case, chain
        self.top_p, self.top_k = (
            None if value is None else torch.full((case.num_rows,), value, dtype=dtype, device="cuda")
            for value, dtype in ((case.setting.top_p, torch.float32), (case.setting.top_k, torch.int32))
        )
        if chain:
            drafts = case.draft_token_ids.view(case.batch, -1)[:, :-1]
            self.drafts = drafts.int().contiguous()
            shape = (*drafts.shape, case.logits.shape[1])
            self.draft_probs = torch.zeros(shape, device="cuda").scatter_(2, drafts[:, :, None], 1.0)

    def run(self) -> torch.Tensor:
        """``[batch, num_drafts + 1]`` for the chain, -1 past its end; else ``[num_rows]``."""
        s, probs = self.sampling, self.case.scaled().softmax(dim=-1)
        if self.chain:
            if self.top_k is not None:
                probs = s.top_k_renorm_probs(probs, self.top_k)
            if self.top_p is not None:
                probs = s.top_p_renorm_probs(probs, self.top_p)
            probs = probs.view(self.case.batch, -1, probs.shape[-1])
            return s.chain_speculative_sampling(self.draft_probs, self.drafts, probs)[0]
        if self.top_k is not None:
            probs = s.top_k_renorm_probs(probs, self.top_k)
        return s.sampling_from_probs(probs) if self.top_p is None else s.top_p_sampling_from_probs(probs, self.top_p)

    def check(self, output: torch.Tensor) -> int:
        """Raises WrongOutputError: a token is neither a draft nor one of the nucleus."""
        rows = torch.arange(self.case.num_rows, device=output.device)
        tokens = output.long()
        if self.chain:
            last = (tokens >= 0).sum(dim=1) - 1
            slots = torch.arange(tokens.shape[1], device=output.device)
            copied = slots < last[:, None]
            drafts = self.case.draft_token_ids.view(self.case.batch, -1)
            if bool((last < 0).any()) or bool((copied & (tokens != drafts)).any()):
                raise WrongOutputError("a request emits nothing, or accepts what is not its draft")
            rows = rows.view(self.case.batch, -1).gather(1, last[:, None])[:, 0]
            tokens = tokens.gather(1, last[:, None])[:, 0]
        check_tokens(self.case, rows, tokens)
        return 0


def vllm_path(root: Path | str) -> Callable[[Case], Any]:
    """Makes `VllmPath` of a case; a string in place of the folder says why there is none."""

    def make(case: Case) -> VllmPath:
        if isinstance(root, str):
            raise UnavailableError(root)
        return VllmPath(case, root)

    return make
