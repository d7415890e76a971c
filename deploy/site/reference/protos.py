"""Declarations in the protos, with their comments."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6  # the numbers of these fields of FileDescriptorProto, in paths of comments
_FIELDS, _NESTED, _NESTED_ENUMS, _ONEOFS = 2, 3, 4, 8  # of DescriptorProto
_METHODS, _VALUES = 2, 2  # of ServiceDescriptorProto and of EnumDescriptorProto
_PACKAGE = ".gradserve.v1."
_SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in FieldDescriptorProto.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}


@dataclass(frozen=True)
class Method:
    """A method of a service: its messages are names, marked "stream " where there are many."""

    name: str
    request: str
    response: str
    comment: str


@dataclass(frozen=True)
class Service:
    """A service and its methods, in the order of the proto."""

    name: str
    methods: tuple[Method, ...]
    comment: str


@dataclass(frozen=True)
class Member:
    """A field of a message, or a value of an enum, whose type is then empty.

    Attributes:
        oneof: The name of its oneof, or "".
    """

    number: int
    name: str
    type: str
    comment: str
    oneof: str = ""


@dataclass(frozen=True)
class Declared:
    """A message or an enum, and its members in the order of the proto."""

    kind: str
    name: str
    members: tuple[Member, ...]
    comment: str


@dataclass(frozen=True)
class Subject:
    """Everything that belongs to one service: the files with its messages, and the service itself.

    Attributes:
        name: The name of the service's file, without "_service.proto".
        comment: The comments at the beginning of its files.
    """

    name: str
    comment: str
    services: tuple[Service, ...]
    types: tuple[Declared, ...]


def read_subjects(path: Path) -> tuple[Subject, ...]:
    """Returns what a descriptor set made with `--include_source_info` declares, by subject."""
    files = FileDescriptorSet.FromString(path.read_bytes()).file
    by_name = {file.name: file for file in files if file.package == _PACKAGE.strip(".")}
    subjects = []
    for name in _in_subjects(by_name):
        contents = [_File(by_name[each]) for each in _in_subjects(by_name)[name]]
        subjects.append(
            Subject(
                name=name,
                comment=contents[0].comment,
                services=tuple(service for file in contents for service in file.services()),
                types=tuple(declared for file in contents for declared in file.types()),
            )
        )
    return tuple(subjects)


def _in_subjects(files: Mapping[str, FileDescriptorProto]) -> dict[str, list[str]]:
    """Returns the files of each subject, that of the service first.

    A file belongs to the service after which it is named, or else to the first whose file needs it.
    """
    services = [name for name in sorted(files) if name.endswith("_service.proto")]
    subjects = {_stem(name).removesuffix("_service"): [name] for name in services}
    needed = {subject: set(_needed(files, first[0])) for subject, first in subjects.items()}
    for name in sorted(files.keys() - set(services)):
        named = [subject for subject in subjects if _stem(name) in (subject, f"{subject}_messages")]
        owner = (named or [subject for subject in subjects if name in needed[subject]])[0]
        subjects[owner].append(name)
    return subjects


def _stem(name: str) -> str:
    return Path(name).stem


def _needed(files: Mapping[str, FileDescriptorProto], name: str) -> Iterator[str]:
    for other in files[name].dependency:
        if other in files:
            yield other
            yield from _needed(files, other)


@dataclass(frozen=True)
class _File:
    proto: FileDescriptorProto
    comments: dict[tuple[int, ...], str] = field(init=False)

    def __post_init__(self) -> None:
        comments = {
            tuple(location.path): (location.leading_comments + "\n\n" + location.trailing_comments).strip()
            for location in self.proto.source_code_info.location
        }
        object.__setattr__(self, "comments", comments)

    @property
    def comment(self) -> str:
        """The comment before `syntax`, which is about the file."""
        for location in self.proto.source_code_info.location:
            if tuple(location.path) == (12,):
                return "\n\n".join([*location.leading_detached_comments, location.leading_comments]).strip()
        return ""

    def services(self) -> Iterator[Service]:
        for index, service in enumerate(self.proto.service):
            path = (_SERVICES, index)
            yield Service(service.name, tuple(self._methods(service, path)), self._comment(path))

    def types(self) -> Iterator[Declared]:
        for index, enum in enumerate(self.proto.enum_type):
            yield self._enum(enum, (_ENUMS, index), "")
        for index, message in enumerate(self.proto.message_type):
            yield from self._message(message, (_MESSAGES, index), "")

    def _methods(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[Method]:
        for index, method in enumerate(service.method):
            yield Method(
                name=method.name,
                request="stream " * method.client_streaming + method.input_type.removeprefix(_PACKAGE),
                response="stream " * method.server_streaming + method.output_type.removeprefix(_PACKAGE),
                comment=self._comment((*path, _METHODS, index)),
            )

    def _message(self, message: DescriptorProto, path: tuple[int, ...], outer: str) -> Iterator[Declared]:
        entries = {each.name: each for each in message.nested_type if each.options.map_entry}
        name = outer + message.name
        oneofs = [
            f"{oneof.name}: {comment}" if (comment := self._comment((*path, _ONEOFS, index))) else oneof.name
            for index, oneof in enumerate(message.oneof_decl)
        ]
        members = tuple(
            Member(
                number=each.number,
                name=each.name,
                type=_type_of(each, entries),
                comment=self._comment((*path, _FIELDS, index)),
                oneof=oneofs[each.oneof_index] if each.HasField("oneof_index") and not each.proto3_optional else "",
            )
            for index, each in enumerate(message.field)
        )
        yield Declared("message", name, members, self._comment(path))
        for index, enum in enumerate(message.enum_type):
            yield self._enum(enum, (*path, _NESTED_ENUMS, index), f"{name}.")
        for index, nested in enumerate(message.nested_type):
            if nested.name not in entries:
                yield from self._message(nested, (*path, _NESTED, index), f"{name}.")

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...], outer: str) -> Declared:
        values = tuple(
            Member(value.number, value.name, "", self._comment((*path, _VALUES, index)))
            for index, value in enumerate(enum.value)
        )
        return Declared("enum", outer + enum.name, values, self._comment(path))

    def _comment(self, path: tuple[int, ...]) -> str:
        return re.sub(r"^ ", "", self.comments.get(path, ""), flags=re.MULTILINE)


def _type_of(member: FieldDescriptorProto, entries: Mapping[str, DescriptorProto]) -> str:
    name = member.type_name.rpartition(".")[2]
    if name in entries:
        key, value = entries[name].field
        return f"map<{_type_of(key, {})}, {_type_of(value, {})}>"
    name = _SCALARS.get(member.type) or member.type_name.removeprefix(_PACKAGE).removeprefix(".")
    if member.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if member.proto3_optional else name
