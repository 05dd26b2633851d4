"""Seeing what goes on: trace context."""
