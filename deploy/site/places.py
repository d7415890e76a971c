"""Maps each file of the repository to its place on the site."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

_PLACES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "threat_model.md",
    "benchmarks/README.md": "benchmarks.md",
    "client/gradserve": "reference/python.md",
    "examples/README.md": "examples.md",
    "examples/cpp/README.md": "examples_cpp.md",
    "proto/gradserve/v1": "reference/rpc.md",
    "server/gradserve_server/commands/cli.py": "reference/commands.md",
    "server/gradserve_server/commands": "reference/commands.md",
    "server/gradserve_server/config/__init__.py": "reference/settings.md",
}
"""The site's pages about files and folders of the repository, by path in the repository."""

_SHOWN = {".cc", ".cpp", ".js", ".py", ".sh", ".toml", ".yaml", ".yml"}
"""The suffixes of files that are shown as pages of their own if a page links to them."""


def tracked() -> frozenset[str]:
    """Returns the paths of all files of the repository, those that git does not know yet too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return frozenset(path for path in listed.splitlines() if (ROOT / path).exists())


def is_page(path: str) -> bool:
    """True if a file of the repository is a page of the site by itself, not because another links to it."""
    return (path.startswith("docs/") and path.endswith(".md")) or (
        path in _PLACES and path.endswith(".md") and path != "README.md"
    )


def is_shown(path: str) -> bool:
    """True if a file becomes a page that shows its text."""
    return Path(path).suffix in _SHOWN


def place_of(path: str) -> str:
    """Returns where a file, or a folder, of the repository is on the site."""
    if path.endswith(".proto"):
        path = path.rpartition("/")[0]  # what is in it is on the pages about its package
    if path in _PLACES:
        return _PLACES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"files/{path}/index.md"
    return f"files/{path}.md" if is_shown(path) else f"files/{path}"


def has_reference(path: str) -> bool:
    """True if the site has a reference in the place of a file or a folder of the repository."""
    return place_of(path).startswith("reference/")
