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
{{- $scheme := .Values.redis.internal.tls.secret | empty | ternary "redis" "rediss" }}
{{- printf "%s://%s-redis.%s.svc:6379/0" $scheme (include "mainstay.fullname" .) .Release.Namespace }}
{{- else }}
{{- with .Values.redis.external }}
{{- $scheme := ternary "rediss" "redis" .tls.enabled }}
{{- $user := ternary (printf "%s@" .username) "" (ne .username "") }}
{{- if .sentinel.master }}
{{- printf "%s+sentinel://%s%s/%s/%v" $scheme $user (join "," .sentinel.hosts) .sentinel.master .database }}
{{- else }}
{{- $host := required "redis.external.host is empty; name the server, or set redis.internal.enabled" .host }}
{{- printf "%s://%s%s:%v/%v" $scheme $user $host .port .database }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* What the api mounts to trust Redis, and to be trusted by it: sources of a projected volume, [] for none. */}}
{{- define "mainstay.redisCertificates" -}}
{{- $sources := list }}
{{- if .Values.redis.internal.enabled }}
{{- with .Values.redis.internal.tls.secret }}
{{- $sources = append $sources (dict "secret" (dict "name" . "items" (list (dict "key" "ca.crt" "path" "ca.crt")))) }}
{{- end }}
{{- else if .Values.redis.external.tls.enabled }}
{{- with .Values.redis.external.tls }}
{{- if .caSecret }}
{{- $sources = append $sources (dict "secret" (dict "name" .caSecret "items" (list (dict "key" .caKey "path" "ca.crt")))) }}
{{- end }}
{{- if .clientSecret }}
{{- $items := list (dict "key" "tls.crt" "path" "tls.crt") (dict "key" "tls.key" "path" "tls.key") }}
{{- $sources = append $sources (dict "secret" (dict "name" .clientSecret "items" $items)) }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $sources }}
{{- end }}

{{- /* The StatefulSet as it is in the cluster, {} if there is none. */}}
{{- define "mainstay.redisMade" -}}
{{- lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-redis" (include "mainstay.fullname" .)) | default dict | toJson }}
{{- end }}

{{- /* The claim templates of a StatefulSet that an older version of this chart has made: they stay, nobody may change them. */}}
{{- define "mainstay.redisKeptClaims" -}}
{{- dig "spec" "volumeClaimTemplates" list (include "mainstay.redisMade" . | fromJson) | toJson }}
{{- end }}

{{- /* What is missing for the volume of Redis, and what to do: empty if nothing is. Helm asks the cluster. */}}
{{- define "mainstay.storageMissing" -}}
{{- with .Values.redis.internal }}
{{- if and .enabled .persistence.enabled (not .persistence.existingClaim) (ne .persistence.storageClass "-") $.Values.rbac.create }}
{{- $name := printf "%s-redis" (include "mainstay.fullname" $) }}
{{- $kept := include "mainstay.redisKeptClaims" $ | fromJsonArray }}
{{- $claim := $kept | empty | ternary $name (printf "data-%s-0" $name) }}
{{- $found := lookup "v1" "PersistentVolumeClaim" $.Release.Namespace $claim | default dict }}
{{- $asked := dig "spec" "storageClassName" .persistence.storageClass $found }}
{{- $classes := list }}
{{- $default := "" }}
{{- range (lookup "storage.k8s.io/v1" "StorageClass" "" "" | default dict).items }}
{{- $classes = append $classes .metadata.name }}
{{- if eq "true" (dig "metadata" "annotations" "storageclass.kubernetes.io/is-default-class" "" .) }}
{{- $default = .metadata.name }}
{{- end }}
{{- end }}
{{- $there := $classes | empty | ternary "there is none" (printf "there are: %s" (join ", " $classes)) }}
{{- if eq "Bound" (dig "status" "phase" "" $found) }}
{{- else if and $asked (not (has $asked $classes)) }}
{{- printf "Redis waits for its volume: there is no StorageClass %s, which the claim %s asks for (%s).\nMake it; or delete the claim, which holds nothing yet, and name another one:\n\n    kubectl -n %s delete pvc %s --wait=false" $asked $claim $there $.Release.Namespace $claim }}
{{- else if and (not $asked) (not $default) }}
{{- printf "Redis waits for its volume: this cluster has no default StorageClass, and the claim %s names none (%s).\nUnless there is a volume without a class for it, do one of these:\n\n" $claim $there }}
{{- if $kept }}
{{- printf "    kubectl -n %s patch pvc %s -p '{\"spec\":{\"storageClassName\":\"NAME\"}}'" $.Release.Namespace $claim }}
{{- else }}
{{- $upgrade := printf "helm upgrade %s CHART -n %s --reset-then-reuse-values --set redis.internal.persistence" $.Release.Name $.Release.Namespace }}
{{- printf "    %s.storageClass=NAME\n    %s.enabled=false    # an emptyDir" $upgrade $upgrade }}
{{- end }}
{{- printf "\n\nOr mark a StorageClass as the default one. Until then the api is not ready, and no job starts." }}
{{- end }}
{{- end }}
{{- end }}
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
