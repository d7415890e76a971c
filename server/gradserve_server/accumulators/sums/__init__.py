"""The sum of a round: its arithmetic in arrival or worker order, dense and sparse."""
