"""Run vLLM's own noise functions, and ours, on the CPU: ``TRITON_INTERPRET=1 python vllm_noise.py IN OUT``.

vLLM replaces Triton by placeholders where it finds no accelerator, so its file is loaded alone,
with ``vllm.triton_utils`` standing for Triton itself.
"""

import importlib.util
import sys
import types
from pathlib import Path

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.verify.noise import acceptance_uniform, gumbel_noise


def load_gumbel() -> types.ModuleType:
    root = importlib.util.find_spec("vllm").submodule_search_locations[0]
    path = Path(root) / "v1/worker/gpu/sample/gumbel.py"
    package, utils = types.ModuleType("vllm"), types.ModuleType("vllm.triton_utils")
    package.__path__ = []
    utils.tl, utils.triton = tl, triton
    sys.modules |= {"vllm": package, "vllm.triton_utils": utils}
    spec = importlib.util.spec_from_file_location("vllm_gumbel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gumbel = load_gumbel()
# Names used inside a kernel are looked up in this module.
murmur3_hash32 = gumbel.murmur3_hash32
murmur3_uniform32 = gumbel.murmur3_uniform32
log1p_neg = gumbel._log1p_neg_stable
tl_rand32 = gumbel.tl_rand32


@triton.jit
def noise_kernel(
    seeds_ptr,
    positions_ptr,
    hash_ptr,
    uniform_ptr,
    noise_ptr,
    kernel_noise_ptr,
    acceptance_ptr,
    kernel_acceptance_ptr,
    vocab_size,
    block_size: tl.constexpr,
):
    i_row = tl.program_id(0)
    tokens = tl.arange(0, block_size)
    mask = tokens < vocab_size
    seed = tl.load(seeds_ptr + i_row)
    position = tl.load(positions_ptr + i_row)
    at = i_row * vocab_size + tokens
    tl.store(hash_ptr + at, murmur3_hash32(seed, position, tokens).to(tl.int32), mask=mask)
    u = murmur3_uniform32(seed, position, tokens)
    tl.store(uniform_ptr + at, u, mask=mask)
    tl.store(noise_ptr + at, -tl.log(-log1p_neg(u)), mask=mask)
    tl.store(kernel_noise_ptr + at, gumbel_noise(seed, position, tokens), mask=mask)
    tl.store(acceptance_ptr + i_row, tl_rand32(seed, position, includes_zero=False))
    tl.store(kernel_acceptance_ptr + i_row, acceptance_uniform(seed, position))


def main(source: str, target: str) -> None:
    inputs = torch.load(source)
    seeds, positions, logits = inputs["seeds"], inputs["positions"], inputs["logits"]
    rows, vocab_size = logits.shape
    out = {
        "hash": torch.empty(rows, vocab_size, dtype=torch.int32),
        "uniform": torch.empty(rows, vocab_size),
        "noise": torch.empty(rows, vocab_size),
        "kernel_noise": torch.empty(rows, vocab_size),
        "acceptance": torch.empty(rows),
        "kernel_acceptance": torch.empty(rows),
    }
    block = triton.next_power_of_2(vocab_size)
    noise_kernel[(rows,)](seeds, positions, *out.values(), vocab_size, block_size=block)
    for name, temperature in (("samples", 1.0), ("samples_0.7", 0.7)):
        out[name] = gumbel.gumbel_sample(
            logits,
            torch.arange(rows),
            torch.full((rows,), temperature),
            seeds,
            positions,
            apply_temperature=True,
            is_drafting=False,
        )
    torch.save(out, target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
