"""One worker with NumPy of a training run whose parameters the server holds; the others may be in any language."""

import numpy as np
from messages import make_messages, options, report, rules, zeros

import gradserve

told = options("numpy")
counts, is_unwanted = make_messages(told.worker, told.words)
with gradserve.connect(told.address, timeout=60) as client:
    parameters = client.parameters(zeros(told.words), shared_name=told.run, **rules(told.required))
    version = parameters.read()
    print(f"{told.worker}: begins at step {version.step}", flush=True)
    num_counted = 0
    while version.step < told.steps:
        error = 1 / (1 + np.exp(-(counts @ version["weights"] + version["bias"]))) - is_unwanted
        gradient = {"weights": counts.T @ error / len(error), "bias": error.mean()}
        pushed = parameters.push_pull(gradient, version, worker_id=told.worker)
        num_counted += pushed.outcome is not gradserve.STALE
        version = pushed.version
report(told, version, num_counted)
