"""Quantised drafts: copies of a tiny checkpoint in the layouts that vLLM loads, and hybrids with them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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


def _int8(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
LAYOUTS: dict[str, Layout] = {
    "gptq": ({"bits": _BITS, "group_size": _GROUP, "desc_act": False, "sym": True}, _gptq),
    "awq": ({"bits": _BITS, "group_size": _GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "compressed-tensors": (
        {
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


def quantise(source: Path, folder: Path, method: str) -> Path:
    """Write a copy of a checkpoint with the projections of its layers in the layout of a method of `LAYOUTS`."""
    settings, layout = LAYOUTS[method]
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            weights |= {f"{name.removesuffix('weight')}{part}": value for part, value in layout(tensor).items()}
        else:
            weights[name] = tensor
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **settings}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


# Drafts that vLLM's CPU build loads: the method, and the kind of drafter.
LOADED = [(method, "draft_model") for method in (*LAYOUTS, "fp8_per_channel")] + [("fp8_per_channel", "eagle")]
# vLLM takes none of these methods in float32.
HALF = {"dtype": "bfloat16"}


def config_of(method: str, drafter: str, draft: Path, folder: Path) -> dict[str, Any]:
    """A hybrid with a quantised draft; `folder` is written if the method needs a checkpoint of its own."""
    source = draft / drafter if drafter == "eagle" else draft
    model = quantise(source, folder, method) if method in LAYOUTS else source
    named = {"method": drafter, "model": str(model), "quantization": method}
    return APPEND | {"verify_strategy": "target_match"} | named


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
