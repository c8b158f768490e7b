# vLLM with the tap: `docker build -f docker/engine.Dockerfile -t taphouse/engine .` from the repository's root.
# The base is the CUDA version that the tap was run on; the tap keeps capture off on versions it was never run on.
FROM vllm/vllm-openai:v0.22.1

COPY client /src/client
COPY services/extractor/tap /src/tap
# --no-deps: vLLM's environment carries all that the tap needs, and nothing in it may change.
RUN uv pip install --system --no-deps --no-cache /src/client /src/tap && rm -rf /src

# The uid of the workers: slices are readable by their owner alone.
RUN useradd --uid 10001 --create-home taphouse && install -d -o 10001 -g 10001 -m 0700 /slices
ENV HOME=/home/taphouse \
    HF_HOME=/models/huggingface \
    TAPHOUSE_TAP_SLICE_DIR=/slices
USER 10001
WORKDIR /home/taphouse
EXPOSE 8000

# Kimi-K2.5 takes half an hour to load.
HEALTHCHECK --interval=15s --timeout=5s --start-period=45m \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

# This engine has no endpoint plugins yet: the tap's routes come as a middleware. Layers and the tap's version go
# into --additional-config (`python -m taphouse_tap launch-args`), where they are part of the compile-cache key.
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server", \
    "--worker-extension-cls", "taphouse_tap.worker.HiddenStatesExtension", \
    "--scheduler-cls", "taphouse_tap.scheduler.two_class_scheduler", \
    "--middleware", "taphouse_tap.middleware.HiddenStatesMiddleware"]
