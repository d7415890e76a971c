"""The references have everything that there is."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from google.protobuf.descriptor import EnumDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from deploy.site.places import ROOT
from deploy.site.reference.commands import commands_below, write_commands
from deploy.site.reference.comments import as_markdown
from deploy.site.reference.python.docstrings import as_markdown as docstring_as_markdown
from deploy.site.reference.python.pages import write_python_reference
from deploy.site.reference.rpc import write_rpc_reference
from gradserve_server.commands.cli import cli

_ANCHOR = re.compile(r"\{#(\S+)\}|<a id=\"([^\"]+)\">")
_MODULES = ("gradserve", "gradserve.aio", "gradserve.data", "gradserve.testing", "gradserve.training")


def anchors_in(folder: Path) -> list[str]:
    """Returns all anchors that the pages of a folder set."""
    found = (_ANCHOR.findall(page.read_text()) for page in folder.glob("*.md"))
    return [first or second for anchors in found for first, second in anchors]


def proto_files() -> list[FileDescriptor]:
    names = (path.stem for path in (ROOT / "proto" / "gradserve" / "v1").glob("*.proto"))
    return [importlib.import_module(f"gradserve.v1.{name}_pb2").DESCRIPTOR for name in names]


def members_of(declared: Any) -> Iterator[str]:
    yield declared.full_name
    if isinstance(declared, EnumDescriptor):
        yield from (f"{declared.full_name}.{value.name}" for value in declared.values)
        return
    yield from (f"{declared.full_name}.{field.name}" for field in declared.fields)
    for nested in (*declared.nested_types, *declared.enum_types):
        if isinstance(nested, EnumDescriptor) or not nested.GetOptions().map_entry:
            yield from members_of(nested)


def test_every_service_method_message_field_and_enum_has_an_anchor(tmp_path: Path) -> None:
    files = FileDescriptorSet()
    declared: list[str] = []
    for file in proto_files():
        file.CopyToProto(proto := FileDescriptorProto())
        files.file.append(proto)
        for top in (*file.message_types_by_name.values(), *file.enum_types_by_name.values()):
            declared += members_of(top)
        for service in file.services_by_name.values():
            declared += [service.full_name, *(method.full_name for method in service.methods)]
    (tmp_path / "protos.bin").write_bytes(files.SerializeToString())
    write_rpc_reference(tmp_path / "protos.bin", tmp_path)
    assert sorted(anchors_in(tmp_path)) == sorted(declared)
    named = set(re.findall(r"reference/rpc_\w+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named == {f"reference/{page.name}" for page in tmp_path.glob("rpc_*.md")}


@pytest.fixture(scope="module")
def python_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    write_python_reference(folder)
    return folder


@pytest.mark.parametrize("module", _MODULES)
def test_every_public_name_and_method_has_an_anchor(python_pages: Path, module: str) -> None:
    anchors = anchors_in(python_pages)
    assert len(set(anchors)) == len(anchors)
    contents = importlib.import_module(module)
    for name in contents.__all__:
        assert f"{module}.{name}" in anchors
        public = getattr(contents, name)
        if isinstance(public, type) and public.__module__.startswith("gradserve"):
            methods = [key for key, value in vars(public).items() if callable(value) and not key.startswith("_")]
            assert all(f"{module}.{name}.{method}" in anchors for method in methods)


def test_methods_that_are_made_when_imported_show_their_arguments(python_pages: Path) -> None:
    text = (python_pages / "python_accumulators.md").read_text()
    (push_pull,) = re.findall(
        r"\{#gradserve\.GradientAccumulator\.push_pull\}\n(.*?)\n### ", text + "\n### ", re.DOTALL
    )
    assert "num_required: int" in push_pull
    assert "[`StaleGradientError`](python_errors.md#gradserve.StaleGradientError): " in push_pull


def test_frameworks_are_documented_whether_they_are_installed_or_not(python_pages: Path) -> None:
    assert "{#gradserve.torch.average_gradients}" in (python_pages / "python_torch.md").read_text()
    assert "{#gradserve.jax.functions.layer_norm}" in (python_pages / "python_jax.md").read_text()


def test_every_command_has_a_section(tmp_path: Path) -> None:
    write_commands(tmp_path)
    text = (tmp_path / "commands.md").read_text()
    for path, command in commands_below(cli, "gradserve"):
        assert f" `{path}` {{#" in text
        if path != "gradserve serve":
            for option in (each for each in command.params if isinstance(each, click.Option) and not each.hidden):
                assert option.opts[0] in text


@pytest.mark.parametrize(
    ("comment", "shown"),
    [
        (" one\n line\n", "one line\n"),
        ("Retry: safe.\nNOT_FOUND: no such\nhandle.", "* **Retry**: safe.\n* **NOT_FOUND**: no such handle."),
        ("has global_step, `x*y`", "has `global_step`, `x*y`"),
        ("of shape [n], a*b, <none>", r"of shape \[n\], a\*b, \<none\>"),
        ("see TensorSpec", "see [TensorSpec](there)"),
        ("see Tensor.dtype and `Tensor.dtype`", "see [`Tensor.dtype`](it) and [`Tensor.dtype`](it)"),
    ],
)
def test_comments_of_protos(comment: str, shown: str) -> None:
    assert as_markdown(comment, {"TensorSpec": "there", "Tensor.dtype": "it"}.get).strip() == shown.strip()


def test_docstrings() -> None:
    docstring = "Takes `get`.\n\nArgs:\n    one: The first,\n        longer.\n    two: The second.\n\nReturns:\n    It."
    arguments = "**Arguments**\n\n* `one`: The first, longer.\n* `two`: The second."
    shown = f"Takes [`get`](there).\n\n{arguments}\n\n**Returns**\n\nIt."
    assert docstring_as_markdown(docstring, {"get": "there"}.get) == shown


def test_examples_in_docstrings_keep_their_indentation() -> None:
    docstring = "For example\n\n    for one in two:\n        if one:\n            take(one)\n\nand so on."
    shown = "For example\n\n```python\nfor one in two:\n    if one:\n        take(one)\n```\n\nand so on."
    assert docstring_as_markdown(docstring, lambda _: None) == shown


def test_the_example_of_a_hook_can_be_copied(python_pages: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (python_pages / "python_torch.md").read_text(), re.DOTALL)
    (example,) = (each for each in blocks if "set_all_reduce_hook" in each and "model.named_modules()" in each)
    (loop,) = ast.parse(example).body
    assert isinstance(loop, ast.For)
