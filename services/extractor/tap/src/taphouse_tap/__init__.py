"""The tap: runs inside vLLM and hands out hidden states of requests that ask for it."""

__version__ = "0.1.0"
