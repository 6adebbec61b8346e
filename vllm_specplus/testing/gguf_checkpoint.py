"""A GGUF file of a Llama model with a byte-level tokenizer, as an ordinary checkpoint.

transformers reads the weights and dequantises them; it needs the packages ``gguf`` and ``accelerate`` for that. The
tokenizer is written here. Its pre-tokenizer, ``smollm``, splits numbers into digits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

# GGUF's type of a special token.
_CONTROL = 3


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Write the model of file ``gguf`` to ``folder`` in bfloat16, with its tokenizer and chat template.

    Raises ValueError if the tokenizer is of a kind that is not known, ImportError if ``gguf`` or ``accelerate`` is not
    installed.
    """
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, GgufConfig

    fields = {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    write_tokenizer(fields, folder)
    with _no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which AutoTokenizer loads offline.

    Args:
        fields: GGUF's metadata by name.
        folder: gets the files.

    Raises ValueError if the tokenizer is of a kind that is not known.
    """
    ggml = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    kind = ggml.get("model"), ggml.get("pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"a tokenizer of the kind {kind} is not known, only ('gpt2', 'smollm')")
    tokens = ggml["tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in ggml["merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, ggml["token_type"], strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        config[f"{name}_token"] = tokens[ggml[f"{field}_token_id"]]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
