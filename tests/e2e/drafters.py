"""Every kind of drafter in a hybrid: its greedy text is compared with that without speculation.

docs/features.md has a row for each. The tests hold its cells to what is found here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.e2e.engines import PROMPTS, engine
from tests.e2e.families import NUM_LAYERS, make_family, make_medusa, make_two_layers
from tests.e2e.faults import let_drafts_pay
from tests.e2e.references import check_sums, stats
from tests.e2e.tables import check_cell
from vllm_specplus.config import SpecPlusConfigError
from vllm_specplus.proposers.arbiter import Prices
from vllm_specplus.runners.v1.history import HostHistory
from vllm_specplus.testing.tiny_model import make_random

WORKS, AS_STOCK, REFUSED, REFUSED_BY_VLLM = "works", "as vLLM's `mtp`", "refused on a CPU", "refused by vLLM"
STOCK_SLOTS = {"num_speculative_tokens": 2}
APPEND: dict[str, Any] = {
    "num_speculative_tokens": 4,
    "num_model_steps": 2,
    "mtp_strategy": "with_ngram",
    "min_ngram_size": 1,
    "adaptive": False,
}
ADAPTIVE: dict[str, Any] = APPEND | {"adaptive": True, "verify_strategy": "target_match"}
# Hardly any text has as long a match.
NO_NGRAMS = {"min_ngram_size": 20, "max_ngram_size": 20}
FEW = PROMPTS[:4]
STRATEGIES = ("topp", "greedy", "rejection")


@dataclass(frozen=True)
class Drafter:
    """A row of the table.

    make: writes the target into a folder, and its draft checkpoint, if it has one of its own, into `draft` in there.
    config: the keys that name the drafter. on_v2: more keys of its hybrids on Model Runner V2; fixed_on_v2: of the one
        that is not adaptive.
    second_layer: the name of a layer of its head, of which V2 has to run this one too.
    engine: the engine's arguments.
    differs_in_vllm: whether vLLM's own text depends on the drafts that it accepts.
    """

    make: Callable[[Path], Path]
    config: Mapping[str, Any]
    on_v2: Mapping[str, Any] = field(default_factory=dict)
    fixed_on_v2: Mapping[str, Any] = field(default_factory=dict)
    second_layer: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    differs_in_vllm: bool = False


LINEAR = "Qwen3-Next MTP"
# On a CPU; mended in vLLM 0.33.
HAS_DEFECT_OF_LINEAR_ATTENTION = version("vllm").startswith("0.32.")


def _with_medusa(folder: Path) -> Path:
    make_medusa(folder / "draft", make_random(folder))
    return folder


def _family(name: str) -> Callable[[Path], Path]:
    return partial(make_family, name=name)


MTP = {"method": "mtp"}
DRAFTERS: dict[str, Drafter] = {
    "ERNIE-4.5 MTP": Drafter(_family("ernie"), MTP),
    "GLM-4.5 MTP": Drafter(_family("glm"), MTP),
    "GLM-4.5 MTP of two layers": Drafter(
        partial(make_two_layers, name="glm"),
        MTP,
        on_v2={"num_speculative_tokens": 2},
        fixed_on_v2={"match_override_len": 2},
        second_layer=f"model.layers.{NUM_LAYERS + 1}",
    ),
    "MiMo MTP of two layers": Drafter(partial(make_two_layers, name="mimo"), MTP, on_v2={"num_model_steps": 1}),
    "DeepSeek-V3 MTP": Drafter(_family("deepseek"), MTP, differs_in_vllm=True),
    LINEAR: Drafter(_family("qwen3_next"), MTP, engine={"dtype": "bfloat16"}),
    "Medusa": Drafter(_with_medusa, {"method": "medusa", "model": "draft"}),
}


def verdict(name: str, folder: Path, *, on_v2: bool) -> str:
    """The cell of a drafter: what becomes of hybrids with it on this model runner."""
    drafter = DRAFTERS[name]
    target = drafter.make(folder)
    config = dict(drafter.config)
    if "model" in config:
        config["model"] = str(folder / "draft")
    more, fixed = (drafter.on_v2, drafter.fixed_on_v2) if on_v2 else ({}, {})
    ask = partial(texts, target, drafter)
    # They take turns, from row to row and from one model runner to the other.
    strategy = STRATEGIES[(list(DRAFTERS).index(name) + on_v2) % len(STRATEGIES)]
    try:
        appended, counts = ask(config | APPEND | more | fixed | {"verify_strategy": strategy})
    except SpecPlusConfigError as error:
        if "a model with linear attention is not allowed on a CPU" not in str(error):
            raise
        verified, _ = ask(config | STOCK_SLOTS | {"verify_strategy": "target_match"})
        plain, _ = ask(None)
        return REFUSED if verified == plain else f"fails: {verified}, without speculation {plain}"
    except ValidationError as error:
        return REFUSED_BY_VLLM if words(error) == refusal(ask, config | STOCK_SLOTS) else f"fails: {error}"
    check_drafts(counts)
    if drafter.differs_in_vllm:
        return as_stock(ask, config)
    with pytest.MonkeyPatch.context() as patch:
        let_drafts_pay(patch)
        chosen, counts = ask(config | ADAPTIVE | more)
    check_drafts(counts)
    plain, _ = ask(None)
    assert all(len(set(text)) > 1 for text in plain)
    return WORKS if appended == chosen == plain else f"fails: {appended}, {chosen}, without speculation {plain}"


def check_row(name: str, folder: Path, *, on_v2: bool) -> None:
    """Hold the cell of a drafter to what becomes of it."""
    found = verdict(name, folder, on_v2=on_v2)
    if name == LINEAR and not HAS_DEFECT_OF_LINEAR_ATTENTION:
        assert found == WORKS
    else:
        check_cell("drafter", name, "V2" if on_v2 else "V1", found)


def check_drafts(counts: dict[str, Any]) -> None:
    """Drafts of the model and of the history were verified, and some were accepted: else a text would show little."""
    for source in ("model", "ngram"):
        assert sum(counts["drafted"][source]) > 0
    assert sum(map(sum, counts["accepted"].values())) > 0


def check_each_strategy(name: str, folder: Path, *, on_v2: bool) -> None:
    """Hybrids of a drafter under each strategy, adaptive or not: all say what the target says."""
    drafter = DRAFTERS[name]
    ask = partial(texts, drafter.make(folder), drafter)
    plain, _ = ask(None)
    with pytest.MonkeyPatch.context() as patch:
        let_drafts_pay(patch)
        for strategy in (*STRATEGIES, "target_match"):
            for adaptive in (False, True):
                more = {**drafter.on_v2, **({} if adaptive else drafter.fixed_on_v2)} if on_v2 else {}
                hybrid = drafter.config | APPEND | more | {"verify_strategy": strategy, "adaptive": adaptive}
                found, counts = ask(hybrid)
                assert found == plain, (strategy, adaptive)
                check_drafts(counts)


# Hybrids of drafters with checkpoints of their own: `method`, `verify_strategy`, `adaptive`.
OTHER_HYBRIDS = [
    *((method, strategy, False) for method in ("eagle", "draft_model") for strategy in STRATEGIES),
    *(("eagle3", strategy, True) for strategy in (*STRATEGIES, "target_match")),
]


def check_hybrid(
    method: str, strategy: str, adaptive: bool, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The greedy text is that without speculation, and drafts were accepted.

    Args:
        method, strategy, adaptive: of `OTHER_HYBRIDS`.
        target: the model that the drafter is made for.
        draft: the draft model, with the heads in it.
        monkeypatch: of the test.
    """
    let_drafts_pay(monkeypatch)
    with engine(target) as e:
        plain = e.tokens(FEW, max_tokens=24)
    assert all(len(set(text)) > 1 for text in plain)
    drafter = draft if method == "draft_model" else draft / method
    config = APPEND | {"method": method, "model": str(drafter), "verify_strategy": strategy, "adaptive": adaptive}
    with engine(target, config) as e:
        assert e.tokens(FEW, max_tokens=24) == plain
        assert check_sums(e)["model"] > 0
        check_drafts(stats(e))


