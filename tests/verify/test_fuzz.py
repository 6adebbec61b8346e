"""Random arguments of the public function, many of them wrong: each call answers, or refuses and names the argument."""

import inspect
import math
import re
from typing import Any

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.fuzzing import fuzz
from vllm_specplus.verify import POLICIES, STRATEGIES, verify_draft_tokens

from .test_api import arguments

NAMES = tuple(inspect.signature(verify_draft_tokens).parameters)
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool]
SHAPES = {"logits": (4, 6), "draft_logits": (4, 6), "cu_num_rows": (3,)}
SHAPES |= dict.fromkeys(("draft_token_ids", "positions", "draft_rows"), (4,))
SHAPES |= dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seeds"), (2,))
ODD_SHAPES = [(), (0,), (1,), (5,), (0, 6), (4, 0), (6, 4), (2, 3, 2)]
NAMES_OF_FLOATS = ("logits", "draft_logits", "temperature", "top_p", "min_p")
NUMBERS = st.sampled_from([0.0, 1.0, 0.5, -1.0, 3.0, 4.0, 1e30, 1e300, math.inf, -math.inf, math.nan])
FORMS = [*["dense"] * 4, "strided", "gradients", "meta", "sparse"]
OTHERS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 8)
    | st.sampled_from([-(2**70), 2**31, 2**63, 2**70])
    | NUMBERS
    | st.text(max_size=4)
    | st.sampled_from([*STRATEGIES, *POLICIES, "torch"])
    | st.lists(st.integers(-1, 4), max_size=4)
    | st.just({"greedy": 1})
)


@st.composite
def tensors(draw: st.DrawFn, name: str) -> torch.Tensor:
    """A tensor for an argument: mostly of its shape, of any dtype and form, with numbers that it may not hold too."""
    shape = draw(st.sampled_from([SHAPES[name]] * 2 * len(ODD_SHAPES) + ODD_SHAPES))
    count = math.prod(shape)
    numbers = torch.tensor(draw(st.lists(NUMBERS, min_size=count, max_size=count)), dtype=torch.float64)
    likely = FLOATS if name in NAMES_OF_FLOATS else INTEGERS
    tensor = numbers.reshape(shape).to(draw(st.sampled_from(likely * 4 + FLOATS + INTEGERS + [torch.complex64])))
    form = draw(st.sampled_from(FORMS))
    if form == "meta":
        return tensor.to("meta")
    if form == "sparse":
        return tensor.to_sparse()
    if form == "strided":
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor.requires_grad_(form == "gradients" and tensor.is_floating_point())


def values(name: str) -> st.SearchStrategy[tuple[str, Any]]:
    """An argument by its name."""
    kinds = st.sampled_from([tensors(name), tensors(name), OTHERS] if name in SHAPES else [OTHERS])
    return st.tuples(st.just(name), kinds.flatmap(lambda kind: kind))


CHANGES = st.lists(st.sampled_from(NAMES).flatmap(values), max_size=2).map(dict)


@fuzz
@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(STRATEGIES), CHANGES)
def test_arguments(strategy: str, changes: dict[str, Any]) -> None:
    given = arguments(strategy=strategy, backend="torch") | changes
    refusal = None
    try:
        output = verify_draft_tokens(**given)
    except (TypeError, ValueError) as error:
        refusal = str(error)
    event("answered" if refusal is None else "refused")
    if refusal is None:
        assert len(output.token_ids) == len(output.num_tokens) == len(given["temperature"])
    else:
        assert re.match(rf"({'|'.join(NAMES)}) ", refusal), refusal
