{{/* Pod template of a teacher, or of a `worker` that lends it accelerators. */}}
{{- define "pod" -}}
{{- with .teacher -}}
metadata:
  labels: {{- include "labels" $ | nindent 4 }}
  {{- if not (or $.worker $.values.podMonitor.enabled) }}
  annotations:
    prometheus.io/scrape: "true"
    prometheus.io/port: "8101"
    prometheus.io/scheme: {{ ternary "https" "http" (not (empty .tlsSecret)) }}
  {{- end }}
spec:
  terminationGracePeriodSeconds: 40   # --drain-timeout is 25 s
  securityContext: {runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001}
  containers:
    - name: teacher
      image: {{ .image | quote }}
      imagePullPolicy: {{ .imagePullPolicy }}
      {{- if $.worker }}
      command: [sh, -c]
      args:
        - |
          until ray health-check --address="$LWS_LEADER_ADDRESS:6379"; do sleep 2; done
          exec ray start --address="$LWS_LEADER_ADDRESS:6379" --block
      {{- else }}
      {{- if gt (int .nodes) 1 }}
      # vLLM starts its workers in this Ray cluster, as soon as all nodes have joined it.
      command: [sh, -c, 'ray start --head --port=6379 && exec mopd-teacher "$@"', mopd-teacher]
      {{- end }}
      args:
        - serve
        - {{ .model | quote }}
        - --name={{ .name }}
        - --engine={{ .engine }}
        - --host=0.0.0.0
        - --port=8101
        - --log-format=json
        - --liveness-timeout={{ .livenessSeconds }}
        {{- if gt (int .nodes) 1 }}
        - --vllm-arg=distributed_executor_backend=ray
        - --pipeline-parallel-size={{ .nodes }}
        {{- end }}
        {{- if .apiKeySecret }}
        - --api-key-file=/run/secrets/mopd/api_keys
        {{- end }}
        {{- if .tlsSecret }}
        - --tls-certificate=/run/secrets/tls/tls.crt
        - --tls-key=/run/secrets/tls/tls.key
        {{- end }}
        {{- with .arguments }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      env:
        - {name: HF_HOME, value: /models}
        {{- if gt (int .nodes) 1 }}
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        {{- end }}
        {{- with .environment }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not $.worker }}
      ports:
        - {name: http, containerPort: 8101}
      # /healthz returns 200 also while the model loads, so that loading is not limited in time.
      startupProbe:
        {{- include "probe" (merge (dict "path" "/healthz") $) | nindent 8 }}
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        {{- include "probe" (merge (dict "path" "/healthz") $) | nindent 8 }}
        periodSeconds: 10
        failureThreshold: 6
      readinessProbe:
        {{- include "probe" (merge (dict "path" "/readyz") $) | nindent 8 }}
        periodSeconds: 5
      {{- end }}
      resources: {{- toYaml .resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: models, mountPath: /models}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if and .apiKeySecret (not $.worker) }}
        - {name: api-keys, mountPath: /run/secrets/mopd, readOnly: true}
        {{- end }}
        {{- if and .tlsSecret (not $.worker) }}
        - {name: tls, mountPath: /run/secrets/tls, readOnly: true}
        {{- end }}
  volumes:
    - name: models
      persistentVolumeClaim: {claimName: {{ $.values.models.existingClaim | default "mopd-models" }}}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory }}}
    {{- if and .apiKeySecret (not $.worker) }}
    - name: api-keys
      secret: {secretName: {{ .apiKeySecret }}}
    {{- end }}
    {{- if and .tlsSecret (not $.worker) }}
    - name: tls
      secret: {secretName: {{ .tlsSecret }}}
    {{- end }}
  {{- with $.values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
