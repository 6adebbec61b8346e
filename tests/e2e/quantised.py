"""Quantised drafts: copies of a tiny checkpoint in the layouts that vLLM loads, and hybrids with them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.model_executor.layers.linear import QKVParallelLinear, UnquantizedLinearMethod

from tests.e2e.drafters import APPEND
from tests.e2e.engines import PROMPTS, Engine, engine
from tests.e2e.references import stats

_GROUP = 32
_BITS, _PER_WORD = 4, 8
_MIDDLE = 8
# AWQ packs the columns of a word in this order.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Layout = tuple[dict[str, Any], Callable[[Tensor], dict[str, Tensor]]]


def _words(values: Tensor, order: Iterable[int] = range(_PER_WORD)) -> Tensor:
    """Pack the last axis of 4-bit `values`, eight to an int32."""
    parts = values.to(torch.int64).unflatten(-1, (-1, _PER_WORD))
    packed = sum(parts[..., column] << (_BITS * place) for place, column in enumerate(order))
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).contiguous()


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[in, out] 4-bit values of a weight [out, in], and [groups, out] scales."""
    groups = weight.T.unflatten(0, (-1, _GROUP))
    scales = groups.abs().amax(dim=1) / (_MIDDLE - 1)
    values = (groups / scales[:, None]).round().clamp(-_MIDDLE, _MIDDLE - 1) + _MIDDLE
    return values.flatten(0, 1), scales.half()


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    values, scales = _rounded(weight)
    # This layout stores a zero point less one.
    zeros = torch.full(scales.shape, _MIDDLE - 1)
    rows = torch.arange(values.shape[0], dtype=torch.int32) // _GROUP
    return {"qweight": _words(values.T).T.contiguous(), "qzeros": _words(zeros), "scales": scales, "g_idx": rows}


def _awq(weight: Tensor) -> dict[str, Tensor]:
    values, scales = _rounded(weight)
    zeros = torch.full(scales.shape, _MIDDLE)
    return {"qweight": _words(values, _AWQ_ORDER), "qzeros": _words(zeros, _AWQ_ORDER), "scales": scales}


def _packed(weight: Tensor) -> dict[str, Tensor]:
    values, scales = _rounded(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _words(values.T), "weight_scale": scales.T.contiguous(), "weight_shape": shape}


def _int8(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def _quark(weight: Tensor) -> dict[str, Tensor]:
    tensors = _int8(weight)
    scales = tensors["weight_scale"].flatten()
    return tensors | {"weight_scale": scales, "weight_zero_point": torch.zeros(len(scales), dtype=torch.int8)}


_INT4 = {"num_bits": _BITS, "type": "int", "symmetric": True}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_QUARK_INT8 = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True}
LAYOUTS: dict[str, Layout] = {
    "gptq": (
        {
            "quant_method": "gptq",
            "bits": _BITS,
            "group_size": _GROUP,
            "desc_act": False,
            "sym": True,
            # Otherwise vLLM takes the names from the file, and there an EAGLE head's layers have other numbers.
            "modules_in_block_to_quantize": [["_proj", "fc"]],
        },
        _gptq,
    ),
    "inc": (
        {
            "quant_method": "inc",
            "bits": _BITS,
            "group_size": _GROUP,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
        },
        _gptq,
    ),
    "awq": ({"quant_method": "awq", "bits": _BITS, "group_size": _GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "quark": (
        {
            "quant_method": "quark",
            "export": {"kv_cache_group": [], "pack_method": "order"},
            "global_quant_config": {
                "weight": _QUARK_INT8 | {"is_dynamic": False},
                "input_tensors": _QUARK_INT8 | {"is_dynamic": True},
            },
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": ["lm_head"],
        },
        _quark,
    ),
    "compressed-tensors-w4a16": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": _INT4 | {"strategy": "group", "group_size": _GROUP},
                }
            },
        },
        _packed,
    ),
    "compressed-tensors-int8": (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": _INT8 | {"strategy": "channel", "dynamic": False},
                    "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
                }
            },
        },
        _int8,
    ),
}


def quantise(source: Path, folder: Path, layout: str) -> Path:
    """Write a copy of a checkpoint with its projections in a layout of `LAYOUTS`."""
    settings, parts_of = LAYOUTS[layout]
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(("_proj.weight", "fc.weight")):
            weights |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts_of(tensor).items()}
        else:
            weights[name] = tensor
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


# vLLM's build for a CPU without AVX-512 has no product with four-bit weights.
_NEEDS_AVX512 = ("gptq", "inc", "awq", "compressed-tensors-w4a16")
# Drafts that vLLM's CPU build loads: the method, and the kind of drafter. It makes no quantised layers of an EAGLE head
# for `inc`.
_LOADED = [
    (method, drafter)
    for drafter in ("draft_model", "eagle")
    for method in (*LAYOUTS, "fp8_per_channel")
    if (method, drafter) != ("inc", "eagle")
]
# The plugin does not look into a draft model, so one of those that any CPU runs is enough for CI.
_QUICK = "compressed-tensors-int8", "draft_model"
CASES = [pytest.param(*kind, marks=[] if kind == _QUICK else [pytest.mark.slow]) for kind in _LOADED]
# vLLM takes none of these methods in float32.
HALF = {"dtype": "bfloat16"}


def config_of(method: str, drafter: str, draft: Path, folder: Path, named: str | None = None) -> dict[str, Any]:
    """A hybrid with a quantised draft.

    Args:
        method: of `LAYOUTS`, or one that quantises any checkpoint.
        drafter: "draft_model" or "eagle".
        draft: the draft model, with the head in it.
        folder: is written if the method needs a checkpoint of its own.
        named: another name of the checkpoint's method.
    """
    if method in _NEEDS_AVX512 and not torch.cpu._is_avx512_supported():
        pytest.skip(f"vLLM runs {method} with AVX-512 alone, which this CPU has not")
    source = draft / drafter if drafter == "eagle" else draft
    model = quantise(source, folder, method) if method in LAYOUTS else source
    quant_method = named or (LAYOUTS[method][0]["quant_method"] if method in LAYOUTS else method)
    drafts = {"method": drafter, "model": str(model), "quantization": quant_method}
    return APPEND | {"verify_strategy": "target_match"} | drafts


def is_quantised(e: Engine) -> bool:
    """Whether the draft's attention layers have quantised weights."""
    drafter = getattr(e.runner, "speculator", None) or e.runner.drafter
    layers = [layer for layer in drafter.model.modules() if isinstance(layer, QKVParallelLinear)]
    return bool(layers) and not any(isinstance(layer.quant_method, UnquantizedLinearMethod) for layer in layers)


def check(tiny: Path, config: dict[str, Any], plain: list[list[int]], max_tokens: int) -> None:
    """Check a hybrid's text, that its draft is quantised, and that the target accepts drafts of it."""
    with engine(tiny, config, **HALF) as e:
        assert is_quantised(e)
        assert e.tokens(PROMPTS[:4], max_tokens=max_tokens) == plain
        assert sum(stats(e)["accepted"]["model"]) > 0
