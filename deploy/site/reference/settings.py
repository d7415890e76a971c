"""The reference of the server's settings, from the models that check them."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from deploy.site.places import ROOT
from gradserve_server.config import ServerConfig
from gradserve_server.config.fields import Expected

_INTRODUCTION = """\
# Settings of a server

Every setting is a flag of `gradserve serve`, an environment variable and an entry of a TOML file, whose name is the
heading; [configuration](../configuration.md) says which one counts. This page is made from the models with which the
server checks them.
"""
_DEFAULT = re.compile(r" \(default: ([^()]*)\)")
_NOTE = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)


class UndescribedSettingError(Exception):
    """A setting does not say what its default is, or what it can be."""


def write_settings(folder: Path) -> None:
    """Writes settings.md.

    Raises:
        UndescribedSettingError: A setting does not say enough.
    """
    notes = _notes((ROOT / "docs" / "settings_notes.md").read_text())
    names = {name for _title, fields in concerns() for name in fields}
    unknown = notes.keys() - names
    if unknown:
        raise UndescribedSettingError(
            f"docs/settings_notes.md has notes on unknown settings: {', '.join(sorted(unknown))}"
        )
    lines = [_INTRODUCTION]
    for title, fields in concerns():
        lines.append(f"## {title}")
        for name, field in fields.items():
            lines += _setting(name, field, notes.get(name, ""))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.md").write_text("\n\n".join(lines) + "\n")


def concerns() -> Iterator[tuple[str, Mapping[str, FieldInfo]]]:
    """Yields the title of each group of settings, and its settings by name."""
    for concern in ServerConfig.model_fields.values():
        model = concern.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        title = (model.__doc__ or "").partition(".")[0].removeprefix("The ")
        yield f"{title[:1].upper()}{title[1:]}", model.model_fields


def _notes(page: str) -> dict[str, str]:
    """Returns what the page with notes says about settings beyond their descriptions."""
    _before, _, table = page.partition("| setting | more about it |")
    return dict(_NOTE.findall(table.partition("\n\n")[0]))


def _setting(name: str, field: FieldInfo, note: str) -> Iterator[str]:
    yield f"### `{name}` {{#{name}}}"
    description = _DEFAULT.sub("", field.description or "")
    yield f"{description[:1].upper()}{description[1:]}.".replace("<", "&lt;")
    if note:
        yield _from_here(f"{note[:1].upper()}{note[1:].rstrip('.')}.")
    flag = "--" + name.replace("_", "-")
    cells = (f"`{flag}`", f"`GRADSERVE_{name.upper()}`", _default(name, field), _expected(name, field))
    yield f"| flag | variable | default | can be |\n|---|---|---|---|\n| {' | '.join(cells)} |"


def _default(name: str, field: FieldInfo) -> str:
    said = _DEFAULT.search(field.description or "")
    if said:
        return " ".join(said[1].split())
    if field.default_factory is not None:
        raise UndescribedSettingError(f"the description of {name} does not say what the default is: (default: ...)")
    default = field.default
    if default is None:
        return "none"
    if isinstance(default, tuple):
        return ", ".join(f"`{each}`" for each in default)
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, ByteSize):
        return f"`{default.human_readable().replace('.0', '')}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _expected(name: str, field: FieldInfo) -> str:
    words = next((each.words for each in field.metadata if isinstance(each, Expected)), None)
    if words is None:
        raise UndescribedSettingError(f"{name} does not say what it can be: Expected(...)")
    return words.replace("|", "\\|").replace("<", "&lt;")


def _from_here(text: str) -> str:
    """Returns Markdown of docs/ with its links as seen from the folder of the references."""
    return re.sub(r"\]\((?!\w+:|#)", "](../", text).replace("](#", "](../settings_notes.md#")
