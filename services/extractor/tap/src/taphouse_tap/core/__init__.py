"""The half of the tap that runs in vLLM's engine core: decides what extraction gets of every step."""
