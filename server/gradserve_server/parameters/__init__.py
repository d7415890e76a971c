"""Parameters that the server holds: their rules, rounds, optimizers and versions."""
