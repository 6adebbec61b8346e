"""The tiny models: files, tensors, tokenizer, cache and command line. No engine is started."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer

from vllm_specplus.testing import tiny_corpus, tiny_model, tiny_tokenizer
from vllm_specplus.testing.tiny_net import ModelShape, TinyNet, greedy, rotary_table
from vllm_specplus.testing.tiny_train import Phase, TrainSettings, agreement, initialise, orthogonalize, phase_at

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
QUICK = TrainSettings(
    shape=ModelShape(1, 64, 2, 2, 64), steps=3, phases=(Phase(0.6, 4, 48), Phase(0.4, 2, 64)), workers=1
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make_random(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="module")
def tokenizer(random_model: Path):
    return AutoTokenizer.from_pretrained(random_model, local_files_only=True)


def load_net(folder: Path, shape: ModelShape) -> TinyNet:
    net = TinyNet(shape)
    net.load_state_dict(load_file(folder / "model.safetensors"))
    return net


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


class TestCheckpoint:
    def test_files(self, random_model: Path) -> None:
        assert {path.name for path in random_model.iterdir()} == FILES

    def test_config_selects_mimo_with_one_head(self, random_model: Path) -> None:
        config = json.loads((random_model / "config.json").read_text())
        assert config["architectures"] == ["MiMoForCausalLM"]
        assert config["num_nextn_predict_layers"] == 1
        assert config["vocab_size"] == 320
        assert config["max_position_embeddings"] >= 4096

    def test_tensor_names_and_shapes(self, random_model: Path) -> None:
        weights = load_file(random_model / "model.safetensors")
        layer = {
            "input_layernorm.weight": (64,),
            "post_attention_layernorm.weight": (64,),
            "self_attn.o_proj.weight": (64, 64),
            "mlp.gate_proj.weight": (128, 64),
            "mlp.up_proj.weight": (128, 64),
            "mlp.down_proj.weight": (64, 128),
        }
        for name in "qkv":
            layer[f"self_attn.{name}_proj.weight"] = (64, 64)
            layer[f"self_attn.{name}_proj.bias"] = (64,)
        expected: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (320, 64),
            "model.norm.weight": (64,),
            "lm_head.weight": (320, 64),
            "model.mtp_layers.0.input_proj.weight": (64, 128),
        }
        for norm in ("token", "hidden", "final"):
            expected[f"model.mtp_layers.0.{norm}_layernorm.weight"] = (64,)
        for prefix in ("model.layers.0", "model.layers.1", "model.mtp_layers.0"):
            expected |= {f"{prefix}.{name}": size for name, size in layer.items()}
        assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}

    def test_same_seed_same_weights(self, random_model: Path, tmp_path: Path) -> None:
        assert digest(tiny_model.make_random(tmp_path / "again")) == digest(random_model)
        assert digest(tiny_model.make_random(tmp_path / "other", seed=7)) != digest(random_model)

    def test_greedy_text_is_varied_and_printable(self, random_model: Path) -> None:
        net = load_net(random_model, tiny_model.RANDOM_SHAPE)
        output = greedy(net, list(b"import os\n"), 80)
        assert len(set(output)) > 20
        assert all(token == 10 or 32 <= token < 127 for token in output)

    def test_some_random_drafts_agree_and_some_do_not(self, random_model: Path) -> None:
        net = load_net(random_model, tiny_model.RANDOM_SHAPE)
        prompt = list(b"import os\n")
        share, _ = agreement(net, torch.tensor([prompt + greedy(net, prompt, 120)]), skip=10)
        assert 0.05 < share < 0.9

    def test_draft_model_is_a_plain_qwen2(self, tmp_path: Path) -> None:
        folder = tiny_model.make_draft_model(tmp_path / "draft")
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["Qwen2ForCausalLM"]
        assert "num_nextn_predict_layers" not in config
        assert not any("mtp" in name for name in load_file(folder / "model.safetensors"))

    def test_some_drafts_of_the_draft_model_agree(self, random_model: Path, tmp_path: Path) -> None:
        target = load_net(random_model, tiny_model.RANDOM_SHAPE)
        folder = tiny_model.make_draft_model(tmp_path / "draft")
        draft = load_net(folder, tiny_model.DRAFT_SHAPE)
        prompt = list(b"import os\n")
        tokens = torch.tensor([prompt + greedy(target, prompt, 120)])
        with torch.inference_mode():
            chosen, guessed = (net.target_logits(net.hidden(tokens))[:, 10:].argmax(dim=-1) for net in (target, draft))
        assert 0.05 < (chosen == guessed).float().mean() < 0.95


class TestTokenizer:
    # Text that spells a special token is that token. AutoTokenizer goes by the model's architecture and loads a Qwen2
    # tokenizer, which composes characters (NFC) before it looks at the bytes.
    # That of a text of assigned characters is the same in every version of Unicode.
    @given(text=st.text(st.characters(exclude_categories=("Cs", "Cn"))).filter(lambda text: "<|" not in text))
    @example(text="\u0340")
    def test_text_round_trip(self, tokenizer, text: str) -> None:
        tokens = tokenizer.encode(text)
        text = unicodedata.normalize("NFC", text)
        assert tokens == list(text.encode())
        assert tokenizer.decode(tokens) == text

    @given(data=st.binary())
    def test_every_byte_sequence_decodes_as_utf8(self, tokenizer, data: bytes) -> None:
        assert tokenizer.decode(list(data)) == data.decode(errors="replace")

    def test_special_tokens(self, tokenizer) -> None:
        assert len(tokenizer) == tiny_tokenizer.VOCAB_SIZE
        assert tokenizer.eos_token_id == tiny_tokenizer.END_OF_TEXT == tiny_corpus.END_OF_TEXT
        assert tokenizer.encode("a<|im_end|>b") == [97, 258, 98]
        assert tokenizer.decode([97, 258, 98], skip_special_tokens=True) == "ab"

    def test_chat_template(self, tokenizer) -> None:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
        )
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


class TestNet:
    def test_forward_is_causal(self, random_model: Path) -> None:
        net = load_net(random_model, tiny_model.RANDOM_SHAPE)
        tokens = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
        changed = tokens.clone()
        changed[0, 12] ^= 1
        with torch.inference_mode():
            before, after = (net.target_logits(net.hidden(x)) for x in (tokens, changed))
        torch.testing.assert_close(before[:, :12], after[:, :12])
        assert not torch.allclose(before[:, 12], after[:, 12])

    def test_head_ignores_the_token_at_position_zero_only(self, random_model: Path) -> None:
        net = load_net(random_model, tiny_model.RANDOM_SHAPE)
        hidden = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
        following = torch.arange(97, 103)[None]
        first, second = following.clone(), following.clone()
        first[0, 0], second[0, 1] = 50, 50
        with torch.inference_mode():
            base, at_zero, at_one = (net.draft_logits(hidden, tokens) for tokens in (following, first, second))
        torch.testing.assert_close(at_zero, base)
        assert not torch.allclose(at_one[:, 1], base[:, 1])

    def test_heads_start_by_looking_back(self) -> None:
        # With zero query and key matrices only the biases score, so the attended byte is known.
        net = TinyNet(TrainSettings().shape)
        initialise(net)
        attention = net.model.layers[0].self_attn
        shape = net.shape
        width, length = shape.width, 40
        values = torch.eye(length, width)[None]
        with torch.no_grad():
            for projection in (attention.q_proj, attention.k_proj):
                projection.weight.zero_()
            attention.v_proj.weight.zero_()
            # Every head carries the position's index in its first channel.
            positions = torch.arange(length, dtype=torch.float32)
            attention.v_proj.weight[:: shape.head_dim, :length] = positions
            attention.o_proj.weight.copy_(torch.eye(width))
            outputs = attention(values, rotary_table(length, shape.head_dim))[0]
        for head in range(shape.num_heads - 1):
            attended = outputs[30, head * shape.head_dim].item()
            assert attended == pytest.approx(30 - (head + 1), abs=0.5)


class TestTraining:
    def test_orthogonalize_evens_out_singular_values(self) -> None:
        matrices = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalize(matrices))
        # Five of its Newton-Schulz steps leave the values between about 0.7 and 1.2 by design.
        assert values.min() > 0.5
        assert values.max() < 1.3

    def test_split_is_by_name_and_disjoint(self) -> None:
        held_out = tiny_corpus.held_out_files()
        files = tiny_corpus.corpus_files()
        assert files == tiny_corpus.corpus_files()
        assert 0.05 < len(held_out) / len(files) < 0.25
        assert all(tiny_corpus.is_held_out(Path("/elsewhere") / path.name) for path in held_out)

    def test_sampler_is_seeded_and_in_vocabulary(self) -> None:
        stream = tiny_corpus.token_stream(tiny_corpus.held_out_files()[:10])
        first, second, other = (
            tiny_corpus.Sampler(stream, repeat_share=0.4, json_share=0.3, seed=seed).batch(12, 200)
            for seed in (1, 1, 2)
        )
        np.testing.assert_array_equal(first, second)
        assert not np.array_equal(first, other)
        assert first.shape == (12, 200)
        assert first.min() >= 0
        assert first.max() <= tiny_corpus.END_OF_TEXT

    def test_json_rows_hold_json(self) -> None:
        stream = np.zeros(400, dtype=np.int16)
        sampler = tiny_corpus.Sampler(stream, repeat_share=0, json_share=1, seed=3)
        text = bytes(sampler.batch(1, 600)[0].tolist()).decode()
        whole = text[: text.rindex("},") + 1] + "]"
        assert {"id"} < set(json.loads(whole)[0])

    def test_repeats_repeat(self) -> None:
        stream = tiny_corpus.token_stream(tiny_corpus.held_out_files()[:10])
        sampler = tiny_corpus.Sampler(stream, repeat_share=1, json_share=0, seed=3)
        for row in sampler.batch(10, 400):
            tail = bytes((row[-30:] % 256).tolist())
            assert tail in bytes((row[:-30] % 256).tolist())

    def test_trained_model_and_its_report(self, tmp_path: Path) -> None:
        folder = tiny_model.make_trained(tmp_path / "out", QUICK)
        assert {path.name for path in folder.iterdir()} == FILES | {"training.json"}
        report = json.loads((folder / "training.json").read_text())["report"]
        assert 0 <= report["held_out_agreement"] <= 1
        load_net(folder, QUICK.shape)

    def test_training_is_repeatable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        two = replace(QUICK, workers=2)
        first = tiny_model.make_trained(tmp_path / "first", two)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        second = tiny_model.make_trained(tmp_path / "second", two)
        assert digest(first) == digest(second)

    def test_training_leaves_the_thread_count(self, tmp_path: Path) -> None:
        before = torch.get_num_threads()
        tiny_model.make_trained(tmp_path / "out", QUICK)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == before
        assert torch.get_num_threads() == before

    @pytest.mark.parametrize("steps", [1, 10, 135, 270])
    def test_phases_go_by_steps(self, steps: int) -> None:
        settings = TrainSettings(steps=steps)
        phases = [phase_at(settings, step / steps) for step in range(steps)]
        for phase in settings.phases:
            assert abs(phases.count(phase) - phase.share * steps) <= 1
        assert phases == sorted(phases, key=settings.phases.index)


class TestCache:
    def test_second_call_does_not_train(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = tiny_model.make_trained(tmp_path / "first", QUICK)
        monkeypatch.setattr(tiny_model, "train", lambda settings: pytest.fail("trained again"))
        second = tiny_model.make_trained(tmp_path / "second", QUICK)
        assert digest(first) == digest(second)

    def test_key_follows_every_setting(self) -> None:
        folders = {
            tiny_model.cache_folder(settings)
            for settings in (QUICK, replace(QUICK, seed=5), replace(QUICK, draft_weight=0.1))
        }
        assert len(folders) == 3
        assert tiny_model.cache_folder(QUICK) == tiny_model.cache_folder(replace(QUICK))

    def test_one_of_several_callers_trains(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        train, calls = tiny_model.train, []
        monkeypatch.setattr(tiny_model, "train", lambda settings: calls.append(settings) or train(settings))
        with ThreadPoolExecutor(3) as pool:
            folders = list(pool.map(lambda i: tiny_model.make_trained(tmp_path / str(i), QUICK), range(3)))
        assert calls == [QUICK]
        assert len({digest(folder) for folder in folders}) == 1
        cache = tiny_model.cache_folder(QUICK)
        assert [path.name for path in cache.parent.iterdir()] == [cache.name]

    def test_key_follows_the_corpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = tiny_model.cache_folder(QUICK)
        files = tiny_corpus.corpus_files()
        monkeypatch.setattr(tiny_corpus, "corpus_files", lambda: files[1:])
        assert tiny_model.cache_folder(QUICK) != before

    def test_failed_training_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(settings: TrainSettings) -> None:
            raise RuntimeError("no luck")

        monkeypatch.setattr(tiny_model, "train", fail)
        with pytest.raises(RuntimeError, match="no luck"):
            tiny_model.make_trained(tmp_path / "out", QUICK)
        assert list(tiny_model.cache_folder(QUICK).parent.iterdir()) == []

    def test_failed_write_leaves_the_old_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tiny_model.make_random(tmp_path / "out")
        before = digest(folder)

        def fail(*args: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(tiny_model, "write_tokenizer", fail)
        with pytest.raises(OSError, match="disk full"):
            tiny_model.make_random(folder, seed=9)
        assert digest(folder) == before
        assert {path.name for path in folder.iterdir()} == FILES


class TestCommandLine:
    def test_random(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert tiny_model.main([str(tmp_path / "out"), "--kind", "random", "--seed", "3"]) == 0
        assert str(tmp_path / "out") in capsys.readouterr().out
        expected = tiny_model.make_random(tmp_path / "expected", seed=3)
        assert digest(tmp_path / "out") == digest(expected)

    def test_trained_says_where_it_came_from(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(tiny_model, "TrainSettings", lambda: QUICK)
        for expected in ("newly trained", "from the cache"):
            assert tiny_model.main([str(tmp_path / "out"), "--kind", "trained"]) == 0
            assert expected in capsys.readouterr().out

    def test_quiet(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert tiny_model.main([str(tmp_path / "out"), "--quiet"]) == 0
        assert capsys.readouterr() == ("", "")

    def test_unwritable_out(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").write_text("in the way")
        for out in (tmp_path / "file", tmp_path / "file" / "below"):
            assert tiny_model.main([str(out)]) == 2
            assert "error: cannot make the random model" in capsys.readouterr().err

    def test_unknown_kind(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            tiny_model.main([str(tmp_path), "--kind", "huge"])
        assert stopped.value.code == 2
        assert "random" in capsys.readouterr().err

    def test_runs_as_a_module(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "vllm_specplus.testing.tiny_model", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "out" / "config.json").is_file()
