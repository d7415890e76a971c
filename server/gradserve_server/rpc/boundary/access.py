"""Admits calls according to the policy of the server."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from gradserve_server.observe.call_record import current_call
from gradserve_server.resources.registry import DEFAULT_CONTAINER
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.boundary.chain import Handle
from gradserve_server.rpc.boundary.fair_calls import FairCalls
from gradserve_server.rpc.boundary.malformed import MalformedMessage
from gradserve_server.security.access import Access, no_rule
from gradserve_server.security.rules import RULES


class AccessChecks:
    """Passes on calls whose callers have the role that the method needs, with their identities."""

    def __init__(self, access: Access, calls: FairCalls) -> None:
        """Takes the policy, and what counts the calls of each identity."""
        self._access = access
        self._calls = calls

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that passes on the calls that are allowed."""
        name = method.full_name
        rule = RULES.get(name)
        if rule is None:
            return _refused(name)
        if rule.role is None:
            return handle
        container_of, access, calls = _container_of(rule.containers), self._access, self._calls

        async def admitted(request: Any, call: Call) -> Any:
            container = container_of(request)
            found = access.admit(call.credentials(), name, rule, container)
            record = current_call()
            if record is not None:
                record.identity = found.identity.name
            known = replace(call, identity=found.identity, may_only_open=found.may_only_open)
            with calls.call_of(found.identity):
                return await handle(request, known)

        return admitted


def _refused(name: str) -> Handle:
    def refused(_request: Any, _call: Call) -> Any:
        raise no_rule(name)

    return refused


def _container_of(paths: Sequence[str]) -> Callable[[Any], str | None]:
    """Returns a function that finds the container in a request: None if it names none, or is malformed."""
    if not paths:
        return lambda _request: None
    places = [tuple(path.rpartition(".")[::2]) for path in paths]

    def find(request: Any) -> str | None:
        if isinstance(request, MalformedMessage):
            return None  # refused further inside
        message, field = next((each for each in places if each[0] and request.HasField(each[0])), places[0])
        found: str = getattr(getattr(request, message) if message else request, field)
        return found or DEFAULT_CONTAINER

    return find
