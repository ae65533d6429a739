# Teacher on NVIDIA GPUs: the vLLM image with its torch and CUDA, plus mopd.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM python:3.11.13-slim-bookworm AS wheel
WORKDIR /source
RUN pip install --no-cache-dir build==1.6.1
COPY pyproject.toml README.md LICENSE ./
COPY mopd mopd
COPY protocol protocol
COPY server server
COPY client client
COPY losses losses
COPY trainer trainer
RUN python -m build --wheel --outdir /wheels

# hadolint ignore=DL3006
FROM ${VLLM_IMAGE}
LABEL org.opencontainers.image.title="mopd-teacher" \
      org.opencontainers.image.description="A teacher of multi-teacher on-policy distillation, with vLLM" \
      org.opencontainers.image.licenses="Apache-2.0"
# server,ray: for a teacher on several nodes; the image of vLLM has no Ray.
ARG EXTRAS=server
USER 0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY --from=wheel /wheels /wheels
# Keep the image's versions: its torch, transformers and vLLM were built for each other.
RUN python3 -m pip freeze --exclude-editable | grep -v ' @ ' > /constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/mopd-*.whl)[${EXTRAS}]" \
    && useradd --uid 10001 --create-home mopd \
    && install --directory --owner=mopd /models
ENV HF_HOME=/models
USER 10001
WORKDIR /home/mopd
EXPOSE 8101
STOPSIGNAL SIGTERM
ENTRYPOINT ["mopd-teacher"]
CMD ["--help"]
