"""The host: buffers, threads, and compiled kernels for its processor.

Kernels are Numba's, with a tool chain of our own. `python -m benchmarks.kernels` measures what each part gains over
plain `njit(parallel=True)`; `benchmarks/kernels/results.json` has all figures. A part stays if kernels that use it take
1.3 times as long without it, at least. On two cores that other processes used as well, they took

* without `load` and `store` of `intrinsics`, which say that arrays do not overlap and convert 16-bit floats: 1.4 to 2.7
  times as long with float32 and 2.4 to 5.6 times with bfloat16. Sums of float32 gain nothing: memory limits them.
* without `lanes`, vectors with a fixed order of additions: 1.8 to 3.1 times as long, where blocks are summed along a
  row. Plain loops that LLVM may reorder would be fast, too, but their bits would depend on the processor.
* without the functions of `activations`: 38 times as long for tanh, because Numba calls the C library for each element.
* without `sharing` and `kernels.ForkJoin`: half as long at best, and often several times as long. OpenMP's threads
  spin for milliseconds after each loop, so they begin sooner than helpers that sleep; but they cut a loop into equal
  parts and wait for all of them, so it takes 5 to 20 ms when another process has one of the cores. With ForkJoin
  nobody waits for a part that has not begun, so a call takes about as long as on one thread in that case. Each calling
  thread also has OpenMP threads of its own, and processes that are forked afterwards must not use them.

`jit` is no matter of speed: it finds symbols that the process does not have before LLVM ends the process, and its cache
notices changes in all files that a kernel consists of.
"""
