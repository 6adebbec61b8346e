"""Launches the kernels that verify draft tokens as ``verify/reference.py`` says.

| kernel                 | programs      | reads                 | writes                                             |
|------------------------|---------------|-----------------------|----------------------------------------------------|
| `row_stats_kernel`     | rows x blocks | every logit, once     | the largest logit of each group; per block the     |
|                        | of the        |                       | largest, the mass, and the mass above the draft    |
|                        | vocabulary    |                       |                                                    |
| `judge_kernel`         | some for each | statistics; the few   | whether the draft is accepted; the row's own token |
|                        | request       | logits that count     | where few logits count                             |
| `race_kernel`          | rows x blocks | rows without a token  | the groups that may hold the sample                |
| `emit_kernel`          | requests/rows | those groups          | the tokens                                         |
| `accept_greedy_kernel` | requests      | statistics            | the tokens, without the three kernels before       |

Nothing is sorted and no logits are copied. `race_kernel` reads one row a request, or each row for `target_match`.
Slow paths are in ``nucleus.py``, where top-k keeps many tokens, and in ``order.py``, for samples outside the nucleus.

The host never waits. The launches depend on shapes and `max_rows` alone, so with a `Workspace` made before they can be
captured in a CUDA graph.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.sizes import cdiv, next_power_of_2
from vllm_specplus.kernels.verify.arguments import (
    NO_LIMIT,
    NUM_PLAN_FLOATS,
    NUM_PLAN_INTS,
    NUM_STATS,
    DraftLogits,
    Filters,
    Groups,
    Heads,
    Logits,
    NoiseKeys,
    Output,
    Plans,
    Rows,
    Sizes,
    Stats,
)
from vllm_specplus.kernels.verify.emit import emit_kernel
from vllm_specplus.kernels.verify.greedy import accept_greedy_kernel
from vllm_specplus.kernels.verify.judge import judge_kernel
from vllm_specplus.kernels.verify.nucleus import GROUP_SIZE
from vllm_specplus.kernels.verify.race import race_kernel
from vllm_specplus.kernels.verify.row_stats import row_stats_kernel
from vllm_specplus.kernels.verify.strategies import BY_NUCLEUS
from vllm_specplus.strategies import POLICIES, STRATEGIES
from vllm_specplus.verify.types import VerifyInputs, VerifyOutput

# Logits that one program of the wide kernels takes, and that one step of each slow path takes.
BLOCK_SIZE = 8192
TILE_SIZE = 2048
SCAN_SIZE = 32_768
LIST_SIZE = 2048
# Where each row has a program. They hold fewer registers so, and more of them run side by side.
ROW_SIZES = {"LIST_GROUPS": tl.constexpr(8), "LISTED_GROUPS": tl.constexpr(512)}
# Rows of a request that are judged by statistics together, and programs with filters that run side by side on an H100.
JUDGED_ROWS = 32
JUDGES_AT_ONCE = 256
# The most groups that a head is read from, and the most tokens of a head.
HEAD_GROUPS = 96
HEAD_SIZE = 128
_ALIGNMENT = 16  # bytes
_VECTORS = (
    *("cu_num_rows", "draft_token_ids", "temperature", "top_p", "top_k", "min_p"),
    *("seeds", "positions", "draft_rows"),
)
# With that number of registers two programs fit on a multiprocessor. AMD's compiler does not know the option.
_JUDGE_WITH_FILTERS = {"num_warps": 8} if torch.version.hip else {"num_warps": 8, "maxnreg": 128}
# With fewer registers, as the compiler chooses, a thread's loads begin one after another.
_RACE = {"num_warps": 4} if torch.version.hip else {"num_warps": 4, "maxnreg": 96}
_RACE_FLOAT32 = _RACE if torch.version.hip else _RACE | {"maxnreg": 104}  # with 96 it would spill


@dataclass(frozen=True)
class Workspace:
    """Outputs and scratch of a verification, made once and used for many.

    It fits inputs of at most this many rows and requests, and of exactly this vocabulary and `max_rows`. A result
    stands in it until the next verification. ``arguments.py`` describes the scratch.
    """

    token_ids: torch.Tensor  # [num_reqs, max_rows] int64
    num_tokens: torch.Tensor  # [num_reqs] int32
    stats: torch.Tensor  # [num_rows, NUM_STATS, num_blocks] float32
    group_max: torch.Tensor  # [num_rows, num_groups] float32, or as many logits of another type
    group_list: torch.Tensor  # [num_rows, num_groups] int32
    visited: torch.Tensor  # [num_rows, num_groups] int32
    head_tokens: torch.Tensor  # [num_rows, HEAD_SIZE] int32
    head_logits: torch.Tensor  # [num_rows, HEAD_SIZE] float32
    plan_floats: torch.Tensor  # [num_rows, NUM_PLAN_FLOATS] float32
    plan_ints: torch.Tensor  # [num_rows, NUM_PLAN_INTS] int32
    vocab_size: int

    @classmethod
    def allocate(
        cls, num_rows: int, num_reqs: int, vocab_size: int, max_rows: int, device: torch.device | str
    ) -> "Workspace":
        """Make one. With a vocabulary of 150,000 it takes about 0.2 byte for each logit of `num_rows` rows."""
        num_blocks = cdiv(vocab_size, _block_size(vocab_size))
        # Whole blocks: then rows are aligned for wide loads.
        num_groups = num_blocks * _block_size(vocab_size) // GROUP_SIZE.value
        shapes = {
            "token_ids": ((num_reqs, max_rows), torch.int64),
            "num_tokens": ((num_reqs,), torch.int32),
            "stats": ((num_rows, NUM_STATS.value, num_blocks), torch.float32),
            "group_max": ((num_rows, num_groups), torch.float32),
            "group_list": ((num_rows, num_groups), torch.int32),
            "visited": ((num_rows, num_groups), torch.int32),
            "head_tokens": ((num_rows, HEAD_SIZE), torch.int32),
            "head_logits": ((num_rows, HEAD_SIZE), torch.float32),
            "plan_floats": ((num_rows, NUM_PLAN_FLOATS.value), torch.float32),
            "plan_ints": ((num_rows, NUM_PLAN_INTS.value), torch.int32),
        }
        tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
        return cls(**tensors, vocab_size=vocab_size)

    def with_outputs(self, num_reqs: int, max_rows: int) -> "Workspace":
        """Return one with the same scratch, and outputs of its own that the next verification leaves as they are."""
        device = self.token_ids.device
        return replace(
            self,
            token_ids=torch.empty((num_reqs, max_rows), dtype=torch.int64, device=device),
            num_tokens=torch.empty(num_reqs, dtype=torch.int32, device=device),
        )

    def check(self, inputs: VerifyInputs) -> None:
        """Raise ValueError unless the inputs fit."""
        room = (self.stats.shape[0], self.token_ids.shape[0], self.vocab_size, self.token_ids.shape[1])
        needs = (inputs.num_rows, inputs.num_reqs, inputs.vocab_size, inputs.max_rows)
        if room[0] < needs[0] or room[1] < needs[1] or room[2:] != needs[2:]:
            raise ValueError(
                f"workspace was made for {room[0]} rows, {room[1]} requests, vocabulary {room[2]} and max_rows "
                f"{room[3]}; asked for: {needs[0]}, {needs[1]}, {needs[2]} and {needs[3]}"
            )
        if self.stats.device != inputs.logits.device:
            raise ValueError(f"workspace is on {self.stats.device}; allowed: {inputs.logits.device}, as logits")


def _block_size(vocab_size: int) -> int:
    return min(BLOCK_SIZE, next_power_of_2(max(vocab_size, GROUP_SIZE.value)))


def verify(inputs: VerifyInputs, workspace: Workspace | None = None) -> VerifyOutput:
    """Verify the drafts of every request; see ``vllm_specplus.verify.verify_draft_tokens``.

    Args:
        inputs: on a CUDA device, or anywhere under Triton's interpreter.
        workspace: takes the results and the scratch; None: a new one.

    Raises:
        ValueError: the workspace does not fit. Or nothing can run the kernels on the tensors' device.
    """
    if inputs.logits.device.type == "cpu" and isinstance(judge_kernel, triton.JITFunction):
        raise ValueError(
            "logits are on cpu; allowed with backend 'triton': an accelerator, or TRITON_INTERPRET=1 in the environment"
        )
    num_rows, num_reqs, vocab_size, max_rows = inputs.num_rows, inputs.num_reqs, inputs.vocab_size, inputs.max_rows
    if workspace is None:
        workspace = Workspace.allocate(num_rows, num_reqs, vocab_size, max_rows, inputs.logits.device)
    workspace.check(inputs)
    output = VerifyOutput(workspace.token_ids[:num_reqs], workspace.num_tokens[:num_reqs])
    if num_reqs == 0 or num_rows == 0:
        output.token_ids.fill_(-1)
        output.num_tokens.zero_()
    else:
        with torch.cuda.device_of(inputs.logits):
            _launch(_aligned(inputs), workspace)
    return output


def _launch(inputs: VerifyInputs, w: Workspace) -> None:
    num_rows, num_reqs, max_rows = inputs.num_rows, inputs.num_reqs, inputs.max_rows
    num_blocks, num_groups = w.stats.shape[2], w.group_max.shape[1]
    block_size = _block_size(inputs.vocab_size)
    of_paths = TILE_SIZE, SCAN_SIZE, LIST_SIZE, JUDGED_ROWS, HEAD_GROUPS, HEAD_SIZE
    sizes = _sizes(num_blocks, num_groups, block_size, max_rows, of_paths)
    dense = _unit_stride(inputs.logits)
    logits, draft_logits = Logits(dense, dense.stride(0), inputs.vocab_size), _draft_logits(inputs)
    rows = Rows(inputs.cu_num_rows, inputs.draft_token_ids)
    # Each is one of the logits, so it fits their type, and the first pass writes less.
    group_max = w.group_max.view(inputs.logits.dtype)
    stats, groups = Stats(w.stats, num_blocks), Groups(group_max, w.group_list, num_groups)
    output = Output(w.token_ids, w.num_tokens)
    temperature = inputs.temperature
    strategy, policy = STRATEGIES.index(inputs.strategy), POLICIES.index(inputs.policy)
    of_blocks = {"BLOCK_GROUPS": sizes.BLOCK_GROUPS.value}

    row_stats_kernel[(num_rows, num_blocks)](
        logits,
        draft_logits,
        rows,
        temperature,
        stats,
        groups,
        num_reqs,
        max_rows,
        STRATEGY=strategy,
        WITH_ABOVE=inputs.top_p is not None and inputs.strategy in BY_NUCLEUS,
        **of_blocks,
        num_warps=8,
    )
    if inputs.strategy == "greedy":
        accept_greedy_kernel[(num_reqs,)](
            logits, rows, stats, groups, output, max_rows, sizes, POLICY=policy, num_warps=4
        )
        return

    keys, plans = NoiseKeys(inputs.seeds, inputs.positions), Plans(w.plan_floats, w.plan_ints)
    max_candidates = min(inputs.max_candidate_len or NO_LIMIT.value, NO_LIMIT.value)
    filters = inputs.top_p, inputs.top_k, inputs.min_p, inputs.max_candidate_len
    filtered = any(each is not None for each in filters)
    each_row = inputs.strategy == "target_match" and inputs.policy == "normal"
    judges = _num_judges(num_reqs, max_rows, filtered, each_row)
    judge_kernel[(num_reqs * judges,)](
        logits,
        draft_logits,
        rows,
        temperature,
        Filters(*filters[:3]),
        keys,
        stats,
        groups,
        Heads(w.head_tokens, w.head_logits),
        plans,
        num_reqs,
        num_rows,
        max_rows,
        min(inputs.verify_window, max_rows),
        max_candidates,
        sizes._replace(SCAN_GROUPS=sizes.TILE_GROUPS),
        STRATEGY=strategy,
        POLICY=policy,
        FILTERED=filtered,
        **(_JUDGE_WITH_FILTERS if filtered else {"num_warps": 4}),
    )
    race_kernel[(num_rows if each_row else num_reqs, num_blocks)](
        logits,
        rows,
        temperature,
        keys,
        groups,
        plans,
        max_rows,
        EACH_ROW=each_row,
        WITH_FLOOR=any(each is not None for each in filters[1:]),
        ALL_SLOTS=sizes.ALL_SLOTS.value,
        **of_blocks,
        **(_RACE_FLOAT32 if inputs.logits.dtype == torch.float32 else _RACE),
    )
    samples_rows = each_row and not filtered
    emit_kernel[(max(num_rows, num_reqs) if samples_rows else num_reqs,)](
        logits,
        draft_logits,
        rows,
        temperature,
        Filters(None, inputs.top_k, inputs.min_p),
        keys,
        stats,
        groups,
        w.visited,
        plans,
        output,
        num_reqs,
        num_rows,
        max_rows,
        max_candidates,
        sizes._replace(**ROW_SIZES) if samples_rows else sizes,
        EACH_ROW=each_row,
        FILTERED=filtered,
        num_warps=4 if samples_rows else 16,
    )


def _num_judges(num_reqs: int, max_rows: int, filtered: bool, each_row: bool) -> int:
    """Programs of `judge_kernel` for each request: all of them run at once, where most rows need one."""
    if not (filtered or each_row):
        return 1  # statistics leave one row open, which takes a moment
    return max(1, min(max_rows, (JUDGES_AT_ONCE if filtered else 2 * JUDGES_AT_ONCE) // num_reqs))


def _aligned(inputs: VerifyInputs) -> VerifyInputs:
    """The same inputs, each vector at an address that Triton compiles for; one that is not there is copied.

    Triton compiles once for addresses divisible by 16 and once for others. A slice, such as vLLM makes of the positions
    of a chunk of requests, may lie anywhere. Without the copy the first such slice would wait for the compiler.
    """
    vectors = {name: getattr(inputs, name) for name in _VECTORS}
    moved = {name: v.clone() for name, v in vectors.items() if v is not None and v.data_ptr() % _ALIGNMENT}
    return replace(inputs, **moved) if moved else inputs


def _draft_logits(inputs: VerifyInputs) -> DraftLogits:
    if inputs.draft_logits is None:
        return DraftLogits(None, 0, inputs.draft_rows)
    draft_logits = _unit_stride(inputs.draft_logits)
    return DraftLogits(draft_logits, draft_logits.stride(0), inputs.draft_rows)


@functools.cache
def _sizes(num_blocks: int, num_groups: int, block_size: int, max_rows: int, of_paths: tuple[int, ...]) -> Sizes:
    """Of a launch, with this module's sizes of the paths in `of_paths`. They are made once, as that takes 20 µs."""
    *of_steps, judged_rows, head_groups, head_size = of_paths
    all_groups, all_slots = next_power_of_2(num_groups), next_power_of_2(max_rows)
    tile_groups, scan_groups, list_groups = (min(size // GROUP_SIZE.value, all_groups) for size in of_steps)
    sizes = Sizes(
        ALL_BLOCKS=next_power_of_2(num_blocks),
        ALL_GROUPS=all_groups,
        BLOCK_GROUPS=block_size // GROUP_SIZE.value,
        TILE_GROUPS=tile_groups,
        SCAN_GROUPS=scan_groups,
        LIST_GROUPS=list_groups,
        LISTED_GROUPS=all_groups,
        ALL_SLOTS=all_slots,
        JUDGED_ROWS=min(judged_rows, all_slots),
        HEAD_GROUPS=head_groups,
        HEAD_SIZE=head_size,
    )
    return Sizes(*map(tl.constexpr, sizes))


def _unit_stride(logits: torch.Tensor) -> torch.Tensor:
    """The same logits, each row in one piece; copied only where they are not."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()
