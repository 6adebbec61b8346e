"""Other engines' names for the draft model's quantization, and what each is in vLLM.

Paddle's names are read in any case, as FastDeploy reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

INT8 = "int8_per_channel_weight_only"
_NO_INT4 = (
    f"vLLM makes no 4-bit weights while it loads a model. The nearest online form is {INT8}; for 4 bits make an AWQ or "
    "GPTQ checkpoint (llm-compressor, W4A16) and leave quantization out"
)
_CHECKPOINT = "vLLM reads no checkpoint of this kind: take the model in BF16, or in a form of vLLM's"
_INT8_NOTE = "vLLM's form quantizes the experts of a mixture alone; other layers keep their type"


@dataclass(frozen=True)
class Quantization:
    """One name of another engine's.

    system: whose it is. target: vLLM's name; None: there is none, and `says` is the way out.
    says: otherwise what differs, or "".
    """

    system: str
    target: str | None = None
    says: str = ""


_PADDLE, _RTP = "Paddle", "RTP-LLM"
QUANTIZATIONS: Mapping[str, Quantization] = MappingProxyType(
    {
        "a8w8_fp8": Quantization(_PADDLE, "fp8"),
        "block_wise_fp8": Quantization(_PADDLE, "fp8_per_block"),
        "tensor_wise_fp8": Quantization(_PADDLE, "fp8_per_tensor"),
        "weight_only_int8": Quantization(_PADDLE, INT8, _INT8_NOTE),
        "wint8": Quantization(_PADDLE, INT8, _INT8_NOTE),
        "weight_only_int4": Quantization(_PADDLE, None, _NO_INT4),
        "wint4": Quantization(_PADDLE, None, _NO_INT4),
        "int4": Quantization(_PADDLE, None, _NO_INT4),
        "wint2": Quantization(_PADDLE, None, _NO_INT4),
        "a8w8_fp8_wint4": Quantization(_PADDLE, None, _NO_INT4),
        "a8w8": Quantization(_PADDLE, None, _CHECKPOINT),
        "a8w8c8": Quantization(_PADDLE, None, _CHECKPOINT),
        "mix_quant": Quantization(_PADDLE, None, _CHECKPOINT),
        "w4a8": Quantization(_PADDLE, None, _CHECKPOINT),
        "w4afp8": Quantization(_PADDLE, None, _CHECKPOINT),
        "wfp8afp8": Quantization(_PADDLE, None, f"{_CHECKPOINT}. The nearest online form is fp8_per_channel"),
        "fp8_per_block": Quantization(_RTP, "fp8_per_block"),
        "fp8_dynamic_per_tensor": Quantization(_RTP, "fp8_per_tensor"),
        "int8": Quantization(_RTP, INT8, _INT8_NOTE),
    }
)
"""By the name in small letters."""


def quantization_named(name: object) -> Quantization | None:
    """What another engine's name stands for; None for a name that is none of theirs."""
    return QUANTIZATIONS.get(name.lower()) if isinstance(name, str) else None


def vllm_name(name: object) -> str | None:
    """vLLM's name for another engine's, where they differ; None where `name` is to stay as it is."""
    if not isinstance(name, str):
        return None
    if name == "FP8":
        return "fp8"
    known = quantization_named(name)
    return known.target if known is not None and known.target != name else None
