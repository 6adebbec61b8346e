"""Engine steps that suffix drafting takes when it sees each step's tokens at once, and when one step late.

    python benchmarks/suffix_async.py [--quick] [--drafts 4,8,16] [--depth N] [--factor X] [--json FILE]

With synchronous scheduling the suffix trees know a step's tokens before it drafts. With asynchronous scheduling they
know those of the step before. Their forecast is used as far as the tokens that came since agree with it
(`kernels.drafts.continue_forecasts`, here in plain Python). No model runs: true outputs are replayed, and a draft is
accepted while it equals the output. As in an engine, each step gives one token more than it accepts, and the first one
follows the prompt.

The texts: the first bytes of files of Python's standard library, a byte a token, the first quarter of each as the
prompt. They come one after another, so that the tree that all requests share fills. Then the same again with one line
in ten gone, doubled or with another name in it ("edited").

The draft model is simulated: one draft per step, right with probability 0.7, the same ones in every mode.

A replay that gives another text than the true output ends the run without numbers.
"""

import argparse
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import environment, num_right, write_json
from rich.console import Console
from rich.table import Table

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.proposers import History, HybridDrafter, SuffixMatcher

MODES = ("none", "sync", "async")
MODEL_IS_RIGHT = 0.7
EDITED_LINES = 0.1
SEED = 0


@dataclass(frozen=True)
class Text:
    """A request: its tokens, the length of its prompt, and the draft model's token at each place."""

    name: str
    token_ids: np.ndarray  # [N] int32
    num_prompt: int
    model: np.ndarray  # [N] int32


@dataclass(frozen=True)
class Replay:
    """Steps of one pass over the texts and the host's microseconds for each of them."""

    num_tokens: int
    num_steps: int
    num_drafts: int
    num_accepted: int
    host_us: float

    @property
    def steps_per_1000(self) -> float:
        return 1000 * self.num_steps / self.num_tokens


@dataclass(frozen=True)
class Result:
    """One mode of one setting; host times over all repeats, the steps are the same in each."""

    model_steps: int
    drafts: int
    texts: str
    mode: str
    output_tokens: int
    steps_per_1000: float
    drafts_per_step: float
    accepted_per_draft: float
    host_us: float  # median
    host_us_min: float
    host_us_max: float


def edited(source: bytes, rng: np.random.Generator) -> bytes:
    """Some lines gone, doubled or with another name in the place of the first."""
    lines = []
    for line in source.splitlines(keepends=True):
        if rng.random() >= EDITED_LINES:
            lines.append(line)
            continue
        kind = int(rng.integers(3))
        if kind == 1:
            lines += [line, line]
        elif kind == 2:
            lines.append(re.sub(rb"[A-Za-z_]+", b"edited_%d" % rng.integers(1000), line, count=1))
    return b"".join(lines)


