"""The Grafana dashboard: its form, and whether every metric that it asks for exists."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import vllm

from vllm_specplus.requests.endpoints import metric_families

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "examples" / "grafana" / "specplus.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
VARIABLES: list[dict[str, Any]] = DASHBOARD["templating"]["list"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
METRIC = re.compile(r"(?:specplus|vllm):\w+")
_SUFFIXES = {"_counter_cls": ("_total",), "_gauge_cls": ("",), "_histogram_cls": ("_bucket", "_count", "_sum")}
_WIDTH = 24  # of Grafana's grid


def metrics_of_vllm() -> set[str]:
    """The names of the samples that its metrics have, read from its source files."""
    folder = Path(vllm.__file__).parent / "v1"
    found = set()
    for path in (folder / "metrics" / "loggers.py", folder / "spec_decode" / "metrics.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SUFFIXES:
                names = [k.value for k in node.keywords if k.arg == "name" and isinstance(k.value, ast.Constant)]
                found |= {f"{name.value}{suffix}" for name in names for suffix in _SUFFIXES[node.func.attr]}
            # Three counters are made in a loop over their names.
            elif isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[0], ast.Constant):
                found.add(f"{node.elts[0].value}_total")
    return {name.replace("_total_total", "_total") for name in found}


def metrics_of_the_plugin() -> set[str]:
    stats = {"drafted": {"a": [1]}, "accepted": {"a": [1]}, "entries": {"a": 1}, "faults": {"a": 1}}
    return {sample.name for family in metric_families(stats) for sample in family.samples}


def test_every_metric_exists() -> None:
    known = metrics_of_vllm() | metrics_of_the_plugin()
    asked = {name for text in [*QUERIES, VARIABLES[1]["query"]["query"]] for name in METRIC.findall(text)}
    assert asked <= known
    assert metrics_of_the_plugin() <= asked


def test_every_query_is_of_the_chosen_servers() -> None:
    for query in QUERIES:
        assert len(METRIC.findall(query)) == query.count('{instance=~"$instance"')


def test_variables_that_are_used_exist() -> None:
    names = {variable["name"] for variable in VARIABLES}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used == names | {"__rate_interval"}


def test_the_form_that_grafana_imports() -> None:
    assert DASHBOARD["id"] is None
    assert DASHBOARD["uid"]
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 36
    assert [variable["type"] for variable in VARIABLES] == ["datasource", "query"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert {panel["type"] for panel in PANELS} == {"stat", "timeseries"}
    for panel in PANELS:
        assert panel["title"]
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_panels_fill_the_grid() -> None:
    """None overlaps another, and no place is empty."""
    places = [panel["gridPos"] for panel in PANELS]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(set(cells)) == len(cells) == _WIDTH * max(p["y"] + p["h"] for p in places)
    assert all(x < _WIDTH for x, _ in cells)
