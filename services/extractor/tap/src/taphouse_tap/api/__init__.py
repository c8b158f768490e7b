"""Inside vLLM's API server: the routes for hidden states. Start at `assemble.py` and `endpoint.py`."""
