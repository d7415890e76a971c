"""The extras of the distribution: checks whether one is installed, and finds the command that installs it.

Imported before the packages of the extras, so it uses the standard library alone.
"""

import importlib.metadata
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

_DISTRIBUTION = "gradserve"
_SOURCES = Path(__file__).resolve().parents[2]


class MissingExtraError(ModuleNotFoundError):
    """An extra of gradserve is not installed; the message has the command that installs it."""


def require(extra: str) -> None:
    """Checks that all distributions of an extra are installed, in any version.

    If gradserve runs from its sources without being installed, nothing lists what an extra has; then imports fail by
    themselves.

    Raises:
        MissingExtraError: Some are not installed.
    """
    missing = [name for name in _distributions(extra) if not _is_installed(name)]
    if missing:
        raise MissingExtraError(
            f"gradserve's {extra} needs {', '.join(missing)}; install it with: {install_command(extra)}"
        )


def require_frameworks(package: str, extra: str, **titles: str) -> None:
    """Checks that the frameworks are installed on which a package of the client stands, whatever they came with.

    Args:
        package: The package.
        extra: The extra that installs them.
        **titles: The names of the frameworks by their import packages.

    Raises:
        ModuleNotFoundError: One is not installed; the message says how to install it.
    """
    for name, title in titles.items():
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(
                f"{package} needs {title}, which is not installed; in a checkout of gradserve: "
                f"pip install '.[{extra}]'",
                name=name,
            )


def install_command(extra: str) -> str:
    """Returns the command that installs an extra from the place that gradserve itself was installed from."""
    try:
        origin = importlib.metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return _pip_install("-e", f"{_SOURCES}[{extra}]")
    if origin is None:  # from an index, which has the extra's distributions, too
        return _pip_install(f"{_DISTRIBUTION}[{extra}]")
    return _pip_install(*_requirement(json.loads(origin), extra))


def _requirement(origin: dict[str, Any], extra: str) -> tuple[str, ...]:
    """Returns the arguments with which pip installs an extra from an origin other than an index (PEP 610)."""
    url: str = origin["url"]
    if origin.get("dir_info", {}).get("editable"):
        return "-e", f"{url2pathname(urlsplit(url).path)}[{extra}]"
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return (f"{_DISTRIBUTION}[{extra}] @ {url}",)


def _pip_install(*arguments: str) -> str:
    return shlex.join(("pip", "install", *arguments))


def _distributions(extra: str) -> list[str]:
    try:
        requirements = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        if name and re.search(rf"""\bextra == ["']{extra}["']""", requirement) and name[0] != _DISTRIBUTION:
            found.append(name[0])
    return found


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
