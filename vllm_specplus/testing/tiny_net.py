"""The tiny models' forward pass in plain PyTorch, numerically equal to vLLM's.

Module names are those of the Hugging Face checkpoint, so ``state_dict()`` is the checkpoint: ``model.embed_tokens``,
``model.layers.N``, ``model.norm``, ``model.mtp_layers.0`` and ``lm_head`` (stored apart from the embedding).

Two conventions of the MiMo architecture matter to training:

* The head reads the target's hidden state *before* the last norm.
* Place ``t`` of the head holds the hidden state of token ``t``, the embedding of token ``t + 1`` and the rotary
  position ``t``. It predicts token ``t + 2``. At position 0 the embedding is replaced by zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROPE_THETA = 1_000_000.0
NORM_EPS = 1e-6
MAX_POSITIONS = 8192


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one tiny model; ``num_mtp_layers`` 0 gives a plain Qwen2 model, 1 a MiMo model."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    num_mtp_layers: int = 1
    vocab_size: int = 320

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    def hf_config(self, *, eos_token_id: int) -> dict[str, Any]:
        """Return the checkpoint's ``config.json``; vLLM picks its model class by ``architectures``."""
        config: dict[str, Any] = {
            "architectures": ["MiMoForCausalLM" if self.num_mtp_layers else "Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_theta": ROPE_THETA,
            "rms_norm_eps": NORM_EPS,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "torch_dtype": "float32",
        }
        if self.num_mtp_layers:
            config["num_nextn_predict_layers"] = self.num_mtp_layers
        return config


def rotary_table(num_positions: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each ``[num_positions, head_dim // 2]`` float32."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``x`` ``[B, heads, T, head_dim]``; element ``i`` pairs with ``i + head_dim // 2``."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        kv_width = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.width, shape.width)
        self.k_proj = nn.Linear(shape.width, kv_width)
        self.v_proj = nn.Linear(shape.width, kv_width)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = functional.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, NORM_EPS)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpLayer(DecoderLayer):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.token_layernorm = nn.RMSNorm(shape.width, NORM_EPS)
        self.hidden_layernorm = nn.RMSNorm(shape.width, NORM_EPS)
        self.input_proj = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.final_layernorm = nn.RMSNorm(shape.width, NORM_EPS)

    def combine(self, hidden: Tensor, next_embeds: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Map hidden states and the next tokens' embeddings, both ``[B, T, width]``, to outputs."""
        mask = torch.ones_like(next_embeds[:, :, :1])
        mask[:, 0] = 0.0
        pair = (self.hidden_layernorm(hidden), self.token_layernorm(next_embeds * mask))
        return self.final_layernorm(self(self.input_proj(torch.cat(pair, dim=-1)), rotary))


class Backbone(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width, NORM_EPS)
        if shape.num_mtp_layers:
            self.mtp_layers = nn.ModuleList(MtpLayer(shape) for _ in range(shape.num_mtp_layers))


class TinyNet(nn.Module):
    """A target model and, for a MiMo shape, its MTP head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        self.lm_head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the hidden states ``[B, T, width]`` before the last norm of ``tokens [B, T]``."""
        x = self.model.embed_tokens(tokens)
        rotary = rotary_table(tokens.shape[1], self.shape.head_dim)
        for layer in self.model.layers:
            x = layer(x, rotary)
        return x

    def target_logits(self, hidden: Tensor) -> Tensor:
        """Return ``[B, T, vocab]``: row ``t`` scores token ``t + 1``."""
        return self.lm_head(self.model.norm(hidden))

    def draft_logits(self, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        """Return ``[B, T, vocab]``: row ``t`` scores token ``t + 2``.

        ``hidden [B, T, width]`` comes from :meth:`hidden`; ``next_tokens [B, T]`` holds token ``t + 1``.
        """
        rotary = rotary_table(hidden.shape[1], self.shape.head_dim)
        embeds = self.model.embed_tokens(next_tokens)
        return self.lm_head(self.model.mtp_layers[0].combine(hidden, embeds, rotary))


def greedy(net: TinyNet, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the ``num_tokens`` most likely continuation tokens of ``prompt`` (recomputes all)."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            last = net.hidden(torch.tensor([tokens]))[:, -1:]
            tokens.append(int(net.target_logits(last).argmax()))
    return tokens[len(prompt) :]
