"""Print what failed in several runs of pytest, and one summary of them: python ci/summary.py FOLDER."""

import sys
from pathlib import Path
from xml.etree import ElementTree

SHOWN_LINES = 12
# pytest's words for a suite's counts, in its file and in its summary.
OUTCOMES = {"failures": "failed", "errors": "errors", "skipped": "skipped"}


def main(folder: Path) -> None:
    suites = [(report.stem, suite) for report in sorted(folder.glob("*.xml")) for suite in parse(report)]
    for run, suite in suites:
        for case in suite.iter("testcase"):
            for problem in [*case.iter("failure"), *case.iter("error")]:
                print(f"===== {problem.tag} in {run}: {case.get('classname')}::{case.get('name')}")
                print("\n".join(reason(problem)))
    tests, *bad = (sum(int(suite.get(key, 0)) for _, suite in suites) for key in ("tests", *OUTCOMES))
    parts = [
        f"{tests - sum(bad)} passed",
        *(f"{n} {outcome}" for n, outcome in zip(bad, OUTCOMES.values(), strict=True)),
    ]
    seconds = sum(float(suite.get("time", 0)) for _, suite in suites)
    print(f"===== {', '.join(parts)} in {seconds:.0f}s =====")
    sys.exit(tests == sum(bad))


def parse(report: Path) -> list[ElementTree.Element]:
    return list(ElementTree.parse(report).iter("testsuite"))


def reason(problem: ElementTree.Element) -> list[str]:
    """The lines that pytest marks as the error, or the message where none is marked."""
    marked = [line for line in (problem.text or "").splitlines() if line.startswith(("E  ", ">  "))]
    return (marked or problem.get("message", "").splitlines())[-SHOWN_LINES:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