@contextmanager
def drafting_past_the_end() -> Iterator[pytest.MonkeyPatch]:
    """Let the plugin draft past `max_tokens` on V1 too, as vLLM's own drafters do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostHistory, "_end", lambda self, *_: self._runner.max_model_len)
        yield patch


def check_model_drafts(method: str, target: Path, draft: Path) -> None:
    """A hybrid that matches no n-grams drafts as vLLM's own drafter does, so the same drafts are accepted.

    Args:
        method: "eagle", "eagle3" or "draft_model".
        target, draft: as in `check_hybrid`.
    """
    config = {"method": method, "model": str(draft if method == "draft_model" else draft / method)} | STOCK_SLOTS
    with engine(target, config) as e:
        text, counts = e.tokens(FEW, max_tokens=24), e.counts()
    assert all(counts.by_position)
    hybrid = APPEND | NO_NGRAMS | {"verify_strategy": "target_match"} | config
    with drafting_past_the_end(), engine(target, hybrid) as e:
        assert (e.tokens(FEW, max_tokens=24), e.counts()) == (text, counts)
        assert stats(e)["drafted"]["model"][-1] > 0


Ask = Callable[..., tuple[list[list[int]], dict[str, Any]]]


def as_stock(ask: Ask, config: dict[str, Any]) -> str:
    """The cell of a drafter whose texts vLLM itself changes once a draft is accepted.

    A hybrid with the slots of vLLM's own, all of which the model fills, makes the same steps. So does an adaptive one
    in its first steps, if drafts cost nothing: later it leaves out drafts of which hardly any is accepted.
    """
    stock, _ = ask(config | STOCK_SLOTS)
    plain, _ = ask(None)
    assert stock != plain
    with drafting_past_the_end() as patch:
        filled, _ = ask(config | APPEND | STOCK_SLOTS | {"verify_strategy": "target_match"})
        let_drafts_pay(patch, Prices(0.0, 1.0, 0.0, 0.0))
        chosen, counts = ask(config | ADAPTIVE | STOCK_SLOTS | NO_NGRAMS, max_tokens=8)
    first, second = counts["drafted"]["model"]
    assert first == second > 0
    is_stock = filled == stock and chosen == [text[:8] for text in stock]
    return AS_STOCK if is_stock else f"fails: {filled}, {chosen}, vLLM {stock}"


def refusal(ask: Ask, config: dict[str, Any]) -> list[str]:
    """The words in which vLLM refuses a config without plugin keys."""
    with pytest.raises(ValidationError) as error:
        ask(config)
    return words(error.value)


def words(error: ValidationError) -> list[str]:
    return [problem["msg"] for problem in error.errors()]


def texts(
    target: Path, drafter: Drafter, config: dict[str, Any] | None, max_tokens: int = 24
) -> tuple[list[list[int]], dict[str, Any]]:
    """The texts of `FEW` and the worker's counts, which are empty without plugin keys that draft."""
    is_hybrid = config is not None and "mtp_strategy" in config
    calls: list[Any] = []
    with engine(target, config, **drafter.engine) as e:
        speculator = getattr(e.runner, "speculator", None)
        looks_at_layer = is_hybrid and speculator is not None and drafter.second_layer is not None
        if looks_at_layer:
            speculator.model.get_submodule(drafter.second_layer).register_forward_hook(lambda *args: calls.append(args))
        found = e.tokens(FEW, max_tokens=max_tokens)
        assert calls or not looks_at_layer
        return found, stats(e) if is_hybrid else {}
