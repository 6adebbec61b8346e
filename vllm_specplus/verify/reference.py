"""The specification of verification: one request after the other, one row after the other.

Every backend must return the tokens and the counts that :func:`verify` returns. A row is a row of target logits; ``z``
is that row divided by the request's temperature, in float32. Token ids are ordered by (z descending, id ascending).
Every filter keeps a number of first tokens of that order.

| strategy       | accepts a draft d iff                                  | emits       | lossless |
|----------------|--------------------------------------------------------|-------------|----------|
| `greedy`       | d is the first of the order                            | the first   | no (*)   |
| `target_match` | d is the token sampled from the nucleus with the noise | that sample | yes      |
|                | of (seed, position)                                    |             |          |
| `topp`         | d is a candidate: one of the first `max_candidate_len` | a sample of | no (*)   |
|                | of the nucleus; or d is the second of the order and    | the candi-  |          |
|                | the next `verify_window` rows hold drafts that are     | dates       |          |
|                | the first of theirs                                    |             |          |
| `rejection`    | p(d) > u q(d), with the nucleus's p, the draft         | a sample of | yes      |
|                | model's q, and the uniform number u of (seed,          | max(p - q,  |          |
|                | position); q(d) is 1 without `draft_logits`            | 0); of p    |          |
|                |                                                        | where no    |          |
|                |                                                        | draft fell  |          |

Lossless: the text follows the target's (truncated) distribution, whatever the drafts.
(*) lossless at temperature 0, where every strategy is `greedy` and all text is the target's own.

The nucleus: min-p keeps the tokens at least `min_p` times as likely as the likeliest. top-k keeps the first k of those.
top-p then keeps a token if those ranked above it have less than `top_p` of the remaining mass. One token always stays.

A sample is the argmax of z + noise (the lower id on a tie), with the noise of
`noise.gumbel_noise`, u that of `noise.acceptance_uniform`. `rejection` samples by log(p - q) + noise;
without `draft_logits` that is z + noise over the nucleus without d. If rounding leaves p above q nowhere, it emits the
first. q is the softmax of the draft logits divided by the temperature.

Infinities and NaN: a NaN logit counts as -inf. A draft is never accepted if its z is -inf, if it is not in the
vocabulary, or if it stands on a bonus row. A row of -inf alone emits token 0. Logits of +inf share all the mass, and a
sample takes the lowest id among them. A row of draft logits that is all -inf is no distribution: its draft was not
sampled, and q(d) is 1.

Arithmetic: z and z + noise are float32. Masses are float64 sums of exp(z - max z) here and may be float32 in a backend.
Backends must agree whenever no mass lies within rounding of its threshold. Rounding is 1e-6 of the row's mass, and
2^-23 of it for each unit of max |z|, as z is rounded too. They agree too where the sums are exact, as among equal
logits. Within rounding three comparisons may go either way: a mass and its threshold; p(d) and u q(d); two scores, z or
log(p - q) + noise. So may a weight and min_p, if within 1e-4 of itself. Even then the emitted token is a candidate by
the backend's own sums. Two logits that differ may have the same z; a backend may order them by the logits, which spares
it a division. A probability under 1e-30 may count as 0.

Open: a temperature above 0 but outside of 1e-30 to 1e30, and a row with a finite logit whose z is beyond float32. There
a backend may take the nearest temperature inside, and may order and weigh by the logits what z makes equal. Counts and
tokens stay in range, an accepted token is the draft, and a draft whose logit is -inf is not accepted.

Sources: drafting and verifying, Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318), which
is `rejection`. `topp` and its `verify_window`: the verification rule of PaddleNLP and FastDeploy. Sampling by a shared
argmax of z + noise: the Gumbel-max trick, as in vLLM's V2 runner.
"""

import math
from dataclasses import dataclass

import torch

from vllm_specplus.verify.noise import acceptance_uniform, gumbel_noise
from vllm_specplus.verify.types import VerifyInputs, VerifyOutput


@dataclass(frozen=True)
class Row:
    """One row of target logits, read.

    Attributes:
        order: all token ids, the likeliest first.
        candidates: first tokens of `order`; the row emits one of them.
        score: z or log(p - q) + noise of each token that may be emitted; the best is emitted.
        draft: the draft under test, or None where there is none that could be accepted.
        accepts_draft: `rejection`: whether the draft under test is accepted.
    """

    order: list[int]
    candidates: list[int]
    score: dict[int, float]
    draft: int | None
    accepts_draft: bool = False

    @property
    def emits(self) -> int:
        """The token emitted if the run of accepted drafts ends here: the best score, the lower id on a tie."""
        return max(self.score, key=lambda token: (self.score[token], -token))


