"""Parts of `benchmarks/isolation_cpu.py` and `isolation_gpu.py`: start at `driver.py`.

`trace.py` says when production asks for what, `client.py` asks and times the answers, `extraction.py` keeps
captures in flight from a process of its own, `modes.py` names what protects production from them, `passes.py`
runs one mode once over the trace. `figures.py` turns passes into numbers, `report.py` and `picture.py` show
them.
"""
