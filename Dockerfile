# Trident in the stock Triton server image:
#
#   docker build -t trident .
#   docker run --rm --shm-size=1g -p 8000:8000 -p 8001:8001 -p 8002:8002 trident
#
# Another model: mount its folder and name it in /models/llm/1/model.json, or mount a repository of
# your own over /models. Every command below is also run by a test, outside of a container.
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:25.09-py3
FROM ${TRITON_IMAGE}

WORKDIR /opt/trident
COPY pyproject.toml README.md LICENSE ./
COPY backend backend
COPY kernels kernels
COPY client client
COPY model_repository model_repository
RUN sh backend/deploy/install.sh
RUN cp -r model_repository /models

EXPOSE 8000 8001 8002
CMD ["tritonserver", "--model-repository=/models"]
