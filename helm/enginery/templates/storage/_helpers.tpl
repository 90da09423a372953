{{/* How pods get at object stores. */}}

{{/* A list of variables for MLflow's and boto3's clients. */}}
{{- define "enginery.storage.env" -}}
{{- with .Values.objectStore -}}
- name: AWS_DEFAULT_REGION
  value: {{ .region | quote }}
{{- if .endpointUrl }}
- name: MLFLOW_S3_ENDPOINT_URL
  value: {{ .endpointUrl | quote }}
# Stores other than Amazon's may refuse the checksums that boto3 adds by itself.
- name: AWS_REQUEST_CHECKSUM_CALCULATION
  value: when_required
- name: AWS_RESPONSE_CHECKSUM_VALIDATION
  value: when_required
{{- end }}
{{- if .existingSecret }}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .accessKeyIdKey }}}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .secretAccessKeyKey }}}
{{- end }}
{{- if .gcs.existingSecret }}
- name: GOOGLE_APPLICATION_CREDENTIALS
  value: /etc/enginery/gcs/{{ .gcs.key }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "enginery.storage.mounts" -}}
{{- if .Values.objectStore.gcs.existingSecret }}
- name: gcs
  mountPath: /etc/enginery/gcs
  readOnly: true
{{- end }}
{{- end -}}

{{- define "enginery.storage.volumes" -}}
{{- with .Values.objectStore.gcs.existingSecret }}
- name: gcs
  secret:
    secretName: {{ . }}
    defaultMode: 288 # 0440
{{- end }}
{{- end -}}

{{/* Rules of a network policy: names, object stores and what else is outside. */}}
{{- define "enginery.storage.egress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
- ports:
    {{- $ports := list }}
    {{- range .Values.networkPolicy.egressPorts }}{{ $ports = append $ports (toString .) }}{{ end }}
    {{- with .Values.objectStore.endpointUrl }}{{ $ports = append $ports (include "enginery.portOf" .) }}{{ end }}
    {{- range $ports | uniq }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* Who may call: the release's namespace and those that are named. */}}
{{- define "enginery.storage.clients" -}}
- podSelector: {}
{{- range .Values.networkPolicy.clientNamespaces }}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ . }}
{{- end }}
{{- range .Values.networkPolicy.clientCidrs }}
- ipBlock: {cidr: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* Who calls from outside is in no namespace: list of root, the part and the type of its Service. */}}
{{- define "enginery.storage.checkService" -}}
{{- with (index . 0).Values.networkPolicy -}}
{{- if and .enabled (ne (index $ 2) "ClusterIP") (not .clientCidrs) -}}
{{- fail (printf "%s.service.type is %s, and the network policy lets nobody in from outside the cluster. Name who may call in networkPolicy.clientCidrs, such as 10.0.0.0/8, or set networkPolicy.enabled to false" (index $ 1) (index $ 2)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of one of the claims: list of root, its key and its namespace. */}}
{{- define "enginery.claims.name" -}}
{{- $root := index . 0 -}}
{{- include "enginery.nameIn" (list $root (printf "%s-%s" (include "enginery.fullname" $root) (index . 1)) (index . 2)) -}}
{{- end -}}
