"""Kernels whose work several threads share without Python. Importing this imports Numba, which takes half a second.

A thread that enters a compiled kernel from Python needs the GIL, and one that waits for it sleeps: it begins 50 to 300
microseconds after it was asked. So a shared kernel leaves the address of its code and that of its arguments in a
board, and helpers that `attend` to the board begin within a microsecond.

A board is int64 [1 + jobs, FIELDS]; its first row is for all, each of the others for one job at a time.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.core.targetconfig import ConfigStack
from numba.extending import register_jitable

from gradserve_server.devices.host.board import (
    CALLS,
    CODE,
    FRAME,
    INSIDE,
    MOST_INSIDE,
    SPINNING,
    STATE,
    TICKET,
)
from gradserve_server.devices.host.intrinsics import add_atomically, intrinsic, read_atomically, yield_processor

cgutils: Any = untyped_cgutils
"""Retyped: its functions have no annotations."""

_OPEN = 1
"""The state of a job that threads may enter. A job that ends is closed first: then it is 2, and without a job 0."""

_CLOCK_MONOTONIC = 1
_PAIR = types.UniTuple(types.int64, 2)  # type: ignore[no-untyped-call]


def shared(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a kernel that lets helpers do a part of the work of another one.

    It takes a board and the row of a job on it, or 0 to do all the work itself, before the arguments of `function`.
    """
    # Numba compiles no function with *arguments for given types. The names are those of parameters in our own code.
    names = ", ".join(inspect.signature(function).parameters)
    functions = {"share": _share, "outline": _outline(function)}
    source = f"lambda board, job, {names}: share(board, job, outline(({names},)))"
    kernel: Callable[..., None] = eval(source, functions)  # noqa: S307
    # Numba names compiled code after these, and code from its cache may come from any process.
    kernel.__name__, kernel.__qualname__ = function.__name__, function.__qualname__
    kernel.__module__ = function.__module__
    return kernel


def attend(board: Any, num_calls: Any, allowance: Any, most: Any) -> None:
    """A kernel for helpers, which does the work of jobs until there has been none for a while.

    It also ends when the board's number of calls, which are work for Python, is no longer `num_calls`. Between jobs it
    gives up the processor whenever another thread wants it.

    Args:
        board: The board.
        num_calls: See above.
        allowance: The nanoseconds that it may wait for the first job.
        most: The nanoseconds that it may wait for the next one, but no longer than twice the time of the last one. What
            Python does between two short ones often takes longer than the first of them.
    """
    add_atomically(board, 0, SPINNING, 1)
    last_ticket, since = 0, _now()
    while read_atomically(board, 0, CALLS) == num_calls:
        for job in range(1, len(board)):
            if read_atomically(board, job, STATE) == _OPEN and board[job, TICKET] != last_ticket:
                # Once it is inside, an open job cannot end: the thread that closes it looks at INSIDE afterwards.
                is_wanted = add_atomically(board, job, INSIDE, 1) < board[job, MOST_INSIDE]
                if is_wanted and read_atomically(board, job, STATE) == _OPEN:
                    last_ticket = board[job, TICKET]
                    add_atomically(board, 0, SPINNING, -1)
                    began = _now()
                    _enter(board[job, CODE], board[job, FRAME])
                    since = _now()
                    allowance = min(2 * (since - began), most)
                    add_atomically(board, 0, SPINNING, 1)
                add_atomically(board, job, INSIDE, -1)
        if _now() - since >= allowance:
            break
        yield_processor()
    add_atomically(board, 0, SPINNING, -1)


# The outlined code is no part of this function: LLVM would optimise it here, and once more in the kernel.
@register_jitable
def _share(board: Any, job: Any, outlined: Any) -> None:
    code, frame = outlined
    if job > 0:
        board[job, CODE], board[job, FRAME] = code, frame
        add_atomically(board, job, STATE, 1)
        _enter(code, frame)
        add_atomically(board, job, STATE, 1)
        # The arguments are in this thread's stack, so it must not leave before the helpers.
        while read_atomically(board, job, INSIDE) > 0:
            yield_processor()
        add_atomically(board, job, STATE, -2)
    else:
        _enter(code, frame)


def _outline(function: Callable[..., None]) -> Any:
    """Returns an intrinsic that takes a tuple of arguments, and returns two addresses, for `_enter`."""

    @intrinsic
    def outline(typing_context: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            frame_type = context.get_value_type(arguments)
            frame = cgutils.alloca_once_value(builder, args[0])
            callee = types.void(*arguments)
            # By itself, Numba would leave out fastmath and the error model.
            flags = ConfigStack().top().copy()  # type: ignore[no-untyped-call]
            compiled = context.compile_subroutine(builder, function, callee, flags=flags)
            # The second parameter is where Numba's functions leave exceptions; these functions raise none.
            pointer = ir.IntType(8).as_pointer()
            code_type = ir.FunctionType(ir.IntType(32), [pointer, pointer])
            code = ir.Function(builder.module, code_type, name=f"{compiled.fndesc.mangled_name}.outlined")
            code.linkage = "internal"
            code.attributes.add("noinline")
            body = ir.IRBuilder(code.append_basic_block())
            values = cgutils.unpack_tuple(body, body.load(body.bitcast(code.args[0], frame_type.as_pointer())))
            values = [_not_counted(context, body, *each) for each in zip(arguments, values, strict=True)]
            context.call_internal_no_propagate(body, compiled.fndesc, callee, values)
            body.ret(ir.Constant(ir.IntType(32), 0))
            addresses = [builder.ptrtoint(each, ir.IntType(64)) for each in (code, frame)]
            return context.make_tuple(builder, signature.return_type, addresses)

        return _PAIR(arguments), generate

    return outline


def _not_counted(context: Any, builder: Any, argument: Any, value: Any) -> Any:
    """Returns an array without its count of references, which all threads would change again and again.

    The caller holds the arrays for as long as anyone works on them.
    """
    if not isinstance(argument, types.Array):
        return value
    array = context.make_array(argument)(context, builder, value)
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    return array._getvalue()


@intrinsic
def _enter(typing_context: Any, code: Any, frame: Any) -> Any:
    """Calls the code at an address with the arguments at another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.IntType(32), [pointer, pointer]).as_pointer()
        nothing = ir.Constant(pointer, None)
        builder.call(builder.inttoptr(args[0], function), [builder.inttoptr(args[1], pointer), nothing])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@register_jitable
def _now() -> Any:
    """The monotonic time in nanoseconds."""
    seconds, nanoseconds = _time(_CLOCK_MONOTONIC)
    return seconds * 1_000_000_000 + nanoseconds


@intrinsic
def _time(typing_context: Any, clock: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        long = ir.IntType(64)
        time = cgutils.alloca_once(builder, ir.ArrayType(long, 2))
        function = ir.FunctionType(ir.IntType(32), [ir.IntType(32), time.type])
        clock_gettime = cgutils.get_or_insert_function(builder.module, function, "clock_gettime")
        builder.call(clock_gettime, [builder.trunc(args[0], ir.IntType(32)), time])
        parts = [builder.load(cgutils.gep_inbounds(builder, time, 0, index)) for index in range(2)]
        return context.make_tuple(builder, signature.return_type, parts)

    return _PAIR(types.int64), generate
