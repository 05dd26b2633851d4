"""Test doubles of vLLM and SGLang servers, as far as sleeping, waking and scoring go, with the faults that users met.

`python -m tests.gpu.doubles vllm|sglang [FLAG ...]` prints its port. Beside the real routes, GET /_free is its device's free
memory in bytes; POST /_fault?name=NAME switches a fault on until POST /_fault?name=.
"""
