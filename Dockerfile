# docker build -t patchproof . && docker run --rm -v "$PWD:/work" patchproof certify --limit 20
FROM python:3.13-slim
RUN --mount=type=bind,target=/src,rw pip install --no-cache-dir /src
WORKDIR /work
ENTRYPOINT ["patchproof"]
