"""An EAGLE-3 head of one layer in plain PyTorch, numerically equal to vLLM's for a Llama target.

Module names are those of the checkpoint, so ``state_dict()`` is the checkpoint but for the map of its vocabulary.

Place ``t`` of the first pass holds what the target's layers gave for token ``t``, the embedding of token ``t + 1`` and
the rotary position ``t``; it predicts token ``t + 2``. Each further pass goes one place on, with the last one's output
in the place of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head, most of them its target's; ``draft_vocab_size`` tokens can be drafted."""

    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    rope_theta: float
    norm_eps: float
    num_features: int
    draft_vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


class Norm(nn.RMSNorm):
    """RMSNorm in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(2 * shape.width, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * shape.width, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, first_position: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend from each place to the first pass's places up to it, and to its own in later passes.

        Args:
            x: ``[B, T, 2 * width]``.
            first_position: the rotary position of place 0.
            past: keys and values of the passes before, each ``[B, heads, T, head_dim]``; gets those of this one.
        """
        shape = self.shape
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, shape.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = _rotary_table(first_position, length, shape)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        groups = shape.num_heads // shape.num_kv_heads
        past.append((k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)))
        first_keys, first_values = past[0]
        if len(past) == 1:
            mixed = functional.scaled_dot_product_attention(q, first_keys, first_values, is_causal=True)
        else:
            is_later = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = (q @ first_keys.mT).masked_fill(is_later, -torch.inf)
            own = [(q * keys).sum(-1, keepdim=True) for keys, _ in past[1:]]
            shares = (torch.cat([scores, *own], dim=-1) * shape.head_dim**-0.5).softmax(dim=-1).to(q.dtype)
            mixed = shares[..., :length] @ first_values
            for i, (_, values) in enumerate(past[1:]):
                mixed = mixed + shares[..., length + i, None] * values
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, shape.width))


class Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.width, shape.norm_eps)
        self.hidden_norm = Norm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.width, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, embeds: Tensor, hidden: Tensor, first_position: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        pair = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        x = hidden + self.self_attn(pair, first_position, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """The head; the embedding is its target's."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc_norm = nn.ModuleList(Norm(shape.width, shape.norm_eps) for _ in range(shape.num_features))
        self.fc = nn.Linear(shape.num_features * shape.width, shape.width, bias=False)
        self.midlayer = Layer(shape)
        self.norm = Norm(shape.width, shape.norm_eps)
        self.lm_head = nn.Linear(shape.width, shape.draft_vocab_size, bias=False)

    def forward(self, features: Tensor, embeds: Sequence[Tensor]) -> list[Tensor]:
        """Draft from each place, as many passes as there are ``embeds``.

        Args:
            features: what the target's layers gave, ``[B, T, num_features * width]``.
            embeds: of each pass ``k`` the embedding of token ``t + 1 + k`` at place ``t``, ``[B, T, width]``.

        Returns:
            the hidden states of each pass behind the last norm, ``[B, T, width]``; ``lm_head`` makes logits of them.
        """
        chunks = features.chunk(self.shape.num_features, dim=-1)
        hidden = self.fc(torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1))
        past: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for i, embed in enumerate(embeds):
            hidden = self.midlayer(embed, hidden, i, past)
            outputs.append(self.norm(hidden))
        return outputs


def head_config(shape: HeadShape, target: dict[str, Any], feature_layers: Sequence[int]) -> dict[str, Any]:
    """The ``config.json`` of a head of a Llama target with the ``config.json`` ``target``."""
    kept = ("hidden_act", "max_position_embeddings", "rope_parameters", "vocab_size", "bos_token_id", "eos_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: target[name] for name in kept},
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "draft_vocab_size": shape.draft_vocab_size,
        "fc_norm": True,
        "eagle_aux_hidden_state_layer_ids": list(feature_layers),
        "num_aux_hidden_states": shape.num_features,
    }


def _rotary_table(first_position: int, length: int, shape: HeadShape) -> tuple[Tensor, Tensor]:
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    positions = torch.arange(first_position, first_position + length, dtype=torch.float32)
    angles = torch.outer(positions, shape.rope_theta**-steps)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
