"""Inputs of the verification benchmark, and the test of a right answer.

*Rows.* `peaked` is like a language model's. Every token's logit is 16 - 1.1 ln(rank), a Zipf law over random ranks. But
one token of each row gets a share of the mass, drawn from 0.4 to 1. At T = 0.8, 95% of the mass is then in 1 to some
hundred tokens. `flat` is standard normal: 95% is in two thirds of the vocabulary. Logits are rounded to bfloat16, so
many are equal.

*Drafts.* In `peaked` rows the draft is the token with the large share. Rejection sampling accepts it with its
probability, 0.7 on average. `greedy` would always accept it, so there the draft is another token in 3 rows of 10. In
`flat` rows it is the token of the largest logit, which is hardly ever accepted.

*Right.* A backend of ours is compared with the torch backend, token for token. Both round, so a request may differ in
two cases. The scores of the two tokens are within 1e-5 of each other. Or the torch backend gives that very answer after
a step of 1e-5 in the temperature or 5e-6 in top-p. Float32 moves a score or a mass by less, and a wrong rule by more.
Only one request in 1,000 may differ (one in a smaller cell), none under `greedy`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from vllm_specplus.config.keys import TOPP_DEFAULTS
from vllm_specplus.verify import VerifyOutput, verify_draft_tokens
from vllm_specplus.verify.noise import gumbel_noise

BACKEND = "triton"

SCORE_STEP = 1e-5
TEMPERATURE_STEP = 1e-5
MASS_STEP = 5e-6
ROUNDED_SHARE = 1e-3
NUCLEUS_SLACK = 1e-5  # for peers that search for the border of the nucleus in float32
CHUNK_ROWS = 256


class WrongOutputError(Exception):
    """A method's tokens are not what its definition says."""


@dataclass(frozen=True)
class Setting:
    """Sampling parameters that all requests of a case share; None is off."""

    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


SETTINGS = {
    "greedy": Setting(0.0),
    "T=0.8": Setting(0.8),
    "top-p": Setting(0.8, top_p=0.95),
    "top-p+top-k": Setting(0.8, top_p=0.95, top_k=50),
}
# `topp` has the limits that the plugin's config has by default, and so has the step that is estimated.
OPTIONS: dict[str, dict[str, int]] = {"topp": TOPP_DEFAULTS}

# Goals: a whole step at most takes as long as this many reads of the logits, by strategy and setting.
MOST_READS = {
    "rejection": {"greedy": 1.2, "T=0.8": 1.6, "top-p": 2.5, "top-p+top-k": 2.8},
    "topp": {"greedy": 1.2, "T=0.8": 1.6, "top-p": 2.5, "top-p+top-k": 2.8},
    "target_match": {"greedy": 1.2, "T=0.8": 3.3, "top-p": 3.6, "top-p+top-k": 3.8},
}


