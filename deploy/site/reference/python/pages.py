"""The reference of the Python client: what it publishes, from its docstrings."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.site.reference.python.docstrings import Link, as_markdown
from deploy.site.reference.python.documented import Documented
from deploy.site.reference.python.reading import read_docstring, read_modules

_INTRODUCTION = """\
# Python client

Everything that the client publishes, made from its docstrings. `gradserve` blocks; `gradserve.aio` has the same with
`await`.
"""


@dataclass(frozen=True)
class _Page:
    name: str
    title: str
    introduction: str
    contents: tuple[tuple[str, Callable[[Documented], bool]], ...]

    @property
    def file(self) -> str:
        return f"python_{self.name}.md"


def _from(*sources: str) -> Callable[[Documented], bool]:
    return lambda found: found.source.startswith(sources)


def _all(_found: Documented) -> bool:
    return True


_PARTS = ("gradserve.client", "gradserve.interceptors", "gradserve_protocol.tls")
_ACCUMULATORS = ("gradserve.accumulators",)
_PARAMETERS = ("gradserve.parameters", "gradserve.saved")
_LAYERS = ("gradserve.batch_norm",)
_OPS = ("gradserve.raw_ops", "gradserve.ops", "gradserve.calls.raw_ops")
_ERRORS = ("gradserve_protocol.errors",)
_ELSEWHERE = (*_PARTS, *_ACCUMULATORS, *_PARAMETERS, *_LAYERS, *_OPS, *_ERRORS)

_PAGES = (
    _Page("client", "Client", "`import gradserve`", (("gradserve", _from(*_PARTS)),)),
    _Page("accumulators", "Accumulators", "`import gradserve`", (("gradserve", _from(*_ACCUMULATORS)),)),
    _Page(
        "parameters",
        "Parameters",
        "`import gradserve`",
        (
            ("gradserve", _from(*_PARAMETERS)),
            ("gradserve.optim", _all),
            ("gradserve.optim.flower", _all),
            ("gradserve.reductions", _all),
            ("gradserve.codecs", _all),
        ),
    ),
    _Page("batch_norm", "Batch normalization layer", "`import gradserve`", (("gradserve", _from(*_LAYERS)),)),
    _Page("raw_ops", "Raw ops", "`client.raw_ops`", (("gradserve", _from(*_OPS)),)),
    _Page(
        "results",
        "Arguments and results",
        "`import gradserve`",
        (("gradserve", lambda found: not found.source.startswith(_ELSEWHERE)),),
    ),
    _Page(
        "errors",
        "Errors",
        f"```text\n{read_docstring('gradserve.errors').partition(chr(10) * 2)[2]}\n```",
        (("gradserve", _from(*_ERRORS)),),
    ),
    _Page("aio", "gradserve.aio", "`import gradserve.aio`", (("gradserve.aio", _all),)),
    _Page(
        "torch",
        "gradserve.torch",
        "`import gradserve.torch`; needs PyTorch. [How to use it](../pytorch.md).",
        (("gradserve.torch", _all), ("gradserve.torch.functions", _all)),
    ),
    _Page(
        "jax",
        "gradserve.jax",
        "`import gradserve.jax`; needs JAX and Optax. [How to use it](../jax.md).",
        (("gradserve.jax", _all), ("gradserve.jax.functions", _all)),
    ),
    _Page(
        "training",
        "gradserve.training",
        "`import gradserve.training`. [How to use it](../elastic.md).",
        (("gradserve.training", _all),),
    ),
    _Page(
        "data",
        "gradserve.data",
        "`import gradserve.data`. [How to use it](../howto/data.md).",
        (("gradserve.data", _all),),
    ),
    _Page(
        "testing",
        "gradserve.testing",
        "`import gradserve.testing`; needs the `server` extra. [How to use it](../testing.md).",
        (("gradserve.testing", _all),),
    ),
)


def write_python_reference(folder: Path) -> None:
    """Writes python.md, which lists all names, and the pages with what they are."""
    modules = read_modules(module for page in _PAGES for module, _belongs in page.contents)
    shown = {
        page: [found for module, belongs in page.contents for found in modules[module] if belongs(found)]
        for page in _PAGES
    }
    places = {
        each.anchor: f"{page.file}#{each.anchor}" for page in _PAGES for top in shown[page] for each in top.everything()
    }
    blocking = {each.anchor: each for top in modules["gradserve"] for each in top.everything()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "python.md").write_text(_overview(shown))
    for page, contents in shown.items():
        text = [f"# {page.title}", page.introduction]
        for found in contents:
            text += _shown(found, places, blocking)
        (folder / page.file).write_text("\n\n".join(text) + "\n")


def _overview(shown: dict[_Page, list[Documented]]) -> str:
    lines = [_INTRODUCTION]
    for page, contents in shown.items():
        lines += [f"\n## [{page.title}]({page.file})\n", "| name | what it is |", "|---|---|"]
        lines += [
            f"| [`{found.name}`]({page.file}#{found.anchor}) | {as_markdown(found.summary, _nowhere)} |"
            for found in contents
        ]
    return "\n".join(lines) + "\n"


def _nowhere(_name: str) -> None:
    return None


def _shown(found: Documented, places: dict[str, str], blocking: dict[str, Documented]) -> Iterator[str]:
    link = _links(found, places)
    yield f"## `{found.name}` {{#{found.anchor}}}"
    if found.signature:
        yield _code(found.signature)
    yield as_markdown(found.docstring, link)
    values = [member for member in found.members if member.kind == "value"]
    if values:
        yield "\n".join(f'* <a id="{each.anchor}"></a>`{each.short_name}`: {each.summary}' for each in values)
    for member in found.members:
        if member.kind == "value":
            continue
        yield f"### `{member.short_name}` {{#{member.anchor}}}"
        if member.signature:
            yield _code(member.signature)
        same = blocking.get(f"gradserve.{member.name}")
        if same is not None and same is not member and same.docstring == member.docstring:
            blocking_one = f"[`{same.name}`]({places[same.anchor]})"
            yield f"{as_markdown(member.summary, link)} As the blocking {blocking_one}, which says more."
        else:
            yield as_markdown(member.docstring, link)


def _code(signature: str) -> str:
    return f"```python\n{signature}\n```"


def _links(found: Documented, places: dict[str, str]) -> Link:
    """Returns what finds names as a docstring writes them: as seen in its class, its module or the package."""
    seen_from: Sequence[str] = (f"{found.anchor}.", f"{found.module}.", "gradserve.", "")

    def link(name: str) -> str | None:
        return next((places[each] for each in _candidates(name, seen_from) if each in places), None)

    return link


def _candidates(name: str, seen_from: Iterable[str]) -> Iterator[str]:
    for prefix in seen_from:
        yield f"{prefix}{name}"
