"""A process that shares an array and an event: it writes their handles, and does what its standard input says."""

import sys

import cupy

runtime = cupy.cuda.runtime


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    runtime.setDevice(0)
    stream = cupy.cuda.Stream(non_blocking=True)
    filled = cupy.cuda.Event(disable_timing=True, interprocess=True)
    with stream:
        array = cupy.empty(1000, cupy.float32)
        array.fill(0)
        stream.synchronize()
        own = runtime.malloc(4096)
        handles = [runtime.ipcGetMemHandle(each) for each in (array.data.ptr, own)]
        say(" ".join(handle.hex() for handle in [*handles, runtime.ipcGetEventHandle(filled.ptr)]))
        for line in sys.stdin:
            word = line.strip()
            if word == "fill":
                array.fill(7)
                filled.record(stream)
            elif word == "free":
                runtime.free(own)
            say(word)


if __name__ == "__main__":
    main()
