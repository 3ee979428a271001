"""docs/metrics.md and the dashboard name the metrics that there are, with their labels."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
from memledger.export.families import MOST_SERIES, NAMES

DOCS = Path(__file__).parent.parent / "docs"
DASHBOARD = json.loads((DOCS / "grafana" / "memledger.json").read_text())
ALERTS = [
    re.sub(r"#.*\n", "", part).strip()
    for part in re.split(r"(?=    #)", (DOCS / "metrics.md").read_text().partition("## Alerts")[2].partition("## ")[0])
    if part.strip()
]
SCRAPED = {"instance", "job"}


def test_every_metric_is_documented_with_its_labels_and_no_other():
    text = (DOCS / "metrics.md").read_text()
    told = dict(re.findall(r"^\| `(memledger_\w+)` \| (.*?) \|", text, re.M))
    assert {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels in told.items()} == {
        name: labels for name, (_, labels) in NAMES.items()
    }
    assert f"at {MOST_SERIES} series" in text


def test_every_expression_of_the_dashboard_asks_for_a_metric_and_labels_that_exist():
    asked = [t["expr"] for p in DASHBOARD["panels"] for t in p["targets"]]
    asked += [v["definition"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    for expression in asked:
        names = re.findall(r"memledger_\w+", expression)
        assert names, expression
        for name in names:
            labels = set(re.findall(r"(\w+)=~", expression))
            assert labels <= set(NAMES[name][1]) | SCRAPED, expression


def test_legends_name_labels_that_the_metric_has():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            name = re.search(r"memledger_\w+", target["expr"]).group()
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= set(NAMES[name][1])


def test_the_dashboard_has_what_an_import_needs():
    assert DASHBOARD["uid"] == "memledger"
    assert "id" not in DASHBOARD
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert len({p["id"] for p in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = [tuple(p["gridPos"].values()) for p in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert all(x + width <= 24 for _, width, x, _ in places)
    known = {v["name"] for v in DASHBOARD["templating"]["list"]} | {"__rate_interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) <= known
    for panel in DASHBOARD["panels"]:
        assert {"id", "title", "type", "gridPos", "datasource", "fieldConfig", "options", "targets"} <= set(panel)
        assert panel["type"] in {"timeseries", "table", "stat"}
        assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"]) > 0
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_no_two_panels_lie_on_one_another():
    cells = [
        (x, y)
        for g in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(g["x"], g["x"] + g["w"])
        for y in range(g["y"], g["y"] + g["h"])
    ]
    assert len(cells) == len(set(cells))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
def test_expressions_are_what_prometheus_takes(tmp_path):
    asked = [t["expr"].replace("$__rate_interval", "5m") for p in DASHBOARD["panels"] for t in p["targets"]]
    asked += ALERTS
    rules = [{"record": f"r{n}", "expr": expression} for n, expression in enumerate(asked)]
    file = tmp_path / "rules.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], check=False, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_alerts_name_metrics_and_labels_that_exist():
    assert len(ALERTS) == 4
    for alert in ALERTS:
        names = re.findall(r"memledger_\w+", alert)
        assert names
        assert set(names) <= set(NAMES)
        for name, labels in re.findall(r"(memledger_\w+)\{(.*?)\}", alert):
            assert set(re.findall(r"(\w+)=", labels)) <= set(NAMES[name][1])
