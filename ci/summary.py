"""Print what failed in several runs of pytest, where the time went, and one summary: python ci/summary.py FOLDER."""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

SHOWN_LINES = 12
SHOWN_FILES = 12
# pytest's words for a suite's counts, in its file and in its summary.
OUTCOMES = {"failures": "failed", "errors": "errors", "skipped": "skipped"}


def main(folder: Path) -> None:
    suites = [(report.stem, suite) for report in sorted(folder.glob("*.xml")) for suite in parse(report)]
    seconds: Counter[str] = Counter()
    for run, suite in suites:
        for case in suite.iter("testcase"):
            seconds[f"{run}: {case.get('classname')}"] += float(case.get("time", 0))
            for problem in [*case.iter("failure"), *case.iter("error")]:
                print(f"===== {problem.tag} in {run}: {case.get('classname')}::{case.get('name')}")
                print("\n".join(reason(problem)))
    tests, *bad = (sum(int(suite.get(key, 0)) for _, suite in suites) for key in ("tests", *OUTCOMES))
    parts = [
        f"{tests - sum(bad)} passed",
        *(f"{n} {outcome}" for n, outcome in zip(bad, OUTCOMES.values(), strict=True)),
    ]
    for name, taken in seconds.most_common(SHOWN_FILES):
        print(f"{taken:6.0f} s  {name}")
    times = {run: float(suite.get("time", 0)) for run, suite in suites}
    print("; ".join(f"{run} {taken:.0f} s" for run, taken in times.items()))
    print(f"===== {', '.join(parts)} in {sum(times.values()):.0f}s =====")
    sys.exit(tests == sum(bad))


def parse(report: Path) -> list[ElementTree.Element]:
    return list(ElementTree.parse(report).iter("testsuite"))


def reason(problem: ElementTree.Element) -> list[str]:
    """The lines that pytest marks as the error, or the message where none is marked."""
    marked = [line for line in (problem.text or "").splitlines() if line.startswith(("E  ", ">  "))]
    return (marked or problem.get("message", "").splitlines())[-SHOWN_LINES:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
