"""Executors of kind `api`: requests to declared endpoints."""
