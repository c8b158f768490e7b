# The trainer: `docker build -f docker/trainer.Dockerfile -t taphouse/trainer .` from the repository's root.
FROM python:3.11.9-slim-bookworm

COPY requirements/lock.txt requirements/overrides.txt /src/
COPY client /src/client
COPY services/trainer /src/trainer
# torch as PyPI has it (CUDA); then ours with the pinned versions. The overrides keep torch as it is and leave out
# torchvision, torchaudio and torchcodec, which nothing here needs.
RUN pip install --no-cache-dir torch==2.13.0 uv==0.13.9 \
    && uv pip install --system --no-cache --constraint /src/lock.txt --override /src/overrides.txt \
        /src/client /src/trainer \
    && rm -rf /src

RUN useradd --uid 10001 --create-home taphouse \
    && install -d -o 10001 -g 10001 /store /output
ENV TAPHOUSE_TRAINER_STORE=/store \
    TAPHOUSE_TRAINER_OUTPUT=/output \
    TAPHOUSE_TRAINER_HOST=0.0.0.0
USER 10001
WORKDIR /home/taphouse
EXPOSE 8910

HEALTHCHECK --interval=15s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8910/health', timeout=4)"]

# It resumes from /output by itself, and saves a checkpoint on SIGTERM: give it time to.
STOPSIGNAL SIGTERM
ENTRYPOINT ["taphouse-trainer"]
