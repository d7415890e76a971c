"""The pages for other languages quote the examples, and name calls and methods that exist."""

import re
from pathlib import Path

import gradserve
from gradserve_protocol.v1 import (
    accumulator_service_pb2,
    lease_service_pb2,
    parameters_service_pb2,
    server_service_pb2,
    tensor_service_pb2,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEXT = "\n".join(page.read_text() for page in (*sorted(DOCS.glob("other_languages*.md")), DOCS / "python_rpcs.md"))
FOLDERS = {"js": ("javascript", "*.js"), "cpp": ("cpp", "*.*")}
SERVICES = {
    service.name: set(service.methods_by_name)
    for module in (
        accumulator_service_pb2,
        lease_service_pb2,
        parameters_service_pb2,
        server_service_pb2,
        tensor_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
}


def test_their_excerpts_are_in_the_examples() -> None:
    excerpts = re.findall(r"```(js|cpp)\n(.*?)```", TEXT, re.DOTALL)
    assert len(excerpts) >= 5
    for language, excerpt in excerpts:
        folder, pattern = FOLDERS[language]
        sources = [path.read_text() for path in (ROOT / "examples" / folder).glob(pattern)]
        assert any(excerpt in source for source in sources), excerpt


def test_their_calls_are_those_of_the_protos() -> None:
    named = set(re.findall(r"`(\w+Service)\.(\w+)`", TEXT))
    assert all(method in SERVICES[service] for service, method in named)
    assert named == {(service, method) for service, methods in SERVICES.items() for method in methods}


def test_their_python_methods_exist() -> None:
    rows = re.findall(r"^\| (`(?:client|acc)\..*?) \| ", TEXT, re.MULTILINE)
    assert len(rows) >= 15
    accumulators = (
        gradserve.ConditionalAccumulator,
        gradserve.SparseConditionalAccumulator,
        gradserve.GradientAccumulator,
    )
    for name in re.findall(r"`(?:\w+\.)?(\w+)`", " ".join(rows)):
        assert any(hasattr(each, name) for each in (gradserve.Client, *accumulators)), name
