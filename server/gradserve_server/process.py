"""Actions on the whole process of a command, rather than on the server in it."""

import contextlib
import logging
import os
import resource
import sys
import threading

_SWITCH_SECONDS = 0.0005


def end_process() -> None:
    """Ends this process with status 0 after its event loop has ended, without waiting for threads.

    A kernel that is being compiled cannot be interrupted, and takes many seconds on a busy machine. The interpreter
    would wait for its thread; or, with a daemon thread, run LLVM's destructors while it compiles. Everything that must
    outlive the process is done: streams have ended, files are removed, and the log is flushed here. Without such a
    thread this function returns, and the process ends as usual.
    """
    if all(thread.daemon for thread in threading.enumerate() if thread is not threading.current_thread()):
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def allow_many_descriptors() -> None:
    """Raises the limit of open descriptors as far as it may be: each connection and each shared region takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def silence_grpc() -> None:
    """Keeps gRPC from writing to the terminal besides the log, unless GRPC_VERBOSITY asks for it.

    Call it before gRPC is imported, which then reads the variable.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def switch_threads_often() -> None:
    """Lets the event loop go on soon while other threads run Python.

    A thread keeps the interpreter for 5 ms unless this is called, and a small call needs it several times: while a
    request of very many parts was read in a thread, health checks took 10 ms instead of 2.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
