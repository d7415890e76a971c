"""Reads the configuration from flags, environment and a TOML file."""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import BaseModel, ByteSize, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gradserve_protocol.tls import read_regular
from gradserve_protocol.variables import VARIABLES, WORKER_VARIABLES
from gradserve_server.config import ServerConfig
from gradserve_server.config.fields import Expected
from gradserve_server.runtime.files import reason_of

MOST_BYTES = 1 << 20
_MOST_DOTS = 64
_STRING_OR_COMMENT = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|#.*""")


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the contents of a file, whatever it is, within a time that its size bounds.

    Raises:
        OSError: It cannot be read, is not a regular file, or has more than 1 MiB.
        ValueError: It is not valid; the message says where.
    """
    text = read_regular(path, MOST_BYTES).decode()
    for number, line in enumerate(text.split("\n"), 1):
        # The time that a key takes grows with the square of its parts.
        if line.count(".") > _MOST_DOTS and _STRING_OR_COMMENT.sub("", line).count(".") > _MOST_DOTS:
            raise ValueError(f"expected a key of at most {_MOST_DOTS} parts (at line {number})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("tables or lists are nested too deeply") from None


F = TypeVar("F", bound=Callable[..., Any])

_PREFIX = "GRADSERVE_"
_OF_COMMANDS = ("address", "config", "tls", "tls_ca", "tls_client_certificate", "tls_client_key")
"""Settings that other commands take from the environment."""

_KUBERNETES = re.compile(_PREFIX + r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_KUBERNETES_URL = re.compile(r"(tcp|udp|sctp)://.+")
"""The value of GRADSERVE_PORT in Kubernetes."""

_METAVARS = {
    "access": "FILE",
    "backup_dir": "PATH",
    "backup_keep": "N",
    "bulk_listen": "ADDRESS",
    "cluster": "NAME",
    "http_host": "HOST",
    "http_listen": "ADDRESS",
    "min_arrival_rate": "SIZE",
    "reserved_share": "FRACTION",
    "shared_memory_socket": "PATH",
    "state_dir": "PATH",
    "tls_certificate": "FILE",
    "tls_client_ca": "FILE",
    "tls_key": "FILE",
    "upstream": "ADDRESS",
}
"""Placeholders in the help for values that their type and name do not explain."""
_METAVAR_BY_TYPE: dict[object, str] = {ByteSize: "SIZE", int: "N", float: "SECONDS", bool: "BOOLEAN"}


class SettingsError(click.ClickException):
    """A setting is not valid. The message is one line."""

    exit_code = click.UsageError.exit_code


@dataclass(frozen=True)
class Setting:
    """One setting that was given.

    Attributes:
        value: The value as it was given.
        source: Its source, as messages name it: "--max-bytes", "GRADSERVE_MAX_BYTES", "gradserve.toml: max_bytes".
    """

    value: Any
    source: str


def config_options(command: F) -> F:
    """Gives a click command a flag and an environment variable for every field of ServerConfig."""
    for _section, name, field in reversed(list(_fields())):
        option = click.option(
            _flag(name),
            name,
            multiple=_is_tuple(field),
            envvar=_variable(name),
            metavar=_metavar(name, field),
            help=_help(field),
        )
        command = option(command)
    return command


def read_settings(flags: Mapping[str, Any], path: Path | None) -> dict[str, Setting]:
    """Returns the settings by name: from flags and variables of the current click command, otherwise from the file.

    Raises:
        SettingsError: The file cannot be read, or a name in it or in the environment is unknown.
    """
    names = [name for _section, name, _field in _fields()]
    _check_variables(names)
    settings = {}
    file = _read(path)
    for name in sorted(file.keys() - set(names)):
        raise SettingsError(f"unknown setting in {path}: {name}; {_advice(name, names)}")
    for name in names:
        if flags.get(name) not in (None, ()):
            settings[name] = Setting(flags[name], _source(name))
        elif name in file:
            settings[name] = Setting(file[name], f"{path}: {name}")
    return settings


def make_config(settings: Mapping[str, Setting]) -> ServerConfig:
    """Returns the configuration: the settings, with defaults for the others.

    Raises:
        SettingsError: A value is not valid.
    """
    given: dict[str, dict[str, Any]] = {}
    for section, name, _field in _fields():
        if name in settings:
            given.setdefault(section, {})[name] = settings[name].value
    try:
        return ServerConfig.model_validate(given)
    except ValidationError as error:
        # A default that depends on a setting that is not valid is no problem of its own.
        problems = [each for each in error.errors() if each["type"] != "default_factory_not_called"]
        raise SettingsError("; ".join(_describe(problem, settings) for problem in problems)) from None


def _describe(problem: ErrorDetails, settings: Mapping[str, Setting]) -> str:
    name = str(problem["loc"][1])
    if problem["type"] == "value_error":  # from our own validators, which say what they expected
        error = problem["ctx"]["error"]
        text = getattr(error, "message", str(error))  # without the code of a client's error
    else:
        expected = next(each.words for each in _field(name).metadata if isinstance(each, Expected))
        text = f"expected {expected}, got {problem['input']!r}"
    # A setting may be missing beside another one.
    source = settings[name].source if name in settings else _flag(name)
    return f"{source}: {text}"


def _check_variables(names: Iterable[str]) -> None:
    known = [_variable(name) for name in (*names, *_OF_COMMANDS)]
    unknown = sorted(set(filter(_is_ours, os.environ)) - set(known))
    if not unknown:
        return
    known += (*VARIABLES, *WORKER_VARIABLES)
    for variable in unknown:
        if variable not in known:
            raise SettingsError(f"unknown environment variable: {variable}; {_advice(variable, known)}")


def _advice(name: str, known: Iterable[str]) -> str:
    by_ending = {each.removeprefix(_PREFIX): each for each in known}
    similar = difflib.get_close_matches(name.removeprefix(_PREFIX), by_ending, 1, cutoff=0.62)
    return f"did you mean {by_ending[similar[0]]}?" if similar else f"expected one of {', '.join(sorted(set(known)))}"


def _is_ours(variable: str) -> bool:
    """True if a variable is meant for gradserve, rather than made by Kubernetes for a service called gradserve."""
    return (
        variable.startswith(_PREFIX)
        and not _KUBERNETES.fullmatch(variable)
        and not (variable.endswith("_PORT") and _KUBERNETES_URL.fullmatch(os.environ[variable]))
    )


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return read_toml(path)
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise SettingsError(f"cannot read the configuration file {path}: {reason}") from None


def _source(name: str) -> str:
    source = click.get_current_context().get_parameter_source(name)
    return _variable(name) if source is ParameterSource.ENVIRONMENT else _flag(name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"


def _fields() -> Iterator[tuple[str, str, FieldInfo]]:
    for section, concern in ServerConfig.model_fields.items():
        model = concern.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        for name, field in model.model_fields.items():
            yield section, name, field


def _field(name: str) -> FieldInfo:
    return next(field for _section, other, field in _fields() if other == name)


def _is_tuple(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _metavar(name: str, field: FieldInfo) -> str:
    if name in _METAVARS:
        return _METAVARS[name]
    if _is_tuple(field):
        return "ADDRESS"
    kinds = [part for part in _parts(field.annotation) if part is not type(None)]
    return _METAVAR_BY_TYPE.get(kinds[0], name.rpartition("_")[2].upper())


def _parts(annotation: Any) -> tuple[Any, ...]:
    """Returns the types that an annotation allows, without what pydantic knows beside them."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(found for part in get_args(annotation) for found in _parts(part))
    return _parts(get_args(annotation)[0]) if get_origin(annotation) is Annotated else (annotation,)


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    if field.default_factory is not None or field.default in (None, ()):
        return text
    default = ", ".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"{text}  [default: {getattr(default, 'human_readable', lambda: default)()}]"
