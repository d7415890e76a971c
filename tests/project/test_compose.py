"""What compose.yaml says of the server, and of Prometheus and Grafana beside it, fits together."""

from pathlib import Path
from typing import Any

import yaml

from gradserve_server.config import RuntimeConfig

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def test_mounted_files_and_volumes_exist() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]


def test_every_port_is_of_this_machine_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert {int(port.rpartition(":")[2]) for port in ports} == {50051, 50052, 50080, 9090, 3000}


def test_the_server_gets_more_time_to_stop_than_it_takes() -> None:
    assert int(SERVICES["server"]["stop_grace_period"].removesuffix("s")) > RuntimeConfig().drain_seconds + 1


def test_prometheus_reaches_the_server_by_a_name_that_it_allows() -> None:
    (option,) = [word for word in SERVICES["prometheus"]["command"] if word.startswith("--config.file=")]
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / Path(option).name).read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    host, _, port = target.rpartition(":")
    environment = SERVICES[host]["environment"]
    assert environment == {"GRADSERVE_HTTP_LISTEN": f"0.0.0.0:{port}", "GRADSERVE_HTTP_HOST": host}


def test_grafana_reaches_prometheus() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning" / "datasources"
    (source,) = yaml.safe_load((folder / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in SERVICES
    assert {SERVICES[name]["profiles"][0] for name in ("prometheus", "grafana")} == {"monitoring"}
