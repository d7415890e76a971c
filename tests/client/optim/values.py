"""Optimizers and schedules, with the reprs that make them."""

from collections.abc import Mapping

from gradserve import optim

OPTIMIZERS: Mapping[str, optim.Optimizer] = {
    "SGD(lr=0.1)": optim.SGD(0.1),
    "SGD(lr=0.7, momentum=0.9, nesterov=True)": optim.SGD(0.7, momentum=0.9, nesterov=True),
    "SGD(lr=0.0, momentum=0.9, dampening=0.5, weight_decay=0.01)": optim.SGD(0, 0.9, 0.5, 0.01),
    "Adam(lr=0.001)": optim.Adam(),
    "Adam(lr=0.1, betas=(0.8, 0.9), eps=0.001, weight_decay=0.5)": optim.Adam(0.1, [0.8, 0.9], 1e-3, 0.5),  # type: ignore[arg-type]
    "AdamW(lr=0.001)": optim.AdamW(),
    "AdamW(lr=0.001, weight_decay=0.0)": optim.AdamW(weight_decay=0),
    "Adagrad(lr=0.01)": optim.Adagrad(),
    "Adagrad(lr=0.1, lr_decay=0.2, weight_decay=0.3, initial_accumulator_value=0.4, eps=0.5)": optim.Adagrad(
        0.1, 0.2, 0.3, 0.4, 0.5
    ),
    "Yogi(lr=0.01)": optim.Yogi(0.01),
    "Yogi(lr=0.01, betas=(0.5, 0.6), eps=0.1, initial_accumulator_value=0.2)": optim.Yogi(0.01, (0.5, 0.6), 0.1, 0.2),
    "AdagradOptax(lr=0.1)": optim.adagrad_optax(0.1),
    "AdagradOptax(lr=0.1, initial_accumulator_value=0.0, eps=0.001)": optim.adagrad_optax(0.1, 0.0, 1e-3),
    "FedAdam(eta=0.1)": optim.flower.FedAdam(),
    "FedAdam(eta=0.1, beta_1=0.5, beta_2=0.6, tau=0.7)": optim.flower.FedAdam(0.1, 0.5, 0.6, 0.7),
    "FedYogi(eta=0.01)": optim.flower.FedYogi(),
    "FedAdagrad(eta=0.1, tau=0.2)": optim.flower.FedAdagrad(tau=0.2),
    "FedAvgM(server_learning_rate=1.0, server_momentum=0.9)": optim.flower.FedAvgM(server_momentum=0.9),
}

SCHEDULES: Mapping[str, optim.Schedule] = {
    "constant()": optim.constant(),
    "constant(warmup=3)": optim.constant(warmup=3),
    "linear(rounds=10, end=0.0)": optim.linear(10),
    "cosine(rounds=100, end=0.1, warmup=5)": optim.cosine(rounds=100, end=0.1, warmup=5),
}
