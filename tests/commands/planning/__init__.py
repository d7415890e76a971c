"""Forecasts of training runs."""
