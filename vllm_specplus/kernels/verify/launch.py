"""Launches the kernels that verify draft tokens as ``verify/reference.py`` says.

| kernel             | programs          | reads                | writes                                            |
|--------------------|-------------------|----------------------|---------------------------------------------------|
| `row_stats_kernel` | rows x blocks of  | every logit, once    | per block: the largest logit, its token and mass; |
|                    | the vocabulary    |                      | the draft's rank and the mass above it; for       |
|                    |                   |                      | `target_match` the best z + noise                 |
| `accept_kernel`    | requests          | statistics of blocks | accepted drafts; a plan for the token after them  |
| `sample_kernel`    | requests x blocks | one row per request  | per block: the best score                         |
| `emit_kernel`      | requests          | scores of blocks     | the sampled token                                 |

`greedy` and `target_match` need only the first two. Nothing is sorted and no logits are copied. A sample is the argmax
of z + noise over more than the nucleus at first, and mostly lies in the nucleus. ``nucleus.py`` has the slow paths: for
a sample outside the nucleus, and where top-k or min-p leave the mass of the nucleus open.

The host never waits. The launches depend on shapes and `max_rows` alone, so with a `Workspace` made before they can be
captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.verify.accept import accept_kernel
from vllm_specplus.kernels.verify.arguments import (
    NO_LIMIT,
    NUM_PLAN_FLOATS,
    NUM_PLAN_INTS,
    NUM_STAT_FLOATS,
    NUM_STAT_INTS,
    DraftLogits,
    Filters,
    Groups,
    Logits,
    NoiseKeys,
    Output,
    Plans,
    Rows,
    Samples,
    Sizes,
    Stats,
)
from vllm_specplus.kernels.verify.nucleus import GROUP_SIZE
from vllm_specplus.kernels.verify.row_stats import row_stats_kernel
from vllm_specplus.kernels.verify.sample import emit_kernel, sample_kernel
from vllm_specplus.kernels.verify.strategies import SAMPLED_LATER
from vllm_specplus.strategies import POLICIES, STRATEGIES
from vllm_specplus.verify.types import VerifyInputs, VerifyOutput

# Logits that one program of the wide kernels takes, and that one step of the slow paths takes.
BLOCK_SIZE = 4096
TILE_SIZE = 4096
# The most programs that a launch has along its second and third axis.
_MOST_PROGRAMS = 65_535


@dataclass(frozen=True)
class Workspace:
    """Outputs and scratch of a verification, made once and used for many.

    It fits inputs of at most this many rows and requests, and of exactly this vocabulary and `max_rows`. A result
    stands in it until the next verification. ``arguments.py`` describes the scratch.
    """

    token_ids: torch.Tensor  # [num_reqs, max_rows] int64
    num_tokens: torch.Tensor  # [num_reqs] int32
    floats: torch.Tensor  # [num_rows, NUM_STAT_FLOATS, num_blocks] float32
    ints: torch.Tensor  # [num_rows, NUM_STAT_INTS, num_blocks] int32
    group_max: torch.Tensor  # [num_rows, num_groups] float32
    group_list: torch.Tensor  # [num_reqs, num_groups] int32
    plan_floats: torch.Tensor  # [num_reqs, NUM_PLAN_FLOATS] float32
    plan_ints: torch.Tensor  # [num_reqs, NUM_PLAN_INTS] int64
    scores: torch.Tensor  # [num_reqs, num_blocks] float32
    samples: torch.Tensor  # [num_reqs, num_blocks] int32
    vocab_size: int

    @classmethod
    def allocate(
        cls, num_rows: int, num_reqs: int, vocab_size: int, max_rows: int, device: torch.device | str
    ) -> "Workspace":
        """Make one. With a vocabulary of 150,000 it takes about 0.1 byte for each logit of `num_rows` rows."""
        num_blocks = triton.cdiv(vocab_size, _block_size(vocab_size))
        num_groups = triton.cdiv(vocab_size, GROUP_SIZE.value)
        shapes = {
            "token_ids": ((num_reqs, max_rows), torch.int64),
            "num_tokens": ((num_reqs,), torch.int32),
            "floats": ((num_rows, NUM_STAT_FLOATS.value, num_blocks), torch.float32),
            "ints": ((num_rows, NUM_STAT_INTS.value, num_blocks), torch.int32),
            "group_max": ((num_rows, num_groups), torch.float32),
            "group_list": ((num_reqs, num_groups), torch.int32),
            "plan_floats": ((num_reqs, NUM_PLAN_FLOATS.value), torch.float32),
            "plan_ints": ((num_reqs, NUM_PLAN_INTS.value), torch.int64),
            "scores": ((num_reqs, num_blocks), torch.float32),
            "samples": ((num_reqs, num_blocks), torch.int32),
        }
        tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
        return cls(**tensors, vocab_size=vocab_size)

    def check(self, inputs: VerifyInputs) -> None:
        """Raise ValueError unless the inputs fit."""
        room = (self.floats.shape[0], self.token_ids.shape[0], self.vocab_size, self.token_ids.shape[1])
        needs = (inputs.num_rows, inputs.num_reqs, inputs.vocab_size, inputs.max_rows)
        if room[0] < needs[0] or room[1] < needs[1] or room[2:] != needs[2:]:
            raise ValueError(
                f"workspace was made for {room[0]} rows, {room[1]} requests, vocabulary {room[2]} and max_rows "
                f"{room[3]}; asked for: {needs[0]}, {needs[1]}, {needs[2]} and {needs[3]}"
            )
        if self.floats.device != inputs.logits.device:
            raise ValueError(f"workspace is on {self.floats.device}; allowed: {inputs.logits.device}, as logits")


def _block_size(vocab_size: int) -> int:
    return min(BLOCK_SIZE, triton.next_power_of_2(max(vocab_size, GROUP_SIZE.value)))


def verify(inputs: VerifyInputs, workspace: Workspace | None = None) -> VerifyOutput:
    """Verify the drafts of every request; see ``vllm_specplus.verify.verify_draft_tokens``.

    Args:
        inputs: on a CUDA device, or anywhere under Triton's interpreter.
        workspace: takes the results and the scratch; None: a new one.

    Raises:
        ValueError: the workspace does not fit. Or there are more than 65,535 requests, or rows of one. Or nothing can
            run the kernels on the tensors' device.
    """
    if inputs.logits.device.type == "cpu" and isinstance(accept_kernel, triton.JITFunction):
        raise ValueError(
            "logits are on cpu; allowed with backend 'triton': an accelerator, or TRITON_INTERPRET=1 in the environment"
        )
    num_rows, num_reqs, vocab_size, max_rows = inputs.num_rows, inputs.num_reqs, inputs.vocab_size, inputs.max_rows
    for name, size in (("temperature", num_reqs), ("max_rows", max_rows)):
        if size > _MOST_PROGRAMS:
            raise ValueError(f"{name} is for {size:,}; allowed with backend 'triton': at most {_MOST_PROGRAMS:,}")
    if workspace is None:
        workspace = Workspace.allocate(num_rows, num_reqs, vocab_size, max_rows, inputs.logits.device)
    workspace.check(inputs)
    output = VerifyOutput(workspace.token_ids[:num_reqs], workspace.num_tokens[:num_reqs])
    if num_reqs == 0 or num_rows == 0:
        output.token_ids.fill_(-1)
        output.num_tokens.zero_()
    else:
        with torch.cuda.device_of(inputs.logits):
            _launch(inputs, workspace)
    return output


def _launch(inputs: VerifyInputs, w: Workspace) -> None:
    num_reqs, vocab_size, max_rows = inputs.num_reqs, inputs.vocab_size, inputs.max_rows
    num_blocks, num_groups = w.floats.shape[2], w.group_max.shape[1]
    filtered = inputs.max_candidate_len is not None or any(
        f is not None for f in (inputs.top_p, inputs.top_k, inputs.min_p)
    )
    max_candidates = min(inputs.max_candidate_len or NO_LIMIT.value, NO_LIMIT.value)
    strategy = STRATEGIES.index(inputs.strategy)

    logits, draft_logits = _logits(inputs), _draft_logits(inputs)
    rows = Rows(inputs.cu_num_rows, inputs.draft_token_ids)
    temperature, keys = inputs.temperature, NoiseKeys(inputs.seeds, inputs.positions)
    stats, groups = Stats(w.floats, w.ints, num_blocks), Groups(w.group_max, w.group_list, num_groups)
    plans, samples = Plans(w.plan_floats, w.plan_ints), Samples(w.scores, w.samples, num_blocks)
    sizes = _sizes(num_blocks, num_groups)
    wide = {"FILTERED": filtered, "BLOCK_GROUPS": _block_size(vocab_size) // GROUP_SIZE.value, "num_warps": 8}
    narrow = {"FILTERED": filtered, "num_warps": 16 if filtered else 4}

    row_stats_kernel[(num_blocks, max_rows, num_reqs)](
        logits, draft_logits, rows, temperature, keys, stats, groups, max_rows, STRATEGY=strategy, **wide
    )
    accept_kernel[(num_reqs,)](
        logits,
        draft_logits,
        rows,
        temperature,
        Filters(inputs.top_p, inputs.top_k, inputs.min_p),
        keys,
        stats,
        groups,
        plans,
        Output(w.token_ids, w.num_tokens),
        max_rows,
        min(inputs.verify_window, max_rows),
        max_candidates,
        sizes,
        STRATEGY=strategy,
        POLICY=POLICIES.index(inputs.policy),
        ALL_SLOTS=triton.next_power_of_2(max_rows),
        **narrow,
    )
    if inputs.strategy in SAMPLED_LATER:
        min_p = Filters(None, None, inputs.min_p)
        sample_kernel[(num_blocks, num_reqs)](
            logits, draft_logits, temperature, min_p, keys, groups, plans, samples, **wide
        )
        emit_kernel[(num_reqs,)](
            logits,
            draft_logits,
            temperature,
            Filters(None, inputs.top_k, inputs.min_p),
            keys,
            groups,
            plans,
            samples,
            w.token_ids,
            max_rows,
            max_candidates,
            sizes,
            **narrow,
        )


def _logits(inputs: VerifyInputs) -> Logits:
    logits = _unit_stride(inputs.logits)
    return Logits(logits, logits.stride(0), inputs.vocab_size)


def _draft_logits(inputs: VerifyInputs) -> DraftLogits:
    if inputs.draft_logits is None:
        return DraftLogits(None, 0, inputs.draft_rows)
    draft_logits = _unit_stride(inputs.draft_logits)
    return DraftLogits(draft_logits, draft_logits.stride(0), inputs.draft_rows)


def _sizes(num_blocks: int, num_groups: int) -> Sizes:
    all_groups = triton.next_power_of_2(num_groups)
    tile_groups = min(TILE_SIZE // GROUP_SIZE.value, all_groups)
    return Sizes(*map(tl.constexpr, (triton.next_power_of_2(num_blocks), all_groups, tile_groups)))


def _unit_stride(logits: torch.Tensor) -> torch.Tensor:
    """The same logits, each row in one piece; copied only where they are not."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()
