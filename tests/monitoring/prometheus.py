"""A Prometheus that scrapes a server."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from gradserve_testing.server_process import free_port
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.processes import ended

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None, reason="needs Prometheus"
)


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> Any:
        """Returns the data of an answer of its API."""
        with urlopen(f"{self.url}/api/v1/{path}", timeout=PATIENCE_SECONDS) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, query: str) -> list[Any]:
        """Returns the result of a query."""
        return list(self.get(f"query?query={quote(query)}")["result"])

    def until(self, path: str, condition: Any) -> Any:
        """Asks its API until a condition holds for the data; returns it."""
        return eventually(lambda: self.get(path), condition)


@contextmanager
def scraping(folder: Path, target: str, rules: str) -> Iterator[Prometheus]:
    """Runs a Prometheus that scrapes HOST:PORT twice a second, with alert rules."""
    (folder / "alerts.yml").write_text(rules)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}\n"
        "rule_files: [alerts.yml]\n"
        f"scrape_configs: [{{job_name: gradserve, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with ended(subprocess.Popen(command)) as process:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")

        def answers() -> bool:
            assert process.poll() is None, "Prometheus has ended"
            try:
                prometheus.get("status/runtimeinfo")
            except OSError:
                return False
            return True

        eventually(answers)
        yield prometheus
