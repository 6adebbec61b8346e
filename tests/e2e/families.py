"""Tiny random checkpoints of model families that have an MTP head, and Medusa heads, in the layout that each ships."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_specplus.testing.tiny_model import make_random
from vllm_specplus.testing.tiny_tokenizer import END_OF_TEXT, write_tokenizer

WIDTH, VOCAB, NUM_LAYERS, MAX_POSITIONS = 64, 320, 2, 4096
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_POSITIONS,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": None,
    "num_nextn_predict_layers": 1,
}
_GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Family:
    """A family's sizes beside the common ones, and the tensors of its head: from (name, tensor) of a layer of its own.

    head_layer: the layer of the target whose kind the head's layer has. heads: made from that layer's tensors.
    """

    model_type: str
    options: dict[str, Any]
    head_layer: int
    heads: Callable[[dict[str, Tensor]], dict[str, Tensor]]


def _joining() -> Tensor:
    """Joins an embedding and a hidden state: it passes the embedding on, so a head drafts what followed the token."""
    return torch.cat([torch.eye(WIDTH), 0.3 * torch.randn(WIDTH, WIDTH) * WIDTH**-0.5], dim=1)


def _deepseek_head(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = {name: torch.ones(WIDTH) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    parts |= {"eh_proj.weight": _joining(), **layer}
    return {f"model.layers.{NUM_LAYERS}.{name}": tensor for name, tensor in parts.items()}


def _ernie_head(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = {f"mtp_block.0.{name}": tensor for name, tensor in layer.items()}
    parts |= {f"{name}.0.weight": torch.ones(WIDTH) for name in ("mtp_emb_norm", "mtp_hidden_norm")}
    parts["mtp_linear_proj.0.weight"] = _joining()
    return {f"model.{name}": tensor for name, tensor in parts.items()}


def _qwen_head(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    # This family's norms multiply by one more than their weights.
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    parts |= {f"{name}.weight": torch.zeros(WIDTH) for name in norms}
    return {f"mtp.{name}": tensor for name, tensor in (parts | {"fc.weight": _joining()}).items()}


FAMILIES = {
    "ernie": Family(
        "ernie4_5_moe",
        {
            "head_dim": 32,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        0,
        _ernie_head,
    ),
    "glm": Family("glm4_moe", {"head_dim": 32, **_GROUPS, **_EXPERTS}, 1, _deepseek_head),
    "deepseek": Family(
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            # The one latent size that vLLM's attention has on a CPU.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "topk_method": "noaux_tc",
            **_GROUPS,
            **_EXPERTS,
        },
        1,
        _deepseek_head,
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": ["linear_attention", "full_attention"],
        },
        1,
        _qwen_head,
    ),
}


def make_family(folder: Path, name: str, seed: int = 0) -> Path:
    """Write a model of a family with its MTP head."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.model_type, **_COMMON | family.options)
    model = AutoModelForCausalLM.from_config(config)
    _randomise(model)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{family.head_layer}."
    layer = {key.removeprefix(prefix): tensor.clone() for key, tensor in weights.items() if key.startswith(prefix)}
    save_file(weights | family.heads(layer), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, MAX_POSITIONS)
    return folder


def make_two_layers(folder: Path, name: str) -> Path:
    """Write a model of a family, or of `mimo`, the tiny one, with two layers of its MTP head that differ."""
    if name == "mimo":
        make_random(folder)
        first, second = "mtp_layers.0.", "mtp_layers.1."
    else:
        make_family(folder, name)
        first, second = f"model.layers.{NUM_LAYERS}.", f"model.layers.{NUM_LAYERS + 1}."
    weights = load_file(folder / "model.safetensors")
    turned = {key.replace(first, second): tensor.roll(1, 0) for key, tensor in weights.items() if first in key}
    save_file(weights | turned, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    return folder


def make_medusa(folder: Path, target: Path, num_heads: int = 2) -> Path:
    """Write Medusa heads for a tiny model; a test that needs them is skipped on a vLLM that has no Medusa.

    Each head drafts the target's newest token again, which is right now and then.
    """
    pytest.importorskip("vllm.v1.spec_decode.medusa", reason="vLLM 0.33 has no Medusa")
    output = load_file(target / "model.safetensors")["lm_head.weight"]
    vocab, width = output.shape
    weights = {}
    for i in range(num_heads):
        weights[f"{i}.0.linear.weight"] = torch.zeros(width, width)
        weights[f"{i}.1.weight"] = output.clone()
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": width,
        "vocab_size": vocab,
        "num_heads": num_heads,
        "num_hidden_layers": 1,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def _randomise(model: nn.Module) -> None:
    """Give matrices larger weights than a new model has: its greedy text would be one token again and again."""
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:
            std = 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5
            nn.init.normal_(weight, std=1.5 * std)
