"""A byte-level tokenizer: token ``b`` is the byte ``b``; the special tokens follow."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

VOCAB_SIZE = 320
SPECIAL_TOKENS = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
END_OF_TEXT = SPECIAL_TOKENS["<|endoftext|>"]

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_symbols() -> list[str]:
    """Return the character by which the byte-level scheme writes each of the 256 bytes.

    Printable Latin-1 characters stand for themselves; the other bytes get those from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def build_tokenizer() -> Tokenizer:
    """Return the tokenizer with all ``VOCAB_SIZE`` entries; those after the special tokens are reserved."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{i}|>" for i in range(256 + len(SPECIAL_TOKENS), VOCAB_SIZE)]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in [*SPECIAL_TOKENS, *reserved]]
    )
    return tokenizer


def write_tokenizer(folder: Path, model_max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which AutoTokenizer loads offline."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