@dataclass(frozen=True)
class Case:
    """One batch: every request has `num_drafts` drafts and so `num_drafts + 1` rows."""

    setting: Setting
    batch: int
    num_drafts: int
    logits: torch.Tensor  # [batch * (num_drafts + 1), vocab]
    draft_token_ids: torch.Tensor  # [num_rows] int64, -1 on the bonus rows
    seeds: torch.Tensor  # [batch] int64
    positions: torch.Tensor  # [num_rows] int64
    cu_num_rows: torch.Tensor  # [batch + 1] int32
    draft_logits: torch.Tensor | None = None  # as `logits`, of a draft model whose drafts are sampled

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.logits.numel() * self.logits.element_size()

    def fill(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        """``[batch]``: one sampling parameter, the same for all."""
        return torch.full((self.batch,), value, dtype=dtype, device=self.logits.device)

    def scaled(self, rows: slice = slice(None)) -> torch.Tensor:
        """``[n, vocab]`` float32: logits over temperature."""
        return self.logits[rows].float() / (self.setting.temperature or 1.0)


def make_case(
    kind: str, setting: Setting, batch: int, num_drafts: int, vocab_size: int, device: str, seed: int
) -> Case:
    """Random rows and drafts of a kind, bfloat16, on `device`."""
    g = torch.Generator(device).manual_seed(seed)
    width = num_drafts + 1
    shape = (batch * width, vocab_size)
    random = {"generator": g, "device": device}
    if kind == "flat":
        logits = torch.randn(shape, **random)
        drafts = logits.argmax(dim=1)
    else:
        rank = (torch.rand(shape, **random) * vocab_size).clamp_(min=1)
        logits = rank.log_().mul_(-1.1).add_(16)
        drafts = torch.randint(vocab_size, shape[:1], **random)
        share = torch.rand(shape[:1], **random) * 0.6 + 0.4
        temperature = setting.temperature or 1.0
        others = (logits / temperature).logsumexp(dim=1)
        logits[torch.arange(shape[0], device=device), drafts] = temperature * (others + share.logit(eps=1e-4))
    if setting.is_greedy:
        wrong = torch.rand(shape[:1], **random) < 0.3
        drafts = torch.where(wrong, (drafts + 1) % vocab_size, drafts)
    rows = torch.arange(shape[0], device=device)
    drafts[rows % width == num_drafts] = -1
    starts = torch.randint(1, 1 << 15, (batch,), **random)
    return Case(
        setting,
        batch,
        num_drafts,
        logits.bfloat16(),
        drafts,
        seeds=torch.randint(1 << 62, (batch,), **random),
        positions=starts.repeat_interleave(width) + rows % width,
        cu_num_rows=torch.arange(0, shape[0] + 1, width, dtype=torch.int32, device=device),
    )


def ours(case: Case, strategy: str, backend: str) -> Callable[[], VerifyOutput]:
    """A call of `verify_draft_tokens` with all that a graph-safe call needs."""
    setting = case.setting
    top_p = None if setting.top_p is None else case.fill(setting.top_p, torch.float32)
    top_k = None if setting.top_k is None else case.fill(setting.top_k, torch.int32)
    min_p = None if setting.min_p is None else case.fill(setting.min_p, torch.float32)
    temperature = case.fill(setting.temperature, torch.float32)
    return lambda: verify_draft_tokens(
        case.logits,
        case.cu_num_rows,
        case.draft_token_ids,
        temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seeds=case.seeds,
        positions=case.positions,
        strategy=strategy,
        backend=backend,
        draft_logits=case.draft_logits,
        max_rows=case.num_drafts + 1,
        **OPTIONS.get(strategy, {}),
    )


def check_same(case: Case, strategy: str, actual: VerifyOutput) -> int:
    """Compare with the torch backend; how many requests differ by rounding.

    Raises:
        WrongOutputError: a difference that rounding does not explain, or too many.
    """
    expected = ours(case, strategy, "torch")()
    differ = _differ(expected, actual)
    count = int(differ.sum())
    if count == 0:
        return 0
    where = f"{count} of {case.batch} requests"
    allowed = 0 if case.setting.is_greedy else max(1, int(case.batch * ROUNDED_SHARE))
    if count > allowed:
        raise WrongOutputError(f"{where} differ from the torch backend, {allowed} may")
    for moved in _moved(case):
        differ &= _differ(ours(moved, strategy, "torch")(), actual)
    for r in differ.nonzero()[:, 0].tolist():
        if _score_gap(case, r, expected, actual) > SCORE_STEP:
            raise WrongOutputError(f"{where} differ from the torch backend, by more than rounding: request {r}")
    return count


def _differ(a: VerifyOutput, b: VerifyOutput) -> torch.Tensor:
    """``[batch]`` bool."""
    return (a.num_tokens != b.num_tokens) | (a.token_ids != b.token_ids).any(dim=1)


def _moved(case: Case) -> Iterator[Case]:
    setting = case.setting
    for sign in (1, -1):
        temperature = setting.temperature * (1 + sign * TEMPERATURE_STEP)
        yield replace(case, setting=replace(setting, temperature=temperature))
        if setting.top_p is not None:
            yield replace(case, setting=replace(setting, top_p=setting.top_p + sign * MASS_STEP))


def _score_gap(case: Case, r: int, a: VerifyOutput, b: VerifyOutput) -> float:
    """How far apart the two tokens score at the first slot where the outputs of request r differ."""
    slot = int((a.token_ids[r] != b.token_ids[r]).nonzero()[0, 0])
    tokens = torch.stack((a.token_ids[r, slot], b.token_ids[r, slot]))
    if not bool(((tokens >= 0) & (tokens < case.logits.shape[1])).all()):
        return float("inf")
    row = r * (case.num_drafts + 1) + slot
    noise = gumbel_noise(case.seeds[r : r + 1], case.positions[row : row + 1], case.logits.shape[1])
    scores = (case.scaled(slice(row, row + 1)) + noise)[0, tokens]
    return abs(float(scores[0] - scores[1]))


def check_nucleus(case: Case, in_nucleus: torch.Tensor) -> None:
    """Check a peer's filter, ``[num_rows, vocab]`` bool, whichever of the equal logits at the border it keeps.

    Raises:
        WrongOutputError: a row keeps too much, too little, or not the largest.
    """
    for start in range(0, case.num_rows, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        z, inside = case.scaled(rows), in_nucleus[rows]
        border = z.masked_fill(~inside, float("inf")).amin(dim=1)
        right = z.masked_fill(inside, float("-inf")).amax(dim=1) <= border
        right &= _reaches(case, z, border)
        if case.setting.top_p is not None:
            weight, total = _weigh(case, z)
            right &= (weight * inside).sum(dim=1) >= (case.setting.top_p - NUCLEUS_SLACK) * total
        elif case.setting.top_k is not None:
            right &= inside.sum(dim=1) >= case.setting.top_k
        else:
            right &= inside.all(dim=1)
        if not bool(right.all()):
            raise WrongOutputError(f"the nucleus of {int((~right).sum())} rows is wrong")


def check_tokens(case: Case, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Check that each of `tokens` is in the nucleus of its row, an equal of the last one included.

    Raises:
        WrongOutputError: one is not.
    """
    for start in range(0, rows.shape[0], CHUNK_ROWS):
        chunk = rows[start : start + CHUNK_ROWS]
        z = case.logits[chunk].float() / (case.setting.temperature or 1.0)
        at = z.gather(1, tokens[start : start + CHUNK_ROWS, None])[:, 0]
        if not bool(_reaches(case, z, at).all()):
            raise WrongOutputError("a token is outside the nucleus")


def _reaches(case: Case, z: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """``[n]`` bool: whether a token at `level` is in the nucleus, judged by the tokens above it."""
    above = z > level[:, None]
    result = torch.ones_like(level, dtype=torch.bool)
    if case.setting.top_k is not None:
        result &= above.sum(dim=1) < case.setting.top_k
    if case.setting.top_p is not None:
        weight, total = _weigh(case, z)
        result &= (weight * above).sum(dim=1) < (case.setting.top_p + NUCLEUS_SLACK) * total
    return result


def _weigh(case: Case, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, ``[n, vocab]`` float64, and the sum of those that top-k keeps, ``[n]``."""
    weight = (z - z.amax(dim=1, keepdim=True)).double().exp()
    top_k = case.setting.top_k
    total = weight.sum(dim=1) if top_k is None else weight.topk(min(top_k, z.shape[1]), dim=1).values.sum(dim=1)
    return weight, total
