"""An EAGLE head that `eagle_train` has trained drafts in vLLM what it drafts in training."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.e2e.engines import PROMPTS
from vllm_specplus.testing.eagle_net import EagleHead, HeadShape
from vllm_specplus.testing.eagle_train import HeadReport, HeadSettings, Trainer, fast_dtype, read_texts, train_head
from vllm_specplus.testing.tiny_tokenizer import END_OF_TEXT, VOCAB_SIZE, write_tokenizer

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[3]
MAX_TOKENS = 24
PASSES = 2
SETTINGS = HeadSettings(
    answers=12,
    fresh_answers=4,
    answer_tokens=24,
    passages=16,
    passage_tokens=128,
    feature_layers=(1, 2),
    draft_vocab_size=96,
    passes=(1, 1, 1, PASSES),
    step_tokens=512,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama model of two layers."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, 512)
    return folder


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeadReport]:
    folder = tmp_path_factory.mktemp("head")
    return folder, train_head(target, folder, SETTINGS)


def drafts_here(target: Path, head: Path, tokens: list[int]) -> list[list[int]]:
    """The drafts of the first pass behind each token but the last, and of the pass behind it, in plain PyTorch."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with Progress(disable=True) as bar, torch.inference_mode():
        [text] = read_texts(model, [(torch.tensor(tokens), 0)], SETTINGS, bar)
        weights = load_file(head / "model.safetensors")
        vocab = torch.arange(96) + weights.pop("d2t")
        config = model.config
        shape = HeadShape(64, 96, 2, 1, config.rope_parameters["rope_theta"], config.rms_norm_eps, 2, 96)
        net = EagleHead(shape)
        net.load_state_dict(weights)
        embedding = model.model.embed_tokens
        [first] = net(text.features[None, :-1], [embedding(text.tokens[None, 1:])])
        drafts = vocab[net.lm_head(first[0]).argmax(dim=-1)]
        _, second = net(text.features[None, :-1], [embedding(text.tokens[None, 1:]), embedding(drafts[None])])
        seconds = vocab[net.lm_head(second[0]).argmax(dim=-1)]
    return torch.stack([drafts, seconds], dim=1).tolist()


def test_the_same_drafts(target: Path, head: tuple[Path, HeadReport], tmp_path: Path) -> None:
    folder, _ = head
    rows = [{"kind": "code", "name": str(i), "prompt": prompt} for i, prompt in enumerate(PROMPTS[:4])]
    (tmp_path / "prompts.json").write_text(json.dumps(rows))
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": PASSES}
    command = [sys.executable, "benchmarks/record.py", str(target), str(tmp_path / "prompts.json"), "--ignore-eos"]
    command += ["--out", str(tmp_path / "traces.json"), "--max-tokens", str(MAX_TOKENS)]
    command += ["--speculative-config", json.dumps(config), "--max-model-len", "512"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    traces = json.loads((tmp_path / "traces.json").read_text())
    different = []
    for trace in traces:
        # The drafts behind output token i begin at the place before it.
        here = drafts_here(target, folder, trace["prompt"] + trace["output"])[len(trace["prompt"]) - 1 :]
        different += [(a, b) for a, b in zip(trace["drafts"], here, strict=False) if b and a and a != b]
    assert different == []
    assert len({tuple(drafts) for trace in traces for drafts in trace["drafts"]}) > 20


def test_the_report(head: tuple[Path, HeadReport]) -> None:
    _, report = head
    assert 0 < report.answer_tokens <= SETTINGS.answers * SETTINGS.answer_tokens
    assert 0 < report.passage_tokens <= SETTINGS.passages * SETTINGS.passage_tokens
    assert 0 < report.in_draft_vocab <= 1
    assert len(report.agreement) == PASSES
    assert f"torch.{report.dtype}" == str(fast_dtype())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_head_learns(target: Path, dtype: torch.dtype) -> None:
    """A random target has nothing that carries over to other texts, so the same texts tell."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    settings = replace(SETTINGS, passes=(1,) * 60)
    with Progress(disable=True) as bar:
        texts = list(read_texts(model, [(torch.tensor(prompt * 2), 1) for prompt in PROMPTS[:4]], settings, bar))
        trainer = Trainer(model, torch.arange(32, 128), settings)
        [before], _ = trainer.agreement(texts)
        trainer.fit(texts, bar)
        [after], in_vocab = trainer.agreement(texts)
    assert before < 0.1 * in_vocab < 0.5 * in_vocab < after
