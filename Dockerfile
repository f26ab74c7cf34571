# docker build -t patchproof . && docker run --rm -v "$PWD:/work" patchproof certify --limit 20
FROM python:3.13-slim
COPY . /src
RUN pip install --no-cache-dir /src && rm -r /src
WORKDIR /work
ENTRYPOINT ["patchproof"]
