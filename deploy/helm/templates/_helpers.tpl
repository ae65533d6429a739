{{/* All teachers with their defaults, as JSON. */}}
{{- define "teachers" -}}
{{- $teachers := list -}}
{{- $names := list -}}
{{- range .Values.teachers -}}
{{- $service := printf "%s-replicas" .name -}}
{{- if or (has .name $names) (has $service $names) -}}
{{- fail (printf "teachers: two are named %q, or one %q, which is the name of a Service" .name $service) -}}
{{- end -}}
{{- $names = concat $names (list .name $service) -}}
{{- $teacher := mustMergeOverwrite (deepCopy $.Values.defaults) . -}}
{{- if and (gt (int $teacher.nodes) 1) (ne $teacher.engine "vllm") -}}
{{- fail (printf "teachers: %q has several nodes, which needs engine vllm (found %q)" .name $teacher.engine) -}}
{{- end -}}
{{- $teachers = append $teachers $teacher -}}
{{- end -}}
{{- mustToJson $teachers -}}
{{- end -}}

{{/* All pods of a teacher. */}}
{{- define "members" -}}
app.kubernetes.io/instance: {{ .release.Name }}
teacher: {{ .teacher.name }}
{{- end -}}

{{/* Those that respond to requests. */}}
{{- define "selector" -}}
app.kubernetes.io/name: mopd-teacher{{ if .worker }}-worker{{ end }}
{{ include "members" . }}
{{- end -}}

{{- define "labels" -}}
{{ include "selector" . }}
app.kubernetes.io/managed-by: {{ .release.Service }}
helm.sh/chart: {{ .chart.Name }}-{{ .chart.Version }}
{{- end -}}

{{- define "probe" -}}
httpGet: {path: {{ .path }}, port: http{{ if .teacher.tlsSecret }}, scheme: HTTPS{{ end }}}
timeoutSeconds: 5
{{- end -}}
