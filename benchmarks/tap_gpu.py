"""The tap on GPU engines: are captured states right inside CUDA graphs, and what does the tap cost?

    python3 benchmarks/tap_gpu.py                        # Llama-8B shape, dummy weights, V1 and V2 runner
    python3 benchmarks/tap_gpu.py --tiny                 # the same on a CPU engine, tiny shape: a dry run
    python3 benchmarks/tap_gpu.py --shape kimi-k2.5 --tp 8 --runners V1

Untapped, tapped and a second untapped engine (and vLLM's own `extract_hidden_states`, the peer) are up
together, one at work at a time, in rounds of the orders A B C B A and C B A B C; what is claimed is the
median over rounds of B beside the mean of A and C with its 95 % bootstrap interval, beside the A/A of C / A.
Sections:

    check     greedy tokens from captured states, among requests that did not opt in
    bitwise   logprobs of identical fixed batches, compared bit by bit
    decode    inter-token latency, tap idle
    prefill   prompt tokens/s, tap idle
    captured  prompt tokens/s, every request captured, until the last slice is sealed
    peer      decode and prefill of the peer
    mixed     engine steps and streams' gaps while prompts beside them are captured or not
    steady    prompt tokens/s over a longer time, a consumer process taking the slices away
    traffic   chats replayed untapped, tapped with captures beside them, untapped again: what fails or differs
    rates     the tap's device-to-host rate, the slice writers' rate
    link      the link's own pinned device-to-host rate
    sleep     captures before and after the engine slept
    kv        KV-cache tokens when vLLM sizes the cache itself

Prints a JSON line a result as it comes, and tables at the end. What does not fit `--budget-s` is named. The
tap runs as in production: through the worker extension class, signed opt-ins and sealed slices. Needs nothing
but vLLM's environment and this repository's `client/src` and `services/extractor/tap/src` on PYTHONPATH.
"""

from __future__ import annotations

from tap_bench.driver import main

if __name__ == "__main__":
    raise SystemExit(main(__doc__))
