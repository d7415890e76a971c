"""One worker with PyTorch of a training run whose parameters the server holds; the others may be in any language."""

import torch
from messages import make_messages, options, report, rules

import gradserve
from gradserve.torch import gradients_of, load_version, parameters_of


class Sorter(torch.nn.Module):
    """The logistic regression, with the names that its parameters have in all languages."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(num_words))
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        """Returns the log odds that messages are unwanted."""
        return counts @ self.weights + self.bias


told = options("pytorch")
counts, is_unwanted = map(torch.from_numpy, make_messages(told.worker, told.words))
model = Sorter(told.words)
with gradserve.connect(told.address, timeout=60) as client:
    parameters = client.parameters(parameters_of(model), shared_name=told.run, **rules(told.required))
    version = parameters.read()
    print(f"{told.worker}: begins at step {version.step}", flush=True)
    num_counted = 0
    while version.step < told.steps:
        load_version(model, version)
        model.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(counts), is_unwanted).backward()
        pushed = parameters.push_pull(gradients_of(model), version, worker_id=told.worker)
        num_counted += pushed.outcome is not gradserve.STALE
        version = pushed.version
report(told, version, num_counted)
