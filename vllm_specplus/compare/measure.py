"""Runs all configurations in turns, each engine in a process of its own."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from vllm_specplus.compare.configurations import Configuration
from vllm_specplus.compare.measurements import Difference, Measurements, is_near_tie
from vllm_specplus.compare.processes import EngineFailedError, EngineProcess, RefusedError, call_by_name
from vllm_specplus.compare.prompts import Prompt
from vllm_specplus.compare.runs import Best, EngineOptions, Run
from vllm_specplus.compare.terminal import Advance, NothingMeasuredInterrupt

_T = TypeVar("_T")
_SERVE = "vllm_specplus.compare.engine:serve"
# Front end and engine in one process: they would disturb each other on few cores.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Plan:
    """What is measured.

    repeats: runs of each configuration at each level of concurrency.
    engine_args: options of ``vllm serve``, as words of a command line.
    one_at_a_time: whether an engine ends before the next one starts; otherwise all of them stay.
    """

    model: str
    configurations: list[Configuration]
    prompts: list[Prompt]
    concurrency: list[int]
    max_tokens: int
    temperature: float
    repeats: int
    engine_args: tuple[str, ...] = ()
    one_at_a_time: bool = False

    def order(self, concurrency: int) -> list[int]:
        """The prompts of a run, by number."""
        return in_places(range(len(self.prompts) - len(self.before(concurrency))), concurrency)

    def before(self, concurrency: int) -> list[int]:
        """The last prompts, which fill places before a run's first, where `num_needed` says that there are enough."""
        is_enough = len(self.prompts) >= self.num_needed(concurrency)
        return list(range(len(self.prompts))[1 - concurrency :]) if concurrency > 1 and is_enough else []

    @staticmethod
    def num_needed(concurrency: int) -> int:
        """How many prompts a run has to have so that none comes more than once while it is timed."""
        return 3 * concurrency - 1 if concurrency > 1 else 1

    def turns(self) -> Iterator[tuple[int, int, Configuration]]:
        """Repeat, concurrency and configuration of each run; every second repeat goes backwards."""
        for repeat in range(self.repeats):
            configurations = self.configurations[:: -1 if repeat % 2 else 1]
            if self.one_at_a_time:
                yield from ((repeat, level, c) for c in configurations for level in self.concurrency)
            else:
                yield from ((repeat, level, c) for level in self.concurrency for c in configurations)

    @property
    def num_units(self) -> int:
        """How often `measure` tells what is done next."""
        starts = 0 if self.one_at_a_time else 1
        return (self.repeats * len(self.concurrency) + starts + 1) * len(self.configurations)


def in_places(prompts: Sequence[_T], concurrency: int) -> list[_T]:
    """The prompts of a run: each one, and from the first on again until there are two for each of several places.

    With one for each place, all prompts of a run would be read at once, as on no busy server.
    """
    least = 2 * concurrency if concurrency > 1 else 1
    return [prompts[i % len(prompts)] for i in range(max(len(prompts), least))]


def started_engine(options: EngineOptions, prompts: list[Prompt], max_tokens: int, log: Path) -> EngineProcess:
    """An engine in a process of its own, which says "ready" and then answers calls of `compare.engine.Session`."""
    return EngineProcess(call_by_name, _ENVIRONMENT, _SERVE, options, prompts, max_tokens, log=log)


class _Engines:
    """The engines that run, by configuration.

    Args:
        plan: what is measured.
        logs: folder of their logs.
        measurements: get the names of those that sample wrongly.
    """

    def __init__(self, plan: Plan, logs: Path, measurements: Measurements):
        self._plan, self._logs, self._measurements = plan, logs, measurements
        self._running: dict[str, EngineProcess] = {}

    def get(self, configuration: Configuration) -> EngineProcess:
        """The engine of a configuration, which is started and warmed up if it does not run."""
        name = configuration.name
        if name not in self._running:
            if self._plan.one_at_a_time:
                self.end()
            engine = self._running[name] = self._start(configuration)
            engine.receive()
            if self._plan.temperature > 0 and engine.call("samples_wrongly"):
                self._measurements.sample_wrongly.add(name)
            for level in self._plan.concurrency:
                engine.call("warm_up", level)
        return self._running[name]

    def _start(self, configuration: Configuration) -> EngineProcess:
        plan = self._plan
        number = plan.configurations.index(configuration)
        share = 1 if plan.one_at_a_time else len(plan.configurations)
        options = EngineOptions(plan.model, configuration.config, plan.engine_args, share)
        return started_engine(options, plan.prompts, plan.max_tokens, self._logs / f"engine-{number}.log")

    def end(self, name: str | None = None) -> None:
        """End one engine, or all."""
        for running in [name] if name else [*self._running]:
            if running in self._running:
                self._running.pop(running).end()


