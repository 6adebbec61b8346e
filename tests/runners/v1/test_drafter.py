"""The rows of probabilities that the V1 adapter makes; engines test its other parts."""

import numpy as np
import torch

from vllm_specplus.proposers.hybrid import Drafts
from vllm_specplus.runners.v1.drafter import with_one_hot_rows


def test_one_hot_rows_follow_the_models_own() -> None:
    model_probs = torch.tensor([[[0.2, 0.8, 0.0], [0.5, 0.1, 0.4]]]).repeat(4, 1, 1)
    drafts = Drafts(
        # Two of the model's and a match; a match instead of the model's; one of the model's; none.
        token_ids=[[1, 0, 2], [2, 2, 0], [1], []],
        num_model=np.array([2, 0, 1, 0], np.int32),
    )
    zero = [0.0, 0.0, 0.0]
    assert torch.equal(
        with_one_hot_rows(model_probs, drafts, 3),
        torch.tensor(
            [
                [[0.2, 0.8, 0.0], [0.5, 0.1, 0.4], [0.0, 0.0, 1.0]],
                [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]],
                [[0.2, 0.8, 0.0], zero, zero],
                [zero, zero, zero],
            ]
        ),
    )
