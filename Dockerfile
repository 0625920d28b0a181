# Phalanx and the examples, for pods: docs/kubernetes.md. Your own image begins with this one and adds your task:
#   FROM registry.example.org/phalanx:0.1.0
#   COPY mine.py .
FROM python:3.12-slim

# For torch without CUDA: --build-arg INDEX=https://download.pytorch.org/whl/cpu
ARG INDEX=https://pypi.org/simple
# Of pyproject.toml, e.g. --build-arg EXTRAS=[s3,hf]
ARG EXTRAS=[s3]

WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url ${INDEX} ".${EXTRAS}"

# Files of a volume belong to this user, as pods of docs/kubernetes.md do with group=1000.
RUN useradd --uid 1000 --create-home phalanx
USER phalanx
WORKDIR /workspace
COPY examples examples

ENTRYPOINT ["python", "-m", "phalanx"]
