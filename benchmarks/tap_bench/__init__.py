"""Parts of `benchmarks/tap_gpu.py`: start at `driver.py`.

The driver starts engines (`engine.py`, one process each, all at once on the same cards), lets one work at a
time, and evaluates. `load.py` makes the load inside an engine's process, `captures.py` opts requests in,
`consumer.py` takes the slices away, `worker.py` times steps inside vLLM's workers.
"""
