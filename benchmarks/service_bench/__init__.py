"""Parts of the service benchmark (`benchmarks/service.py`)."""
