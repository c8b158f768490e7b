# The extractor's API and workers: `docker build -f docker/extractor.Dockerfile -t taphouse/extractor .` from the root.
FROM python:3.11.9-slim-bookworm

COPY requirements/lock.txt /src/lock.txt
COPY client /src/client
COPY services/extractor/pyproject.toml /src/extractor/pyproject.toml
COPY services/extractor/src /src/extractor/src
RUN pip install --no-cache-dir --constraint /src/lock.txt '/src/client[cli]' /src/extractor && rm -rf /src

# The uid of the engine, whose slices the workers read and remove.
RUN useradd --uid 10001 --create-home taphouse \
    && install -d -o 10001 -g 10001 -m 0700 /slices \
    && install -d -o 10001 -g 10001 /store
ENV TAPHOUSE_EXTRACTOR_STORE=/store \
    TAPHOUSE_EXTRACTOR_SLICE_DIR=/slices
USER 10001
WORKDIR /home/taphouse
EXPOSE 8900

# Of the API. A worker listens on nothing: GET /v1/queue says which workers were heard of.
HEALTHCHECK --interval=15s --timeout=5s --start-period=20s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8900/health', timeout=4)"]

ENTRYPOINT ["taphouse-extractor"]
CMD ["api"]
