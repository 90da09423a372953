{{- define "enginery.mlflow.name" -}}
{{- printf "%s-mlflow" (include "enginery.fullname" .) -}}
{{- end -}}

{{/* Values that contradict each other, each with the way out. */}}
{{- define "enginery.mlflow.check" -}}
{{- $mlflow := .Values.mlflow -}}
{{- if and $mlflow.auth.enabled (not $mlflow.auth.existingSecret) -}}
{{- fail "mlflow.auth.existingSecret is empty. Name a Secret with the keys adminPassword and secretKey, or set mlflow.auth.enabled to false" -}}
{{- end -}}
{{- if not $mlflow.database.existingSecret -}}
{{- fail "mlflow.database.existingSecret is empty. Name a Secret with the URI of a PostgreSQL database: docs/cluster.md shows how an operator makes both" -}}
{{- end -}}
{{- if eq $mlflow.artifacts.type "pvc" -}}
{{- if and (gt (int $mlflow.replicas) 1) (not $mlflow.artifacts.pvc.existingClaim) (ne $mlflow.artifacts.pvc.accessMode "ReadWriteMany") -}}
{{- fail (printf "mlflow.replicas is %d, and mlflow.artifacts.pvc.accessMode is %s. Set it to ReadWriteMany, or use s3 or gcs" (int $mlflow.replicas) $mlflow.artifacts.pvc.accessMode) -}}
{{- end -}}
{{- else -}}
{{- $scheme := ternary "s3://" "gs://" (eq $mlflow.artifacts.type "s3") -}}
{{- if not (hasPrefix $scheme $mlflow.artifacts.uri) -}}
{{- fail (printf "mlflow.artifacts.uri is %q. With mlflow.artifacts.type %s it must begin with %s" $mlflow.artifacts.uri $mlflow.artifacts.type $scheme) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The database of runs, users and permissions. */}}
{{- define "enginery.mlflow.databaseEnv" -}}
- name: MLFLOW_BACKEND_STORE_URI
  valueFrom:
    secretKeyRef: {name: {{ .Values.mlflow.database.existingSecret }}, key: {{ .Values.mlflow.database.key }}}
{{- if .Values.mlflow.auth.enabled }}
- name: MLFLOW_AUTH_DATABASE_URI
  value: $(MLFLOW_BACKEND_STORE_URI)
- name: MLFLOW_FLASK_SERVER_SECRET_KEY
  valueFrom:
    secretKeyRef: {name: {{ .Values.mlflow.auth.existingSecret }}, key: {{ .Values.mlflow.auth.secretKeyKey }}}
{{- end }}
{{- end -}}

{{/* Variables of the server. */}}
{{- define "enginery.mlflow.env" -}}
{{- $mlflow := .Values.mlflow -}}
{{- include "enginery.mlflow.databaseEnv" . }}
{{- if $mlflow.auth.enabled }}
- name: MLFLOW_AUTH_ADMIN_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ $mlflow.auth.existingSecret }}, key: {{ $mlflow.auth.passwordKey }}}
- name: MLFLOW_AUTH_DEFAULT_PERMISSION
  value: {{ $mlflow.auth.defaultPermission }}
{{- end }}
- name: MLFLOW_SERVER_ALLOWED_HOSTS
  value: {{ include "enginery.mlflow.allowedHosts" . | quote }}
{{- with include "enginery.mlflow.allowedOrigins" . }}
- name: MLFLOW_SERVER_CORS_ALLOWED_ORIGINS
  value: {{ . | quote }}
{{- end }}
- name: MLFLOW_ARTIFACTS_DESTINATION
  value: {{ ternary "/artifacts" $mlflow.artifacts.uri (eq $mlflow.artifacts.type "pvc") | quote }}
- name: ENGINERY_SCRATCH
  value: /tmp/uploads
{{ include "enginery.storage.env" . }}
{{- with $mlflow.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* By which clients call the server; MLflow compares with the port, if it is not the scheme's own. */}}
{{- define "enginery.mlflow.allowedHosts" -}}
{{- $name := include "enginery.mlflow.name" . -}}
{{- $port := .Values.mlflow.service.port -}}
{{- $hosts := list -}}
{{- range list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) (printf "%s.%s.svc.cluster.local" $name .Release.Namespace) -}}
{{- $hosts = append $hosts (printf "%s:%v" . $port) -}}
{{- if eq (int $port) 80 -}}{{- $hosts = append $hosts . -}}{{- end -}}
{{- end -}}
{{- $hosts = concat $hosts (list "localhost:*" "127.0.0.1:*") -}}
{{- if .Values.mlflow.ingress.enabled -}}{{- $hosts = append $hosts .Values.mlflow.ingress.host -}}{{- end -}}
{{- if .Values.mlflow.route.enabled -}}{{- $hosts = concat $hosts .Values.mlflow.route.hostnames -}}{{- end -}}
{{- concat $hosts .Values.mlflow.allowedHosts | uniq | join "," -}}
{{- end -}}

{{/* Pages whose requests may change something: the UI sends its own origin along. */}}
{{- define "enginery.mlflow.allowedOrigins" -}}
{{- $origins := .Values.mlflow.allowedOrigins -}}
{{- with .Values.mlflow.ingress -}}
{{- if .enabled -}}{{- $origins = append $origins (printf "%s://%s" (ternary "https" "http" (ne .tlsSecret "")) .host) -}}{{- end -}}
{{- end -}}
{{- $origins | uniq | join "," -}}
{{- end -}}

{{- define "enginery.mlflow.claim" -}}
{{- default (printf "%s-artifacts" (include "enginery.mlflow.name" .)) .Values.mlflow.artifacts.pvc.existingClaim -}}
{{- end -}}
