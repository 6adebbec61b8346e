"""The noise is vLLM's: compared with vLLM's own Triton functions, run by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from vllm_specplus.verify import _rows, noise
from vllm_specplus.verify.noise import (
    _hash,
    _uniform,
    acceptance_uniform,
    gumbel_noise,
    log_uniform_bound,
    noise_keys,
    token_keys,
    token_noise,
)

SEEDS = [0, 1, -1, 42, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 123456789012345678]
POSITIONS = [0, 1, 5, 17, 1023, 131071, 2**20, 2**31 - 1, 2**31, 2**33 + 3]
VOCAB = 1500  # more than one block of vLLM's kernel, and not a whole number of them


@pytest.fixture(scope="module")
def from_vllm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Hashes, uniform numbers, noise and samples that vLLM's functions give."""
    folder = tmp_path_factory.mktemp("noise")
    logits = torch.randn(len(SEEDS), VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    inputs = {"seeds": torch.tensor(SEEDS), "positions": torch.tensor(POSITIONS), "logits": logits}
    torch.save(inputs, folder / "inputs.pt")
    script = Path(__file__).with_name("vllm_noise.py")
    subprocess.run(
        [sys.executable, str(script), str(folder / "inputs.pt"), str(folder / "out.pt")],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
        timeout=120,
    )
    return inputs | torch.load(folder / "out.pt")


def test_hash_and_uniform_are_bitwise_equal(from_vllm: dict[str, torch.Tensor]) -> None:
    h = _hash(from_vllm["seeds"], from_vllm["positions"], VOCAB)
    assert torch.equal(h, from_vllm["hash"])
    assert torch.equal(_uniform(h), from_vllm["uniform"])


def test_acceptance_uniform_is_bitwise_equal(from_vllm: dict[str, torch.Tensor]) -> None:
    assert torch.equal(acceptance_uniform(from_vllm["seeds"], from_vllm["positions"]), from_vllm["acceptance"])


def test_kernels_have_the_same_bits(from_vllm: dict[str, torch.Tensor]) -> None:
    assert torch.equal(from_vllm["kernel_noise"], from_vllm["noise"])
    assert torch.equal(from_vllm["kernel_acceptance"], from_vllm["acceptance"])


def test_noise_is_equal_to_a_few_ulp(from_vllm: dict[str, torch.Tensor]) -> None:
    ours = gumbel_noise(from_vllm["seeds"], from_vllm["positions"], VOCAB)
    theirs = from_vllm["noise"]
    # Two logarithms, each within an ulp on either side. Near a noise of 0 the outer one cancels, so the difference is
    # measured against 1.
    ulp = torch.finfo(torch.float32).eps * theirs.abs().clamp(min=1)
    assert ((ours - theirs).abs() / ulp).max() <= 2


def test_samples_are_equal(from_vllm: dict[str, torch.Tensor]) -> None:
    ours = gumbel_noise(from_vllm["seeds"], from_vllm["positions"], VOCAB)
    for temperature, name in ((1.0, "samples"), (0.7, "samples_0.7")):
        samples = (from_vllm["logits"] / temperature + ours).argmax(dim=1)
        assert samples.tolist() == from_vllm[name].tolist()


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    ours = gumbel_noise(seeds, positions, 333)
    assert torch.equal(ours, gumbel_noise(seeds, positions, VOCAB)[:, :333])
    for i in range(len(SEEDS)):
        alone = gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 333)
        assert torch.equal(alone[0], ours[i])
    assert len({tuple(row.tolist()) for row in ours}) == len(SEEDS)


def test_noise_of_some_tokens_is_that_of_all() -> None:
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    tokens = torch.randint(VOCAB, (len(SEEDS), 7), generator=torch.Generator().manual_seed(0))
    ours = token_noise(noise_keys(seeds, positions), tokens)
    assert torch.equal(ours, gumbel_noise(seeds, positions, VOCAB).gather(1, tokens))


def test_bound_is_never_below_the_noise() -> None:
    seeds, positions = torch.arange(40) * 2**33 - 7, torch.arange(40) * 3
    noise = gumbel_noise(seeds, positions, 50_000)
    excess = -log_uniform_bound(noise_keys(seeds, positions), 50_000) - noise
    assert excess.min() > 5e-5
    assert excess[noise > 5].max() < 0.01


def test_noise_is_gumbel_distributed_and_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    def p_value(noise: torch.Tensor) -> float:
        return scipy.stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue

    seeds, positions = torch.arange(20), torch.arange(20) * 3
    good = gumbel_noise(seeds, positions, 5000)
    assert good.isfinite().all()
    assert good.min() > -2.83
    assert good.max() < 23
    assert torch.corrcoef(good).fill_diagonal_(0).abs().max() < 0.06
    assert p_value(good) > 1e-3
    # Bug: a right shift that copies the sign bit in. The statistic, the largest distance between
    # the two distribution functions, moves from 0.004 to 0.5.
    monkeypatch.setattr(noise, "_shift_right", lambda x, bits: x >> bits)
    assert p_value(gumbel_noise(seeds, positions, 5000).nan_to_num()) < 1e-6


def test_acceptance_uniform_is_uniform_and_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = torch.arange(20_000) % 200 - 100, torch.arange(20_000) // 200

    def p_value() -> float:
        return scipy.stats.kstest(acceptance_uniform(seeds, positions).numpy(), "uniform").pvalue

    assert p_value() > 1e-3
    first_tokens = gumbel_noise(seeds, positions, 1)[:, 0]
    assert abs(scipy.stats.spearmanr(acceptance_uniform(seeds, positions), first_tokens).statistic) < 0.03
    # Bug: too few rounds of Philox.
    monkeypatch.setattr(noise, "_PHILOX_ROUNDS", 1)
    assert p_value() < 1e-9


def test_no_rows() -> None:
    assert gumbel_noise(torch.zeros(0).long(), torch.zeros(0).long(), 7).shape == (0, 7)


def test_compiled_code_has_the_same_noise() -> None:
    """The hashes bit for bit, the noise to a few units in the last place, and a bound that is never below it."""
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    keys = noise_keys(seeds, positions)
    hashes = _hash(seeds, positions, VOCAB).view(torch.uint32)
    drawn = gumbel_noise(seeds, positions, VOCAB)
    of_tokens = token_keys(VOCAB, seeds.device).numpy().view(np.uint32)
    uniform = acceptance_uniform(seeds, positions)
    for i, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        key = _rows._noise_key(np.int64(seed), np.int64(position))
        assert key == keys[i].view(torch.uint32).item()
        assert _rows._acceptance_uniform(np.int64(seed), np.int64(position)) == uniform[i].item()
        found = [_rows._hash(np.uint32(key), token_key) for token_key in of_tokens]
        assert found == hashes[i].tolist()
        noise_of = np.array([_rows._gumbel(np.uint32(h)) for h in found], np.float32)
        np.testing.assert_allclose(noise_of, drawn[i].numpy(), rtol=1e-6, atol=1e-6)


def test_compiled_bound_is_close_and_never_below() -> None:
    smallest, others = list(range(1000)), list(range(500_009, 2**32, 500_009))
    excess = {
        h: _rows._noise_bound(np.uint32(h)) - _rows._gumbel(np.uint32(h))
        for h in (*smallest, *others, *range(2**32 - 1000, 2**32))
    }
    assert min(excess.values()) > 0
    assert max(excess[h] for h in others if h < 2**32 / 100) < 0.1
