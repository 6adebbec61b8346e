"""Checkpoints beside the tiny models: a LoRA adapter of the trained one, and a model that hears.

Most of vLLM's models of images need torchvision, which a CPU's environment does not have.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Qwen2AudioConfig,
    Qwen2AudioEncoder,
    Qwen2AudioEncoderConfig,
    Qwen2AudioProcessor,
    Qwen2Config,
    WhisperFeatureExtractor,
)

from vllm_specplus.testing.tiny_tokenizer import VOCAB_SIZE

ADAPTER_RANK = 8
# Reserved tokens of the tiny tokenizer stand for sound, and for its begin and end.
AUDIO_TOKEN, _AUDIO_BEGIN, _AUDIO_END = VOCAB_SIZE - 1, VOCAB_SIZE - 2, VOCAB_SIZE - 3
# vLLM takes no other window than Whisper's.
_RATE, _SECONDS, _FRAMES_A_SECOND, _MEL_BINS = 16_000, 30, 100, 16


def make_adapter(folder: Path, model: Path, seed: int = 0) -> Path:
    """Write a random LoRA adapter of a model's projections, large enough to change its text."""
    g = torch.Generator().manual_seed(seed)
    targets = ("q_proj", "v_proj", "down_proj")
    weights = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.startswith("model.layers.") and name.endswith(tuple(f"{target}.weight" for target in targets)):
            rows, columns = tensor.shape
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(ADAPTER_RANK, columns, generator=g) * columns**-0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(rows, ADAPTER_RANK, generator=g) * ADAPTER_RANK**-0.5
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": targets,
        "bias": "none",
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def make_listener(folder: Path, text_model: Path, seed: int = 0) -> Path:
    """Write a Qwen2-Audio model: the text layers of a tiny model, and a random encoder of sound."""
    torch.manual_seed(seed)
    text = Qwen2Config(**json.loads((text_model / "config.json").read_text()) | {"num_nextn_predict_layers": 0})
    width = text.hidden_size
    audio = Qwen2AudioEncoderConfig(
        num_mel_bins=_MEL_BINS,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=width,
        d_model=width,
        max_source_positions=_SECONDS * _FRAMES_A_SECOND // 2,
    )
    config = Qwen2AudioConfig(
        audio_config=audio,
        text_config=text,
        audio_token_index=AUDIO_TOKEN,
        architectures=["Qwen2AudioForConditionalGeneration"],
        torch_dtype="float32",
        # vLLM's drafters read it of every model of several modalities.
        image_token_index=AUDIO_TOKEN,
    )
    weights = {f"audio_tower.{name}": tensor for name, tensor in Qwen2AudioEncoder(audio).state_dict().items()}
    # Larger than embeddings of tokens, so that one sound's text is not another's.
    weights["multi_modal_projector.linear.weight"] = 3 * torch.randn(width, width) * width**-0.5
    weights["multi_modal_projector.linear.bias"] = torch.zeros(width)
    for name, tensor in load_file(text_model / "model.safetensors").items():
        if ".mtp_layers." not in name:
            weights[f"language_model.{name}"] = tensor
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(text_model, local_files_only=True)
    names = tokenizer.convert_ids_to_tokens([AUDIO_TOKEN, _AUDIO_BEGIN, _AUDIO_END])
    extractor = WhisperFeatureExtractor(feature_size=_MEL_BINS, sampling_rate=_RATE, chunk_length=_SECONDS)
    Qwen2AudioProcessor(extractor, tokenizer, None, *names).save_pretrained(folder)
    return folder


def sound(pitch: int) -> tuple[np.ndarray, int]:
    """Half a second of a tone of `pitch` hertz, and its sampling rate."""
    return np.sin(np.arange(_RATE // 2) * 2 * np.pi * pitch / _RATE).astype(np.float32), _RATE
