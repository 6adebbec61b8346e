"""All runs of the engines, and what they say: speeds, accepted drafts, differing texts, and which one to use."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_specplus.compare.configurations import Configuration
from vllm_specplus.compare.counts import Counts, total
from vllm_specplus.compare.runs import Best, Profile, Run
from vllm_specplus.compare.speeds import Speeds

# Gaps of logits, as shares of the larger one, that rounding explains.
_ROUNDING = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-7}

_SAMPLES_WRONGLY = (
    'is left out, as vLLM\'s own verification of sampled requests is wrong on a CPU: add "verify_strategy": "rejection"'
)


@dataclass(frozen=True)
class Difference:
    """A place where a greedy answer leaves the baseline's.

    prompt: the prompt's name. position: the place in the answer, in tokens.
    expected, found: the tokens there, as text; "" for an answer that has ended.
    best: the baseline's two best tokens there; empty where they are not known.
    is_near_tie: whether rounding may decide between the two tokens.
    """

    configuration: str
    concurrency: int
    prompt: str
    position: int
    expected: str
    found: str
    best: list[Best]
    is_near_tie: bool


@dataclass
class Measurements:
    """What has been measured so far.

    runs: by configuration's name and concurrency, the run of each repeat by its number.
    failures: by configuration's name, the line that tells why it has no more runs.
    sample_wrongly: the names of those whose sampled answers are wrong.
    """

    configurations: list[Configuration]
    concurrency: list[int]
    runs: dict[tuple[str, int], dict[int, Run]] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    sample_wrongly: set[str] = field(default_factory=set)
    differences: list[Difference] = field(default_factory=list)
    is_interrupted: bool = False

    @property
    def baseline(self) -> str:
        """The name of the first configuration."""
        return self.configurations[0].name

    def add(self, name: str, concurrency: int, repeat: int, run: Run) -> None:
        """Add one repeat of a configuration at a concurrency."""
        self.runs.setdefault((name, concurrency), {})[repeat] = run

    @property
    def speeds(self) -> Speeds:
        """Tokens per second of all runs."""
        return Speeds(
            {
                setting: {repeat: run.tokens_per_second for repeat, run in runs.items()}
                for setting, runs in self.runs.items()
            }
        )

    def counts(self, name: str, concurrency: int) -> Counts:
        """Drafts of all repeats."""
        return total(run.counts for run in self.runs.get((name, concurrency), {}).values())

    def mean_accepted_length(self, name: str, concurrency: int) -> float | None:
        """Tokens of a step of a request, without the step of its prompt; None if there was no other."""
        runs = self.runs.get((name, concurrency), {}).values()
        steps = sum(run.num_steps for run in runs)
        return sum(run.num_step_tokens for run in runs) / steps if steps else None

    def defective(self) -> set[str]:
        """The configurations with a wrong text that rounding does not explain."""
        return {difference.configuration for difference in self.differences if not difference.is_near_tie}


def is_near_tie(best: Sequence[Best], token_ids: tuple[int | None, int | None], dtype: str) -> bool:
    """Whether two tokens are the two best, with logits that rounding may swap."""
    if len(best) < 2 or {row.token_id for row in best} != set(token_ids):
        return False
    first, second = (row.logit for row in best)
    return first - second <= _ROUNDING.get(dtype, _ROUNDING["float32"]) * max(abs(first), abs(second), 1.0)


def recommendation(measurements: Measurements, *, samples: bool) -> str:
    """One sentence: which configuration to use, and how sure that is.

    One whose text at temperature 0 is not the target's is for debugging, and never recommended. Nor is one whose
    sampled answers are wrong.

    Args:
        samples: whether the answers were sampled. Then a lossy configuration is said to be that.
    """
    named, said = _best(measurements)
    losses = {c.name: c.loss for c in measurements.configurations if c.loss and c.name in named and samples}
    notes = [f"{name} is lossy: {loss}" for name, loss in losses.items()]
    wrong = [c.name for c in measurements.configurations if c.name in measurements.sample_wrongly]
    notes += [f"{name} {_SAMPLES_WRONGLY}" for name in wrong]
    return "; ".join([said, *notes]) + "."


def _best(measurements: Measurements) -> tuple[list[str], str]:
    """The names of the configurations to use somewhere, and the sentence without its full stop."""
    unfit = measurements.defective() | measurements.sample_wrongly | {*measurements.failures}
    fit = [c.name for c in measurements.configurations if c.name not in unfit and c.keeps_greedy_text]
    speeds = measurements.speeds
    advice = speeds.advice(fit, measurements.concurrency, measurements.baseline)
    if advice is not None:
        return advice
    levels, complete = speeds.complete(fit, measurements.concurrency)
    if not complete:
        return [], "No configuration can be recommended: none that is fit ran to its end"
    if not speeds.ratio(complete[0], complete[0], levels):
        return [], "No repeat is complete"
    others = {c.name for c in measurements.configurations} - {complete[0]}
    lack = "ran to its end" if others <= {*measurements.failures} else "is fit"
    return complete[:1], f"Use {complete[0]}: no other configuration {lack}"
