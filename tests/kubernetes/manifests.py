"""The manifests in deploy/kubernetes as kubectl renders them; `python -m tests.kubernetes.manifests` does so anew."""

import shutil
import subprocess
from pathlib import Path
from textwrap import indent
from typing import Any, TypeAlias

import yaml

from tests.servers.polling import PATIENCE_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "kubernetes"
KUBECTL = shutil.which("kubectl")
SOURCES = {path.name: path for path in [*sorted((FOLDER / "overlays").iterdir()), FOLDER / "jobset"]}
"""The folders that can be applied, by the names of their files in rendered/."""

_RULE = """\
# Copied from deploy/prometheus/alerts.yml: python -m tests.kubernetes.manifests
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: gradserve
  labels:
    app.kubernetes.io/name: gradserve
spec:
"""

Manifest: TypeAlias = dict[str, Any]


def render(source: Path) -> str:
    """Returns what `kubectl kustomize` makes of a folder.

    Raises:
        subprocess.CalledProcessError: It is not valid.
    """
    assert KUBECTL is not None
    return subprocess.run(
        [KUBECTL, "kustomize", str(source)], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    ).stdout


def rendered_file(name: str) -> Path:
    return FOLDER / "rendered" / f"{name}.yaml"


def manifests(name: str) -> list[Manifest]:
    """Returns the objects of an overlay, of "jobset", as they were rendered last."""
    return list(yaml.safe_load_all(rendered_file(name).read_text()))


def one(kind: str, of: list[Manifest]) -> Manifest:
    (found,) = [manifest for manifest in of if manifest["kind"] == kind]
    return found


def copied() -> dict[Path, str]:
    """Returns the files of the component "alerts" that are made of the rules for Prometheus and the dashboard."""
    rules = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    component = FOLDER / "components" / "alerts"
    return {
        component / "prometheus_rule.yaml": _RULE + indent(rules, "  "),
        component / "gradserve.json": (DEPLOY / "grafana" / "gradserve.json").read_text(),
    }


def main() -> None:
    for path, text in copied().items():
        path.write_text(text)
    for name, source in SOURCES.items():
        rendered_file(name).write_text(render(source))


if __name__ == "__main__":
    main()
