{{- define "prfaas.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}

{{- define "prfaas.labels" -}}
app.kubernetes.io/name: prfaas
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "prfaas.selector" -}}
app.kubernetes.io/name: prfaas
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "prfaas.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "prfaas.redisUrl" -}}
{{- if .Values.redis.url -}}
{{ .Values.redis.url }}
{{- else if .Values.redis.enabled -}}
redis://{{ include "prfaas.name" . }}-redis:6379/0
{{- end -}}
{{- end -}}

{{- define "prfaas.gatewayUrl" -}}
{{- if .Values.join.url -}}
{{ .Values.join.url }}
{{- else if .Values.gateway.enabled -}}
{{- /* Not the service of clients: a gateway is not ready, and so not there, before its first nodes have joined. */ -}}
https://{{ include "prfaas.name" . }}-gateways.{{ .Release.Namespace }}.svc:8443
{{- else -}}
{{- fail "join.url: say where the gateway is that these nodes join, as gateway.enabled is false" -}}
{{- end -}}
{{- end -}}

{{- /* A pod that holds nothing it does not need. */ -}}
{{- define "prfaas.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "prfaas.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
