{{- define "mainstay.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "mainstay.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "mainstay.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "mainstay.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* Of cluster-wide objects: two releases must not share them. */}}
{{- define "mainstay.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "mainstay.fullname" .) }}
{{- end }}

{{- /* (dict "root" $ "component" "api") */}}
{{- define "mainstay.selector" -}}
app.kubernetes.io/name: {{ include "mainstay.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- /* a dict of labels -> "a=b,c=d" */}}
{{- define "mainstay.asPairs" -}}
{{- $pairs := list }}
{{- range $key, $value := . }}
{{- $pairs = append $pairs (printf "%s=%s" $key $value) }}
{{- end }}
{{- join "," $pairs }}
{{- end }}

{{- /* Of pods: without versions, so that an upgrade replaces those alone in which something else changes. */}}
{{- define "mainstay.podLabels" -}}
{{ include "mainstay.selector" . }}
app.kubernetes.io/part-of: mainstay
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "mainstay.labels" -}}
{{ include "mainstay.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* Metadata of an object: (dict "root" $ "component" "api" "name" "..." "annotations" (dict)) */}}
{{- define "mainstay.metadata" -}}
name: {{ .name }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "mainstay.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "mainstay.clusterMetadata" -}}
name: {{ .name }}
labels:
  {{- include "mainstay.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* (dict "root" $ "image" .Values.api.image) */}}
{{- define "mainstay.image" -}}
{{- $registry := .image.registry | default .root.Values.image.registry }}
{{- $name := ternary .image.repository (printf "%s/%s" $registry .image.repository) (empty $registry) }}
{{- if .image.digest }}
{{- printf "%s@%s" $name .image.digest }}
{{- else }}
{{- printf "%s:%s" $name (.image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{- /* (dict "root" $ "component" "api") -> name of its ServiceAccount */}}
{{- define "mainstay.serviceAccount" -}}
{{- $account := (index .root.Values .component).serviceAccount }}
{{- if $account.create }}
{{- $account.name | default (printf "%s-%s" (include "mainstay.fullname" .root) .component) }}
{{- else }}
{{- required (printf "%s.serviceAccount.name is empty; name one, or set create" .component) $account.name }}
{{- end }}
{{- end }}

{{- define "mainstay.watched" -}}
{{- toJson (.Values.watchNamespaces | default (list .Release.Namespace) | uniq) }}
{{- end }}

{{- define "mainstay.apiUrl" -}}
{{- printf "http://%s-api.%s.svc:%v" (include "mainstay.fullname" .) .Release.Namespace .Values.api.service.port }}
{{- end }}

{{- define "mainstay.redisSecret" -}}
{{- if .Values.redis.internal.enabled }}
{{- .Values.redis.internal.existingSecret | default (printf "%s-redis" (include "mainstay.fullname" .)) }}
{{- else }}
{{- .Values.redis.external.existingSecret }}
{{- end }}
{{- end }}

{{- define "mainstay.redisUrl" -}}
{{- if .Values.redis.internal.enabled }}
{{- printf "redis://%s-redis.%s.svc:6379/0" (include "mainstay.fullname" .) .Release.Namespace }}
{{- else }}
{{- with .Values.redis.external }}
{{- $host := required "redis.external.host is empty; name the server, or set redis.internal.enabled" .host }}
{{- $user := ternary (printf "%s@" .username) "" (ne .username "") }}
{{- printf "%s://%s%s:%v/%v" (ternary "rediss" "redis" .tls.enabled) $user $host .port .database }}
{{- end }}
{{- end }}
{{- end }}

{{- define "mainstay.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "mainstay.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* What all pods have in common: (dict "root" $ "component" "api" "values" .Values.api) */}}
{{- define "mainstay.placement" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "mainstay.podMetadata" -}}
labels:
  {{- include "mainstay.podLabels" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) .values.podAnnotations .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
