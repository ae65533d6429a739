# Teacher without an accelerator: transformers with the CPU build of torch.
FROM python:3.11.13-slim-bookworm AS wheel
WORKDIR /source
RUN pip install --no-cache-dir build==1.6.1 uv==0.13.9
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY mopd mopd
COPY protocol protocol
COPY server server
COPY client client
COPY losses losses
COPY trainer trainer
RUN python -m build --wheel --outdir /wheels \
    && uv export --quiet --frozen --no-emit-project --prune torch \
        --extra server --output-file /wheels/requirements.txt

FROM python:3.11.13-slim-bookworm AS packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=wheel /wheels /wheels
# torch comes from TORCH_INDEX; everything else has the version and the hash of uv.lock.
RUN python -m venv /opt/mopd \
    && /opt/mopd/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 \
    && /opt/mopd/bin/pip install --no-cache-dir --no-deps --require-hashes \
        --requirement /wheels/requirements.txt \
    && /opt/mopd/bin/pip install --no-cache-dir --no-deps /wheels/mopd-*.whl

FROM python:3.11.13-slim-bookworm
LABEL org.opencontainers.image.title="mopd-teacher" \
      org.opencontainers.image.description="A teacher of multi-teacher on-policy distillation, on a CPU" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --create-home mopd && install --directory --owner=mopd /models
COPY --from=packages /opt/mopd /opt/mopd
ENV PATH=/opt/mopd/bin:$PATH HF_HOME=/models
USER 10001
WORKDIR /home/mopd
EXPOSE 8101
STOPSIGNAL SIGTERM
ENTRYPOINT ["mopd-teacher"]
CMD ["--help"]
