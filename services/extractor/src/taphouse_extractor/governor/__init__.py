"""The governor: how much extraction production can bear right now, from production's own latency alone.

`loop.py` asks each engine for its status and sets its quota; `law.py` decides; `baseline.py` and
`histograms.py` hold what production's latency is without extraction; `report.py` reads an engine's status;
`memory.py` is what Redis keeps, so that the next leader goes on where the last one was, `orders.py` what the
store keeps of the operator.
"""
