"""`gradserve.optim`: values, messages, and translations of other libraries' optimizers."""
