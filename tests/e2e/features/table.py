"""vLLM's features beside a hybrid: what each brings is compared with an engine without speculation.

docs/features.md has a row for each. The tests hold its cells to what is found here.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tests.e2e.engines import ADAPTIVE, engine
from tests.e2e.features import one_engine, own_engines, server
from tests.e2e.features.outcomes import STOCK, Start, verdict

FEATURES = [*one_engine.FEATURES, *server.FEATURES, *own_engines.FEATURES]


@dataclass
class Group:
    """Features that are asked of the same engines.

    Attributes:
        names: of the features.
        ask: returns outcomes by feature, for a speculative config and some of the names.
        ours, stock: the speculative configs.
    """

    names: Collection[str]
    ask: Callable[[dict[str, Any] | None, Collection[str]], dict[str, Any]]
    ours: dict[str, Any] = field(default_factory=lambda: ADAPTIVE)
    stock: dict[str, Any] = field(default_factory=lambda: STOCK)

    @cached_property
    def verdicts(self) -> dict[str, str]:
        """The cell of each feature."""
        plain, ours = (self.ask(config, self.names) for config in (None, self.ours))
        # vLLM's own drafter is asked only for the rest: on a CPU some of what the hybrid does ends its engine.
        rest = [name for name in self.names if ours[name] != plain[name]]
        stock = self.ask(self.stock, rest) if rest else {}
        return {name: verdict(plain[name], stock.get(name), ours[name]) for name in self.names}


def groups(
    trained: Path, folder: Path, start: Start = engine, ask_server: Callable[..., dict[str, Any]] = server.ask
) -> dict[str, Group]:
    """The group of each feature.

    Args:
        trained: the trained tiny model.
        folder: takes further models.
        start: starts the engines that run in this process.
        ask_server: as `server.ask`.
    """
    of_one = Group(one_engine.FEATURES, partial(one_engine.ask, trained, start))
    of_server = Group(server.FEATURES, partial(ask_server, trained))
    found = dict.fromkeys(one_engine.FEATURES, of_one) | dict.fromkeys(server.FEATURES, of_server)
    for name, prepare in own_engines.FEATURES.items():
        own = prepare(trained, folder)
        found[name] = Group(
            [name], lambda config, _, name=name, own=own: {name: own.outcome(start, config)}, own.ours, own.stock
        )
    return found