def verify(inputs: VerifyInputs) -> VerifyOutput:
    """Verify the drafts of every request.

    Args and returns: see ``vllm_specplus.verify.verify_draft_tokens``. Slow: made to be read.
    """
    device = inputs.logits.device
    token_ids = torch.full((inputs.num_reqs, inputs.max_rows), -1, dtype=torch.int64)
    num_tokens = torch.zeros(inputs.num_reqs, dtype=torch.int32)
    for r in range(inputs.num_reqs):
        tokens = verify_request(inputs, r)
        token_ids[r, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        num_tokens[r] = len(tokens)
    return VerifyOutput(token_ids.to(device), num_tokens.to(device))


def verify_request(inputs: VerifyInputs, r: int) -> list[int]:
    """The tokens that request r gains: accepted drafts and one more; none if it has no rows."""
    start, end = inputs.cu_num_rows[r : r + 2].tolist()
    end = min(end, start + inputs.max_rows)
    rows = [read_row(inputs, r, i, is_bonus=i == end - 1) for i in range(start, end)]
    greedy = is_greedy(inputs, r)
    tokens: list[int] = []
    for i, row in enumerate(rows):
        if not accepts(inputs, rows[i:], greedy):
            return [*tokens, row.emits]
        assert row.draft is not None
        tokens.append(row.draft)
    return tokens


def is_greedy(inputs: VerifyInputs, r: int) -> bool:
    return inputs.strategy == "greedy" or inputs.temperature[r].item() == 0


def read_row(inputs: VerifyInputs, r: int, i: int, is_bonus: bool) -> Row:
    z = inputs.logits[i].to(torch.float32)
    z = torch.where(z.isnan(), float("-inf"), z)
    greedy = is_greedy(inputs, r)
    if not greedy:
        z = z / inputs.temperature[r]
    values = z.tolist()
    proposal = None if is_bonus else int(inputs.draft_token_ids[i])
    if proposal is not None and not 0 <= proposal < len(values):
        proposal = None
    draft = proposal if proposal is not None and values[proposal] > -math.inf else None
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if greedy:
        return Row(order, order[:1], {order[0]: 0.0}, draft)

    candidates = nucleus(
        values,
        order,
        top_p=1.0 if inputs.top_p is None else inputs.top_p[r].item(),
        top_k=0 if inputs.top_k is None else int(inputs.top_k[r]),
        min_p=0.0 if inputs.min_p is None else inputs.min_p[r].item(),
    )[: inputs.max_candidate_len]
    seed, position = inputs.seeds[r : r + 1], inputs.positions[i : i + 1]
    noise = gumbel_noise(seed, position, len(values))[0]
    noisy = (z + noise).tolist()
    if inputs.strategy != "rejection" or inputs.policy != "normal" or proposal is None:
        return Row(order, candidates, {token: noisy[token] for token in candidates}, draft)

    p = softmax(values, candidates)
    q = draft_probabilities(inputs, r, i)
    if q is None:
        q = {proposal: 1.0}
        score = {token: noisy[token] for token in candidates if token != proposal}
    else:
        more = [token for token in candidates if p[token] > q[token]]
        score = {token: math.log(p[token] - q[token]) + noise[token].item() for token in more}
    accepts_draft = p.get(proposal, 0.0) > acceptance_uniform(seed, position).item() * q[proposal]
    return Row(order, candidates, score or {order[0]: 0.0}, draft, accepts_draft)


def draft_probabilities(inputs: VerifyInputs, r: int, i: int) -> dict[int, float] | None:
    """The probabilities by which the draft of row i was drawn, or None if it was not."""
    if inputs.draft_logits is None:
        return None
    if inputs.draft_rows is not None:
        i = int(inputs.draft_rows[i])
        if i < 0:
            return None
    z = inputs.draft_logits[i].to(torch.float32)
    z = torch.where(z.isnan(), float("-inf"), z) / inputs.temperature[r]
    return None if z.max() == -math.inf else softmax(z.tolist(), list(range(z.shape[0])))


def softmax(values: list[float], tokens: list[int]) -> dict[int, float]:
    """The softmax of the values of some tokens."""
    weight = weigh([values[token] for token in tokens])
    total = math.fsum(weight) or 1.0
    return {token: w / total for token, w in zip(tokens, weight, strict=True)}


def weigh(values: list[float]) -> list[float]:
    """exp(v - the largest value); all 0 where every value is -inf."""
    best = max(values)
    # exp(inf - inf) is no number, so those that tie with the best are weighed by hand.
    return [0.0 if v == -math.inf else 1.0 if v == best else math.exp(v - best) for v in values]


def nucleus(values: list[float], order: list[int], top_p: float, top_k: int, min_p: float) -> list[int]:
    """The first tokens of `order` that min-p, then top-k, then top-p leave."""
    best = values[order[0]]
    if best == -math.inf:
        return order[:1]
    weight = weigh(values)
    left = [t for t in order if values[t] > -math.inf and weight[t] >= min_p]
    if top_k > 0:
        left = left[:top_k]
    if top_p >= 1:
        return left
    threshold = top_p * math.fsum(weight[t] for t in left)
    count, above = 1, weight[left[0]]
    while count < len(left) and above < threshold:
        above += weight[left[count]]
        count += 1
    return left[:count]


def accepts(inputs: VerifyInputs, rows: list[Row], greedy: bool) -> bool:
    """Whether the first of `rows` (those of a request that are left) accepts its draft."""
    row = rows[0]
    if row.draft is None or inputs.policy == "reject_all":
        return False
    if inputs.policy == "accept_all":
        return True
    if inputs.strategy == "rejection" and not greedy:
        return row.accepts_draft
    if greedy or inputs.strategy == "target_match":
        return row.draft == row.emits
    if inputs.strategy == "topp":
        return row.draft in row.candidates or accepts_second_choice(inputs.verify_window, rows)
    raise NotImplementedError(f"strategy {inputs.strategy!r} has no rule here")


def accepts_second_choice(verify_window: int, rows: list[Row]) -> bool:
    """Whether the draft comes second in its row, and the next `verify_window` drafts come first in theirs.

    Those drafts are accepted by themselves: the first of the order is always a candidate.
    """
    row, following = rows[0], rows[1 : 1 + verify_window]
    return (
        0 < verify_window == len(following)
        and row.draft in row.order[1:2]
        and all(after.draft == after.order[0] for after in following)
    )
