"""The files of deploy/ fit the code: dashboards and alerts query exported metrics, and docs list them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.gateway.middleware import HTTP_METRICS
from serving.router.records import ROUTER_METRICS
from stages.host.metrics import STAGE_METRICS
from stages.telemetry.prometheus import MetricFamily
from tests.conftest import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
FAMILIES = (*STAGE_METRICS, *ROUTER_METRICS, *HTTP_METRICS)


def series_of(family: MetricFamily) -> list[str]:
    """A metric's names in queries."""
    return [family.name + end for end in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))]


EXPORTED = {series for family in FAMILIES for series in series_of(family)}
# metrics of Prometheus itself, and of its client
OF_ANY_PROCESS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
JOBS = {"onesweep-router", "onesweep-stage", "onesweep-http"}


def asked_for(expression: str) -> set[str]:
    """Names of metrics in a query: what stands before a brace, a bracket, an operator or the end, and is no label."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", "", expression)
    bare = re.sub(r"\b(by|without|on|group_left)\s*\([^)]*\)", "", bare)
    return set(re.findall(r"\b[a-z][a-z0-9_:]*\b(?!\s*\()", bare)) - {"by", "on", "and", "or", "unless"}


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "onesweep.json").read_text())


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return group["rules"]


def test_every_panel_queries_exported_metrics() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    assert all(panel["title"] and panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    asked = set().union(*map(asked_for, expressions))
    assert asked - EXPORTED <= OF_ANY_PROCESS
    unseen = {family.name.removeprefix("onesweep_") for family in FAMILIES if not asked & {*series_of(family)}}
    tokens = {f"router_{kind}_tokens_total" for kind in ("drafted", "output", "prompt", "cached")}
    prefixes = {f"stage_prefix_{what}" for what in ("bytes", "hits_total", "limit_bytes", "positions_total")}
    router = {f"router_{what}" for what in ("hops_total", "wire_bytes_total", "sent_bytes_total", "ready")}
    assert unseen == router | tokens | prefixes  # alerts have router_ready


def test_every_alert_queries_exported_metrics_and_has_a_summary() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert asked_for(rule["expr"]) - EXPORTED <= OF_ANY_PROCESS
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("page", "warn")


def test_the_example_scrapes_all_jobs_and_reads_the_rules() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert {job["job_name"] for job in config["scrape_configs"]} == JOBS
    assert [DEPLOY / name for name in config["rule_files"]] == [DEPLOY / "alerts.yml"]
    served = [re.findall(r"--metrics ([0-9.:]+)", path.read_text()) for path in (DEPLOY / "systemd").glob("*.env")]
    assert sorted(served) == sorted(job["static_configs"][0]["targets"] for job in config["scrape_configs"])
    used = {match for rule in rules() for match in re.findall(r'job=~"([^"]*)"', rule["expr"])}
    assert all(re.fullmatch(pattern, job) for pattern in used for job in JOBS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    for kind, name in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        check = ["promtool", "check", kind, DEPLOY / name]
        done = subprocess.run(check, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr


def test_the_documentation_lists_every_metric() -> None:
    rows = [line for line in (ROOT / "docs" / "seeing.md").read_text().splitlines() if line.startswith("| `onesweep_")]
    expected = [
        f"| `{family.name}` | {family.kind} | {', '.join(f'`{label}`' for label in family.labels)} | {family.text} |"
        for family in FAMILIES
    ]
    assert rows == [re.sub(r"\|  \|", "| |", row) for row in expected]
