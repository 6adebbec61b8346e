"""EAGLE heads for the tiny models, as checkpoints that vLLM loads."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_specplus.testing.tiny_model import RANDOM_SHAPE

MLP = 128
# An EAGLE-3 head reads the input and the output of its target's one layer.
AUX_LAYERS = [0, 1]


def make_eagle_head(
    folder: Path,
    method: str,
    seed: int = 0,
    *,
    width: int = RANDOM_SHAPE.width,
    num_heads: int = RANDOM_SHAPE.num_heads,
    vocab_size: int = RANDOM_SHAPE.vocab_size,
) -> Path:
    """Write a head of one random layer for `eagle` or `eagle3`.

    It passes on the embedding of the newest token, so a random target accepts some of its drafts.

    Args:
        folder: gets the head.
        method: "eagle" or "eagle3".
        seed: of the weights.
        width: of the target's layers.
        num_heads: of attention, as many as the target has: vLLM's Triton backend sizes its scratch by the target's.
        vocab_size: the target's.
    """
    g = torch.Generator().manual_seed(seed)
    is_eagle3 = method == "eagle3"
    layer = "midlayer" if is_eagle3 else "layers.0"

    def linear(rows: int, columns: int, gain: float = 0.3) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g) * gain * columns**-0.5

    def passing_on() -> torch.Tensor:
        return torch.cat([torch.eye(width), linear(width, width)], dim=1)

    if is_eagle3:
        # Only the attention reads the embedding. With equal queries and keys each token attends to itself.
        attending = linear(width, 2 * width, gain=2.0)
        attention = {"q": attending, "k": attending.clone(), "v": passing_on(), "o": torch.eye(width)}
    else:
        attention = {name: linear(width, width) for name in "qkvo"}
    weights = {f"{layer}.self_attn.{name}_proj.weight": weight for name, weight in attention.items()}
    weights |= {f"{layer}.mlp.{name}_proj.weight": linear(MLP, width) for name in ("gate", "up")}
    weights |= {f"{layer}.mlp.down_proj.weight": linear(width, MLP)}
    norms = [f"{layer}.post_attention_layernorm"]
    if is_eagle3:
        norms += ["norm", f"{layer}.input_layernorm", f"{layer}.hidden_norm"]
        weights["fc.weight"] = linear(width, len(AUX_LAYERS) * width)
    else:
        weights["fc.weight"] = passing_on()
    weights |= {f"{name}.weight": torch.ones(width) for name in norms}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": MLP,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": width // num_heads,
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
        "num_aux_hidden_states": len(AUX_LAYERS),
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