def measure(plan: Plan, measurements: Measurements, logs: Path, advance: Advance) -> None:
    """Fill `measurements`, as far as Ctrl-C lets it.

    Raises:
        RefusedError: an engine refuses its options or a prompt before the first run. Behind a run, or another
            configuration's failure, it is a failure of that configuration.
        NothingMeasuredInterrupt: Ctrl-C came before the first run's end.
    """
    engines = _Engines(plan, logs, measurements)
    checker = _Checker(plan, measurements, engines)
    try:
        for configuration in plan.configurations if not plan.one_at_a_time else ():
            advance(f"{configuration.name}: starts")
            with _noting_failures(configuration, measurements, engines):
                engines.get(configuration)
        for repeat, level, configuration in plan.turns():
            name = configuration.name
            if name in measurements.failures:
                advance(f"{name} has failed: left out")
                continue
            advance(f"{name}, concurrency {level}, repeat {repeat + 1} of {plan.repeats}")
            with _noting_failures(configuration, measurements, engines):
                engine = engines.get(configuration)
                run = engine.call("run", plan.order(level), level, plan.temperature, plan.before(level))
                measurements.add(name, level, repeat, run)
                checker.check(configuration, level, run)
        for configuration in plan.configurations:
            advance(f"{configuration.name}: who drafted what")
            if configuration.name not in measurements.failures:
                with _noting_failures(configuration, measurements, engines):
                    profile = engines.get(configuration).call("profile", plan.temperature)
                    measurements.profiles[configuration.name] = profile
        checker.judge()
    except KeyboardInterrupt:
        if not measurements.runs:
            raise NothingMeasuredInterrupt from None
        measurements.is_interrupted = True
        checker.judge(asks=False)
    finally:
        with _without_interrupts():
            engines.end()


@contextmanager
def _noting_failures(configuration: Configuration, measurements: Measurements, engines: _Engines) -> Iterator[None]:
    try:
        yield
    except (EngineFailedError, RefusedError) as problem:
        if isinstance(problem, RefusedError) and not (measurements.runs or measurements.failures):
            raise
        measurements.failures[configuration.name] = str(problem)
        # The tables say so too, but that may be hours later. A progress bar lets a line pass above it.
        print(f"FAILED: {configuration.name}: {problem}", file=sys.stderr)
        engines.end(configuration.name)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A second Ctrl-C must not leave engines behind."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Departure(NamedTuple):
    """Where an answer leaves the expected one.

    number: of the prompt. prefix: the tokens that both have. expected, found: the next ones; None at an answer's end.
    """

    number: int
    prefix: tuple[int, ...]
    expected: int | None
    found: int | None


class _Checker:
    """Finds greedy answers that differ from those of the first configuration that keeps the greedy text."""

    def __init__(self, plan: Plan, measurements: Measurements, engines: _Engines):
        self._plan, self._measurements, self._engines = plan, measurements, engines
        self._expected: dict[int, tuple[Configuration, Run]] = {}
        # By configuration's name and concurrency; each once, in the order in which they came.
        self._departures: dict[tuple[str, int], dict[_Departure, None]] = {}
        # By the engine's configuration, the prompt's number and the tokens behind it: many differ at one place.
        self._best: dict[tuple[str, int, tuple[int, ...]], list[Best]] = {}

    def check(self, configuration: Configuration, level: int, run: Run) -> None:
        """Compare a run's answers with those expected at this concurrency; note where they leave them."""
        if self._plan.temperature > 0 or not configuration.keeps_greedy_text:
            return
        _, expected = self._expected.setdefault(level, (configuration, run))
        for number, mine, theirs in zip(self._plan.order(level), run.token_ids, expected.token_ids, strict=True):
            if mine != theirs:
                noted = self._departures.setdefault((configuration.name, level), {})
                noted[_departure(number, mine, theirs)] = None

    def judge(self, *, asks: bool = True) -> None:
        """Enter one difference of each configuration and concurrency: the first defect, or else the first near-tie.

        If it `asks`, the engines that gave the expected texts tell the two best logits there.
        """
        while self._departures:
            (name, level), departures = next(iter(self._departures.items()))
            differences: list[Difference] = []
            for departure in departures:
                differences.append(self._difference(name, level, departure, asks))
                if not differences[-1].is_near_tie:
                    break
            self._measurements.differences.append(min(differences, key=lambda each: each.is_near_tie))
            del self._departures[name, level]

    def _difference(self, name: str, level: int, departure: _Departure, asks: bool) -> Difference:
        reference = self._expected[level][0]
        tokens = departure.expected, departure.found
        best: list[Best] = []
        expected, found = ("" if token is None else f"token {token}" for token in tokens)
        dtype = "float32"
        if asks:
            with _noting_failures(reference, self._measurements, self._engines):
                engine = self._engines.get(reference)
                place = reference.name, departure.number, departure.prefix
                if place not in self._best:
                    self._best[place] = engine.call("best_two", departure.number, list(departure.prefix))
                best = self._best[place]
                expected, found = ("" if token is None else engine.call("text", [token]) for token in tokens)
                dtype = engine.call("dtype")
        prompt = self._plan.prompts[departure.number].name
        near = is_near_tie(best, tokens, dtype)
        return Difference(name, level, prompt, len(departure.prefix), expected, found, best, near)


def num_same(one: Sequence[object], other: Sequence[object]) -> int:
    """How many tokens or characters of two texts are the same before the first that differs, or the end of one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _departure(number: int, mine: list[int], theirs: list[int]) -> _Departure:
    """Where two answers to a prompt differ first."""
    place = num_same(mine, theirs)
    expected, found = (row[place] if place < len(row) else None for row in (theirs, mine))
    return _Departure(number, tuple(theirs[:place]), expected, found)
