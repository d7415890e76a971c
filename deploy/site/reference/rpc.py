"""The reference of the RPCs: one page for each service, with its methods, messages and enums."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from deploy.site.reference.comments import as_markdown, in_a_cell
from deploy.site.reference.protos import Declared, Member, Method, Service, Subject, read_subjects

_INTRODUCTION = """\
# RPCs

All services, methods and messages of `gradserve.v1`, made from the comments of the protos: they are the contract, for
every language. [From another language](../other_languages.md) says which calls a worker needs, and in which order.
`python -m gradserve.protos` prints where the protos are once the Python client is installed.
"""
_TYPE_NAME = re.compile(r"[A-Z]\w*(?:\.\w+)*")


def write_rpc_reference(descriptor_set: Path, folder: Path) -> None:
    """Writes rpc.md, which lists the services, and a page for each of them.

    Args:
        descriptor_set: What protoc made of all protos, with `--include_source_info`.
        folder: The folder of the pages.
    """
    subjects = read_subjects(descriptor_set)
    places = dict(_places(subjects))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rpc.md").write_text(_overview(subjects, places.get))
    for subject in subjects:
        (folder / page_of(subject.name)).write_text(_page(subject, places.get))


def page_of(subject: str) -> str:
    """Returns the name of a subject's page."""
    return f"rpc_{subject}.md"


def anchor_of(name: str) -> str:
    """Returns the anchor of a service, message, enum, or of a member: "Tensor", "Tensor.dtype"."""
    return f"gradserve.v1.{name}"


def _places(subjects: tuple[Subject, ...]) -> Iterator[tuple[str, str]]:
    for subject in subjects:
        for service in subject.services:
            yield service.name, f"{page_of(subject.name)}#{anchor_of(service.name)}"
            for method in service.methods:
                name = f"{service.name}.{method.name}"
                yield name, f"{page_of(subject.name)}#{anchor_of(name)}"
                yield method.name, f"{page_of(subject.name)}#{anchor_of(name)}"
        for declared in subject.types:
            for name in (declared.name, *(f"{declared.name}.{member.name}" for member in declared.members)):
                yield name, f"{page_of(subject.name)}#{anchor_of(name)}"


def _overview(subjects: tuple[Subject, ...], link: Callable[[str], str | None]) -> str:
    lines = [_INTRODUCTION]
    for subject in subjects:
        for service in subject.services:
            lines += [f"\n## [{service.name}]({link(service.name)})\n"]
            lines += ["| method | request | response |", "|---|---|---|"]
            for method in service.methods:
                name = f"[{method.name}]({link(f'{service.name}.{method.name}')})"
                lines.append(f"| {name} | {_typed(method.request, link)} | {_typed(method.response, link)} |")
    return "\n".join(lines) + "\n"


def _page(subject: Subject, link: Callable[[str], str | None]) -> str:
    sections = [f"# {' and '.join(service.name for service in subject.services)}"]
    for service in subject.services:
        sections += list(_service(service, link))
    sections += ["## Messages and enums"]
    for declared in subject.types:
        sections += list(_declared(declared, link))
    return "\n\n".join(sections) + "\n"


def _service(service: Service, link: Callable[[str], str | None]) -> Iterator[str]:
    yield f'<a id="{anchor_of(service.name)}"></a>\n\n{as_markdown(service.comment, link)}'
    yield "## Methods"
    for method in service.methods:
        yield f"### {method.name} {{#{anchor_of(f'{service.name}.{method.name}')}}}"
        yield _signature(method, link)
        yield as_markdown(method.comment, link)


def _signature(method: Method, link: Callable[[str], str | None]) -> str:
    return f"{_typed(method.request, link)} → {_typed(method.response, link)}\n{{.signature}}"


def _declared(declared: Declared, link: Callable[[str], str | None]) -> Iterator[str]:
    yield f"### {declared.name} {{#{anchor_of(declared.name)}}}"
    if declared.comment:
        yield as_markdown(declared.comment, link)
    if not declared.members:
        yield "It has no fields."
        return
    row = partial(_row, declared.name, link)
    head = "| number | value | meaning |" if declared.kind == "enum" else "| number | field | type | meaning |"
    rule = "|---" * (head.count("|") - 1) + "|"
    yield "\n".join([head, rule, *map(row, declared.members)])


def _row(owner: str, link: Callable[[str], str | None], member: Member) -> str:
    name = f'<a id="{anchor_of(f"{owner}.{member.name}")}"></a>`{member.name}`'
    oneof, _, about = member.oneof.partition(": ")
    of = f"One of `{oneof}`. " if oneof else ""
    meaning = of + in_a_cell(f"{about}\n\n{member.comment}".strip(), link)
    cells = [str(member.number), name, *([_typed(member.type, link)] if member.type else []), meaning]
    return f"| {' | '.join(cells)} |"


def _typed(text: str, link: Callable[[str], str | None]) -> str:
    """Returns a type with each message and enum in it as a link."""

    def linked(match: re.Match[str]) -> str:
        place = link(match[0])
        return f"[{match[0]}]({place})" if place else match[0]

    return _TYPE_NAME.sub(linked, text.replace("<", "&lt;").replace(">", "&gt;"))
