{{/* All teachers with their defaults, as JSON. */}}
{{- define "teachers" -}}
{{- $teachers := list -}}
{{- $names := list -}}
{{- range .Values.teachers -}}
{{- if has .name $names }}{{ fail (printf "teachers: two are named %q" .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- $teachers = append $teachers (mustMergeOverwrite (deepCopy $.Values.defaults) .) -}}
{{- end -}}
{{- mustToJson $teachers -}}
{{- end -}}

{{- define "selector" -}}
app.kubernetes.io/name: mopd-teacher
app.kubernetes.io/instance: {{ .release.Name }}
teacher: {{ .teacher.name }}
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
