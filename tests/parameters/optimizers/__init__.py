"""Optimizers of parameters: settings, equations, and the step of a round."""
