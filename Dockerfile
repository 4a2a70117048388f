# A stock Triton server with Trident and its default models:
#
#   docker build -t trident .
#   docker run --rm --shm-size=1g -p 8000:8000 -p 8001:8001 -p 8002:8002 trident
#
# A test does all that is done here outside of a container.
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:25.09-py3
FROM ${TRITON_IMAGE}

ENV TRIDENT_HOME=/opt/trident/home \
    NUMBA_CACHE_DIR=/opt/trident/kernels \
    GOMP_SPINCOUNT=1000 \
    SERVER_USER=1000:1000

COPY LICENSE README.md pyproject.toml /opt/trident/source/
COPY backend /opt/trident/source/backend/
COPY kernels /opt/trident/source/kernels/
COPY client /opt/trident/source/client/
COPY deploy /opt/trident/source/deploy/
COPY model_repository /opt/trident/source/model_repository/
COPY model_repository /models/
RUN ["/opt/trident/source/deploy/install.sh"]

USER 1000:1000
EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=60s \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://localhost:8000/v2/health/ready', timeout=5)"]
CMD ["tritonserver", "--model-repository=/models"]
