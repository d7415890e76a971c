"""The names of `gradserve_protocol.v1`, where programs have always found them."""
