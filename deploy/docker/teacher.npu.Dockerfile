# Teacher on Ascend NPUs: the vLLM Ascend image with its CANN and torch_npu, plus mopd.
ARG VLLM_ASCEND_IMAGE=quay.io/ascend/vllm-ascend:v0.23.0

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
FROM ${VLLM_ASCEND_IMAGE}
LABEL org.opencontainers.image.title="mopd-teacher" \
      org.opencontainers.image.description="A teacher of multi-teacher on-policy distillation, on Ascend NPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 0
COPY --from=wheel /wheels /wheels
# The `service` extra has no torch and no transformers: torch_npu needs the image's own versions.
RUN python3 -m pip install --no-cache-dir "$(echo /wheels/mopd-*.whl)[service]" \
    && useradd --uid 10001 --create-home mopd \
    && install --directory --owner=mopd /models
ENV HF_HOME=/models
USER 10001
WORKDIR /home/mopd
EXPOSE 8101
STOPSIGNAL SIGTERM
ENTRYPOINT ["mopd-teacher"]
CMD ["--help"]
