"""What concerns the whole process of a command, rather than the server in it."""

import logging
import os
import sys
import threading


def end_process() -> None:
    """Ends this process with status 0, whose event loop has ended, without waiting for threads.

    A kernel that is being compiled cannot be broken off, and takes many seconds on a busy machine. The interpreter
    would wait for that thread; or, were it a daemon, run the destructors of LLVM under it. All that is to outlive the
    process is done: streams have ended, files are removed, and here the log is flushed. Without such a thread it
    returns, and the process ends as others do.
    """
    if all(thread.daemon for thread in threading.enumerate() if thread is not threading.current_thread()):
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def silence_grpc() -> None:
    """Keeps gRPC from writing to the terminal beside the log, unless GRPC_VERBOSITY asks for it.

    To be called before gRPC is imported, which reads the variable then.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