def make_text(name: str, source: bytes, size: int, rng: np.random.Generator) -> Text:
    token_ids = np.frombuffer(source[:size], np.uint8).astype(np.int32)
    wrong = rng.random(len(token_ids)) >= MODEL_IS_RIGHT
    return Text(name, token_ids, size // 4, np.where(wrong, (token_ids + 1) % 256, token_ids).astype(np.int32))


def make_texts(num_files: int, size: int) -> dict[str, list[Text]]:
    """The passes: the files, and the files edited."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py")) if path.stat().st_size >= 2 * size]
    chosen = sources[:: max(1, len(sources) // num_files)][:num_files]
    rng = np.random.default_rng(SEED)
    return {
        "files": [make_text(f"file-{i}", source, size, rng) for i, source in enumerate(chosen)],
        "edited": [make_text(f"edited-{i}", edited(source, rng), size, rng) for i, source in enumerate(chosen)],
    }


def continued(new: list[int], forecast: list[int], model: list[int], limit: int) -> list[int]:
    """The drafts of `continue_forecasts` for one request whose tokens `new` came since the forecast."""
    agreed = [*new, *model]
    if len(forecast) > len(new) and forecast[: len(agreed)] == agreed:
        return forecast[len(new) :][:limit]
    return model[:limit]


class Drafter:
    """Drafts for one request at a time, as `runners.v2.suffix` does; counts the host's time."""

    def __init__(self, mode: str, num_drafts: int, model_steps: int, depth: int, factor: float):
        self.mode = mode
        self.num_drafts = num_drafts
        self.model_steps = model_steps
        options = SpecPlusOptions(
            method="suffix",
            num_speculative_tokens=1,
            suffix_decoding_max_tree_depth=depth,
            suffix_decoding_max_spec_factor=factor,
        )
        self.matcher = SuffixMatcher(**options.suffix_matcher)
        self.seconds = 0.0
        self._known = 0

    def start(self, text: Text) -> None:
        self._known = text.num_prompt
        self.matcher.retain([])

    def draft(self, text: Text, num_tokens: int) -> list[int]:
        """Drafts for a request of which `num_tokens` tokens are there."""
        model = text.model[num_tokens : num_tokens + self.model_steps].tolist()
        if self.mode == "none":
            return model
        known = num_tokens if self.mode == "sync" else self._known
        # A copy without the tokens to come, so that no draft can be looked up in them.
        token_ids = np.full((1, len(text.token_ids)), -1, np.int32)
        token_ids[0, :known] = text.token_ids[:known]
        history = History([text.name], token_ids, np.array([known]), np.array([text.num_prompt]))
        if self.mode == "sync":
            return self._from_all(history, model)
        self._known = num_tokens
        start = time.perf_counter()
        forecast = self.matcher.match(history, None, np.array([2 * self.num_drafts + 1])).to_lists()[0]
        self.seconds += time.perf_counter() - start
        # On the device, so not the host's time.
        return continued(text.token_ids[known:num_tokens].tolist(), forecast, model, self.num_drafts)

    def _from_all(self, history: History, model: list[int]) -> list[int]:
        limits = np.array([self.num_drafts])
        start = time.perf_counter()
        if model:
            drafter = HybridDrafter(self.matcher, num_model_steps=len(model), num_speculative_tokens=self.num_drafts)
            drafts = drafter.draft(history, np.array([model], np.int32), limits).token_ids[0]
        else:
            drafts = self.matcher.match(history, None, limits).to_lists()[0]
        self.seconds += time.perf_counter() - start
        return drafts


def replay(drafter: Drafter, texts: Sequence[Text]) -> Replay:
    """Serve the texts, one after another.

    Raises:
        AssertionError: what comes out is not the text.
    """
    num_steps = num_drafts = num_accepted = 0
    before = drafter.seconds
    for text in texts:
        drafter.start(text)
        truth = text.token_ids.tolist()
        output: list[int] = []
        drafts: list[int] = []
        while text.num_prompt + len(output) < len(truth):
            at = text.num_prompt + len(output)
            right = num_right(drafts, truth[at : at + len(drafts)])
            # Past the accepted drafts there is one token more, but for the text's end.
            output += [*drafts[:right], *truth[at + right : at + right + 1]]
            num_steps += 1
            num_drafts += len(drafts)
            num_accepted += right
            drafts = drafter.draft(text, text.num_prompt + len(output)) if len(output) < len(truth) else []
            if len(drafts) > drafter.num_drafts:
                raise AssertionError(f"{drafter.mode}: {len(drafts)} drafts, allowed are {drafter.num_drafts}")
        if output != truth[text.num_prompt :]:
            raise AssertionError(f"{drafter.mode}: the replay of {text.name} is not its text")
    num_tokens = sum(len(text.token_ids) - text.num_prompt for text in texts)
    host_us = (drafter.seconds - before) / num_steps * 1e6
    return Replay(num_tokens, num_steps, num_drafts, num_accepted, host_us)


def run_setting(
    passes: dict[str, list[Text]], num_drafts: int, model_steps: int, depth: int, factor: float, repeats: int
) -> list[Result]:
    """All modes of one setting, pass by pass; each repeat begins with empty trees.

    Raises:
        AssertionError: a replay is wrong, or repeats differ in their steps.
    """
    results = []
    for mode in MODES:
        replays: dict[str, list[Replay]] = {name: [] for name in passes}
        for _ in range(repeats):
            drafter = Drafter(mode, num_drafts, model_steps, depth, factor)
            for name, texts in passes.items():
                replays[name].append(replay(drafter, texts))
        for name, rows in replays.items():
            if len({row.num_steps for row in rows}) > 1:
                raise AssertionError(f"{mode}: repeats differ, {[row.num_steps for row in rows]} steps")
            first, times = rows[0], [row.host_us for row in rows]
            results.append(
                Result(
                    model_steps=model_steps,
                    drafts=num_drafts,
                    texts=name,
                    mode=mode,
                    output_tokens=first.num_tokens,
                    steps_per_1000=first.steps_per_1000,
                    drafts_per_step=first.num_drafts / first.num_steps,
                    accepted_per_draft=first.num_accepted / max(first.num_drafts, 1),
                    host_us=statistics.median(times),
                    host_us_min=min(times),
                    host_us_max=max(times),
                )
            )
    return results


def show(console: Console, results: list[Result]) -> None:
    """Print the table."""
    table = Table(title="steps per 1,000 tokens; host microseconds per step: median (smallest-largest of the repeats)")
    names = ("model", "drafts", "texts", "no suffixes", "sync", "async", "async / sync", "sync host", "async host")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    cells: dict[tuple[int, int, str], dict[str, Result]] = {}
    for result in results:
        cells.setdefault((result.model_steps, result.drafts, result.texts), {})[result.mode] = result
    for (model_steps, num_drafts, texts), modes in cells.items():
        steps = [f"{modes[mode].steps_per_1000:.1f}" for mode in MODES]
        times = [f"{r.host_us:.1f} ({r.host_us_min:.1f}-{r.host_us_max:.1f})" for r in (modes["sync"], modes["async"])]
        ratio = modes["async"].steps_per_1000 / modes["sync"].steps_per_1000
        model = "1 draft" if model_steps else "none"
        table.add_row(model, str(num_drafts), texts, *steps, f"{ratio:.2f}", *times)
    console.print(table)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description="Steps of suffix drafting, synchronous and asynchronous.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--drafts", type=sizes, help="drafts per step; default 4,8,16")
    parser.add_argument("--depth", type=int, default=24, help="suffix_decoding_max_tree_depth; default 24")
    parser.add_argument("--factor", type=float, default=1.0, help="suffix_decoding_max_spec_factor; default 1")
    parser.add_argument("--files", type=int, help="texts of a pass; default 20")
    parser.add_argument("--size", type=int, help="bytes of a text; default 4096")
    parser.add_argument("--repeats", type=int, help="default 5")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args(argv)
    args.drafts = args.drafts or ([2, 4] if args.quick else [4, 8, 16])
    args.files = args.files or (2 if args.quick else 20)
    args.size = args.size or (1024 if args.quick else 4096)
    args.repeats = args.repeats or (2 if args.quick else 5)
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a replay is wrong."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    passes = make_texts(args.files, args.size)
    results: list[Result] = []
    try:
        for model_steps in (0, 1):
            for num_drafts in args.drafts:
                results += run_setting(passes, num_drafts, model_steps, args.depth, args.factor, args.repeats)
    except AssertionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(console, results)
    about: dict[str, Any] = environment("numpy", "arctic-inference")
    shown = f"tree depth {args.depth}, spec factor {args.factor:g}; {args.files} files"
    console.print(f"{shown}; {about['cpu']}, load {about['load_average']:.1f}")
    if args.json:
        report = {"environment": about, "depth": args.depth, "factor": args.factor}
        report |= {"files": args.files, "size": args.size, "repeats": args.repeats}
        write_json(args.json, report | {"results": [asdict(result) for result in results]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
