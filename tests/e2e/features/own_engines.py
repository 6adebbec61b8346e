"""vLLM's features that each need engines started for them: arguments or a model of their own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams, envs
from vllm.lora.request import LoRARequest
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from tests.e2e.eagle_heads import make_eagle_head
from tests.e2e.engines import ADAPTIVE, PROMPTS, Engine
from tests.e2e.features.outcomes import STOCK, Start, drafted, engine_outcome
from tests.e2e.variants import ADAPTER_RANK, AUDIO_TOKEN, make_adapter, make_listener, sound
from vllm_specplus.testing.tiny_model import make_random

FEW = PROMPTS[:3]
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@dataclass(frozen=True)
class OwnEngines:
    """A feature, and the engines that it is asked of.

    Attributes:
        ask: returns what must be the same with speculation.
        model: the folder of the weights.
        args: further arguments of the engine.
        ours, stock: the speculative configs.
    """

    ask: Callable[[Engine], Any]
    model: Path
    args: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=lambda: ADAPTIVE)
    stock: dict[str, Any] = field(default_factory=lambda: STOCK)

    def outcome(self, start: Start, config: dict[str, Any] | None) -> Any:
        """What becomes of the feature, or of the engine's start, with this speculative config."""

        def start_and_ask() -> Any:
            with start(self.model, config, **self.args) as e:
                found = self.ask(e)
                assert config is None or (drafted(e, config) > 0 and e.counts().accepted > 0)
                return found

        return engine_outcome(start_and_ask)


def lora(trained: Path, folder: Path) -> OwnEngines:
    """Texts of the model, and of two adapters in one batch.

    On a CPU vLLM gives a request without an adapter that of another in its batch, with and without speculation.
    """
    adapters = [
        LoRARequest(f"adapter-{i}", i, str(make_adapter(folder / f"adapter-{i}", trained, seed=i))) for i in (1, 2)
    ]

    def ask(e: Engine) -> Any:
        prompts = [{"prompt_token_ids": p} for p in FEW for _ in adapters]
        results = e.llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=adapters * len(FEW))
        texts = [list(r.outputs[0].token_ids) for r in results]
        without = e.tokens(FEW, max_tokens=PARAMS.max_tokens)
        assert len({str(kind) for kind in (without, texts[::2], texts[1::2])}) == 3
        return without, texts

    return OwnEngines(ask, trained, {"enable_lora": True, "max_loras": 2, "max_lora_rank": ADAPTER_RANK})


FORBIDDEN = ord("e")


class ForbidsOnV1(V1LogitsProcessor):
    """Forbids a letter."""

    def __init__(self, *args: Any):
        pass

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(1, torch.tensor([FORBIDDEN]), -torch.inf)


class ForbidsOnV2(V2LogitsProcessor):
    """Forbids a letter, and a second one by the position."""

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        second = ord("a") + ctx.pos % 26
        return logits.index_fill(1, torch.tensor([FORBIDDEN]), -torch.inf).scatter(1, second[:, None], -torch.inf)


def logits_processors(trained: Path, folder: Path) -> OwnEngines:
    """A processor of the user's."""

    def ask(e: Engine) -> Any:
        texts = e.tokens(FEW, max_tokens=24)
        assert not any(FORBIDDEN in text for text in texts)
        return texts

    forbids = ForbidsOnV2 if envs.VLLM_USE_V2_MODEL_RUNNER else ForbidsOnV1
    return OwnEngines(ask, trained, {"logits_processors": [forbids]})


def sleep_mode(trained: Path, folder: Path) -> OwnEngines:
    """Memory is given back and taken again between two requests."""

    def ask(e: Engine) -> Any:
        before = e.tokens(FEW[:1])
        e.llm.sleep(level=1)
        e.llm.wake_up()
        return before, e.tokens(FEW[:1])

    return OwnEngines(ask, trained, {"enable_sleep_mode": True})


def multimodal(trained: Path, folder: Path) -> OwnEngines:
    """Prompts with different sounds, for a model with an EAGLE head."""
    model = make_listener(folder / "listener", make_random(folder / "text"))
    head = {"method": "eagle", "model": str(make_eagle_head(folder / "head", "eagle"))}

    def ask(e: Engine) -> Any:
        pitches = (200, 700, 2500, 6000)
        prompts = [
            {"prompt_token_ids": [*p, AUDIO_TOKEN, *p[-3:]], "multi_modal_data": {"audio": sound(pitch)}}
            for p in FEW[:2]
            for pitch in pitches
        ]
        texts = [list(r.outputs[0].token_ids) for r in e.llm.generate(prompts, PARAMS, use_tqdm=False)]
        # The text depends on the sound.
        assert len({str(text) for text in texts}) > len(prompts) // len(pitches)
        return texts

    return OwnEngines(
        ask,
        model,
        {"max_model_len": 1024},
        ours={**head, "num_speculative_tokens": 5, "num_model_steps": 2, "mtp_strategy": "with_ngram"},
        stock={**head, "num_speculative_tokens": 2},
    )


FEATURES = {
    "LoRA": lora,
    "custom logits processors": logits_processors,
    "multimodal input": multimodal,
    "sleep and wake": sleep_mode,
}
