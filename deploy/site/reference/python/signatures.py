"""Signatures as they are printed: in one line if that is short enough, else with one parameter per line."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from griffe import Alias, Attribute, Function, ParameterKind

_WIDTH = 88
_STARRED = {ParameterKind.var_positional: "*", ParameterKind.var_keyword: "**"}


def of_callable(name: str, method: Callable[..., Any]) -> str:
    """Returns the signature of a function of the running program, without `self`."""
    signature = inspect.signature(method)
    parameters: list[str] = []
    kinds: list[inspect._ParameterKind] = []
    for each in signature.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not {each.KEYWORD_ONLY, each.VAR_POSITIONAL} & set(kinds):
            parameters.append("*")
        parameters.append(_parameter(each))
        kinds.append(each.kind)
        if each.kind is each.POSITIONAL_ONLY:
            parameters.append("/")
    while parameters.count("/") > 1:
        parameters.remove("/")
    called = f"{'await ' * inspect.iscoroutinefunction(method)}{name}"
    return laid_out(called, parameters, _shown(signature.return_annotation))


def of_declaration(name: str, function: Function) -> str:
    """Returns the signature of a function that was only read, without `self`."""
    parameters: list[str] = []
    starred = False
    for each in function.parameters:
        if each.name in ("self", "cls") and not parameters:
            continue
        if each.kind is ParameterKind.keyword_only and not starred:
            parameters.append("*")
            starred = True
        star = _STARRED.get(each.kind, "") if each.kind is not None else ""
        starred = starred or star == "*"
        annotation = f": {each.annotation}" if each.annotation is not None else ""
        equals = " = " if annotation else "="
        default = f"{equals}{_value(str(each.default), function)}" if each.default is not None and not star else ""
        parameters.append(f"{star}{each.name}{annotation}{default}")
    return laid_out(name, parameters, str(function.returns or ""))


def laid_out(name: str, parameters: Iterable[str], returned: str) -> str:
    """Returns a signature in one line, or in several."""
    parameters = list(parameters)
    result = f" -> {returned}" if returned and returned != "None" else ""
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) <= _WIDTH:
        return line
    inner = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{name}(\n{inner}){result}"


def _parameter(parameter: inspect.Parameter) -> str:
    star = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
    annotation = _shown(parameter.annotation)
    named = f"{star}{parameter.name}: {annotation}" if annotation else f"{star}{parameter.name}"
    if parameter.default is parameter.empty:
        return named
    return f"{named}{' = ' if annotation else '='}{parameter.default!r}"


def _value(default: str, function: Function) -> str:
    """Returns the value of a default that is a constant of the function's module, otherwise the default itself."""
    constant = function.module.members.get(default)
    if isinstance(constant, Alias):
        constant = constant.final_target
    return str(constant.value) if isinstance(constant, Attribute) and constant.value is not None else default


def _shown(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = str(annotation) if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace("gradserve.", "").replace("'", "")
