"""Gradient ops: one folder for each family, with its checks, its reference and its kernels.

A family has `spec` (inputs, attributes, outputs, every check, and the declarations of its ops), `reference` (the
mathematics, written to be read; the tests compare with it, and have that of RNNs), and the kernels of each device
(`cpu`, `cuda`). The dataclasses of a declaration have the names of the fields of request and response, so
`rpc.gradient_ops` can read and write any op. `runner` opens the inputs, runs a checked call on the device and reserves
memory for its outputs and its scratch space; `registry` says what computes which family on which device. A new op needs
a folder, its messages, and its lines in `registry`.

Kernels are declared as data: for which dtypes, from which function, with which arguments. On the host,
`devices.host.kernels` compiles, prepares and runs them. On a GPU, `devices.cuda.programs` compiles each kernel of
a program by itself when a call needs it; a thread beside the calls compiles the others, the most usual dtypes first.

An op may run for minutes, so it runs in a pool of threads that sums do not wait for, and whatever computes looks at
checkpoints whether the call was cancelled. A cancelled call is over once its thread has released its inputs.
"""
