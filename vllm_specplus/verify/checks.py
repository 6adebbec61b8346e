"""Checks of the arguments of ``verify_draft_tokens``, and defaults that depend on other arguments.

Shapes, dtypes and devices are always checked. Values are checked on the CPU only: on an accelerator the host would
wait for the device.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from vllm_specplus.strategies import POLICIES, STRATEGIES, TRAITS
from vllm_specplus.verify.types import VerifyInputs

_FLOAT_LOGITS = (torch.float32, torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32)
_INT32_END = 2**31


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of the allowed words."""
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name} is {value!r}; allowed: {choices}")


def make_inputs(
    logits: torch.Tensor,
    cu_num_rows: torch.Tensor,
    draft_token_ids: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    strategy: str,
    policy: str,
    verify_window: int,
    max_candidate_len: int | None,
    max_rows: int | None,
    draft_logits: torch.Tensor | None = None,
    draft_rows: torch.Tensor | None = None,
) -> VerifyInputs:
    """Check the arguments of ``verify_draft_tokens`` and fill in its defaults.

    Raises:
        TypeError: an argument is not a tensor, not an integer, or has a wrong dtype.
        ValueError: an argument has a wrong shape, device, word or range.
    """
    check_choice("strategy", strategy, STRATEGIES)
    check_choice("policy", policy, POLICIES)
    _check_options(strategy, verify_window, max_candidate_len)
    if seeds is not None and positions is None:
        raise ValueError("positions is None; it is required with seeds, as both key the noise")
    arguments = {"cu_num_rows": cu_num_rows, "draft_token_ids": draft_token_ids}
    optional = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    optional |= {"seeds": seeds, "positions": positions, "draft_rows": draft_rows}
    arguments |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    _check_tensors(logits, temperature, arguments)
    _check_draft_logits(strategy, logits, draft_logits, draft_rows)
    if logits.device.type == "cpu":
        _check_values(cu_num_rows, logits.shape[0], temperature, top_p, top_k, min_p)
        if draft_rows is not None and draft_logits is not None:
            _check_range("draft_rows", draft_rows, -float("inf"), draft_logits.shape[0] - 1)
    cu = _as(torch.int64, cu_num_rows)
    num_columns = _num_columns(cu, max_rows)
    return VerifyInputs(
        logits=logits,
        cu_num_rows=cu,
        draft_token_ids=_as(torch.int64, draft_token_ids),
        temperature=_as(torch.float32, temperature),
        top_p=None if top_p is None else _as(torch.float32, top_p),
        top_k=None if top_k is None else _as(torch.int64, top_k),
        min_p=None if min_p is None else _as(torch.float32, min_p),
        seeds=_fresh_seeds(temperature) if seeds is None else _as(torch.int64, seeds),
        positions=_row_numbers(logits) if positions is None else _as(torch.int64, positions),
        strategy=strategy,
        policy=policy,
        # No draft has more drafts after it than a request has slots, so a larger window accepts nothing either.
        verify_window=min(verify_window, max(num_columns, 1)),
        max_candidate_len=None if max_candidate_len is None else min(max_candidate_len, logits.shape[1]),
        max_rows=num_columns,
        draft_logits=draft_logits,
        draft_rows=None if draft_rows is None else _as(torch.int64, draft_rows),
    )


def _as(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, contiguous. Calls that change nothing take a microsecond for each of a step's nine tensors."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(dtype).contiguous()


def _check_tensors(logits: torch.Tensor, temperature: torch.Tensor, others: Mapping[str, object]) -> None:
    """Check dtypes, shapes and devices; logits and temperature set the sizes of the others."""
    _check_tensor("logits", logits, _FLOAT_LOGITS, 2)
    if logits.shape[1] == 0:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; the vocabulary cannot be empty")
    _check_tensor("temperature", temperature, _FLOATS, 1)
    num_rows, num_reqs = logits.shape[0], temperature.shape[0]
    sizes = {"cu_num_rows": num_reqs + 1} | dict.fromkeys(("draft_token_ids", "positions", "draft_rows"), num_rows)
    tensors = {"temperature": temperature}
    for name, value in others.items():
        dtypes = _FLOATS if name in ("top_p", "min_p") else _INTEGERS
        tensors[name] = _check_tensor(name, value, dtypes, 1)
    for name, tensor in tensors.items():
        size = sizes.get(name, num_reqs)
        if tensor.shape[0] != size:
            raise ValueError(
                f"{name} has {tensor.shape[0]} elements; allowed: {size}, as logits has "
                f"{num_rows} rows and temperature {num_reqs} elements"
            )
        if tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}; allowed: {logits.device}, as logits")


