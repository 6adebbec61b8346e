"""Where the time of an engine's steps goes: the target, the draft model, matching, verification, and the rest."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SplitTimer:
    """Times the parts of steps, and waits for the device after each, so that its work counts where it was started."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._is_alone = False

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of what runs within to a part."""
        began = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[part] += time.perf_counter() - began

    @contextmanager
    def timers_installed(self, engine: Any) -> Iterator[None]:
        """Time the parts of an engine whose only worker runs in this process; of others no time is known.

        Where vLLM has other names, parts count as rest.
        """
        undo: list[Callable[[], None]] = []
        # Workers in other processes would each wrap a runner for a copy of this timer.
        self._is_alone = engine.vllm_config.parallel_config.world_size == 1
        if self._is_alone:
            engine.collective_rpc(lambda worker: self._install(worker.model_runner, undo))
        try:
            yield
        finally:
            for step in reversed(undo):
                step()

    def seconds(self) -> dict[str, float]:
        """The seconds of each of the `runs.PARTS`; {} where they are not known."""
        if not self._is_alone:
            return {}
        found = self._seconds
        drafting, model = found["drafting"], found["draft model"]
        known = {"target": found["target"], "draft model": model, "matching": max(drafting - model, 0.0)}
        known["verification"] = found["verification"]
        return known | {"rest": max(found["step"] - sum(known.values()), 0.0)}

    def _install(self, runner: Any, undo: list[Callable[[], None]]) -> None:
        proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        self._wrap(runner, "execute_model", "target", undo)
        for name in ("_sample", "sample"):  # V1's and V2's
            self._wrap(runner, name, "verification", undo)
        if proposer is not None:
            if hasattr(proposer, "model"):
                owner = next(
                    (c for c in type(proposer).__mro__ if c.__module__.startswith("vllm.") and "propose" in vars(c)),
                    None,
                )
                self._wrap(owner, "propose", "draft model", undo)
            self._wrap(proposer, "propose", "drafting", undo)

    def _wrap(self, owner: Any, name: str, part: str, undo: list[Callable[[], None]]) -> None:
        function = getattr(owner, name, None)
        if function is None:
            return
        was_own = name in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.timed(part):
                return function(*args, **kwargs)

        setattr(owner, name, timed)
        undo.append(lambda: setattr(owner, name, function) if was_own else delattr(owner, name))
