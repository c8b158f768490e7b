"""Inside a vLLM worker: the tap, and the way of captured rows to sealed slices. Start at `tap.py`."""