def _check_draft_logits(
    strategy: str, logits: torch.Tensor, draft_logits: torch.Tensor | None, draft_rows: torch.Tensor | None
) -> None:
    if draft_logits is None:
        if draft_rows is not None:
            raise ValueError(
                "draft_rows is given without draft_logits; allowed: both, as it names rows of draft_logits"
            )
        return
    if not TRAITS[strategy].uses_draft_distribution:
        raise ValueError(
            f"draft_logits is given with strategy {strategy!r}; allowed: 'rejection', as no other strategy uses it"
        )
    _check_tensor("draft_logits", draft_logits, _FLOAT_LOGITS, 2)
    if draft_rows is not None and draft_logits.shape[0] == 0 < logits.shape[0]:
        raise ValueError(
            f"draft_logits has shape {tuple(draft_logits.shape)}; allowed with draft_rows: at least one row"
        )
    allowed = (logits.shape[0] if draft_rows is None else draft_logits.shape[0], logits.shape[1])
    if draft_logits.shape != allowed:
        raise ValueError(f"draft_logits has shape {tuple(draft_logits.shape)}; allowed: {allowed}, as logits")
    if draft_logits.device != logits.device:
        raise ValueError(f"draft_logits is on {draft_logits.device}; allowed: {logits.device}, as logits")


def _fresh_seeds(temperature: torch.Tensor) -> torch.Tensor:
    shape = temperature.shape
    return torch.randint(2**63 - 1, shape, dtype=torch.int64, device=temperature.device)


def _row_numbers(logits: torch.Tensor) -> torch.Tensor:
    return torch.arange(logits.shape[0], dtype=torch.int64, device=logits.device)


def _num_columns(cu: torch.Tensor, max_rows: int | None) -> int:
    """Columns of the output; without `max_rows` the device is asked once."""
    on_cpu = cu.device.type == "cpu"
    longest = max((end - start for start, end in pairwise(cu.tolist())), default=0) if on_cpu or max_rows is None else 0
    if max_rows is None:
        return longest
    _check_integer("max_rows", max_rows, 1)
    if longest > max_rows:
        raise ValueError(f"max_rows is {max_rows}; a request has {longest} rows")
    return max_rows


def _check_options(strategy: str, verify_window: int, max_candidate_len: int | None) -> None:
    _check_integer("verify_window", verify_window, 0)
    if max_candidate_len is not None:
        _check_integer("max_candidate_len", max_candidate_len, 1)
    if strategy != "topp":
        for name, value, off in (
            ("verify_window", verify_window, 0),
            ("max_candidate_len", max_candidate_len, None),
        ):
            if value != off:
                raise ValueError(
                    f"{name} is {value!r} with strategy {strategy!r}; allowed there: {off!r} "
                    "(it is an option of 'topp')"
                )


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; allowed: an integer, at least {least}")
    if not least <= value < _INT32_END:
        raise ValueError(f"{name} is {value}; allowed: an integer, at least {least} and below 2**31")


def _check_tensor(name: str, value: object, dtypes: Sequence[torch.dtype], ndim: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {type(value).__name__}; allowed: torch.Tensor")
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise ValueError(f"{name} is {kind}; allowed: a dense tensor, of layout torch.strided")
    if value.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} has dtype {value.dtype}; allowed: {allowed}")
    if value.dim() != ndim:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; allowed: {ndim} dimensions")
    return value


def _check_values(
    cu: torch.Tensor,
    rows: int,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> None:
    starts = cu.tolist()
    if starts[0] != 0 or starts[-1] != rows or any(b < a for a, b in pairwise(starts)):
        raise ValueError(f"cu_num_rows is {starts}; allowed: never falling, from 0 to {rows}, the rows of logits")
    _check_range("temperature", temperature, 0.0, torch.finfo(torch.float32).max)
    _check_range("top_p", top_p, 0.0, 1.0)
    _check_range("top_k", top_k, -1, float("inf"))
    _check_range("min_p", min_p, 0.0, 1.0)


def _check_range(name: str, values: torch.Tensor | None, least: float, most: float) -> None:
    if values is None or values.numel() == 0:
        return
    # The extremes are NaN where a value is, and a comparison with NaN is false.
    low, high = (value.item() for value in values.aminmax())
    if not least <= low <= high <= most:
        outside = values[~((values >= least) & (values <= most))]
        raise ValueError(f"{name} holds {outside[0].item()}; allowed: {least} to {most}")
