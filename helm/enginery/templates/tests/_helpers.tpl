{{/* A pod of `helm test` that runs a script: dict of root, part, image, script and env (text). */}}
{{- define "enginery.test.pod" -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "enginery.fullname" .root }}-test-{{ .part }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "enginery.labels" (list .root (printf "test-%s" .part)) | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  activeDeadlineSeconds: 600
  {{- include "enginery.pullSecrets" .root | nindent 2 }}
  securityContext:
    {{- include "enginery.podSecurityContext" .root | nindent 4 }}
  containers:
    - name: test
      image: {{ include "enginery.image" (list .root .image) }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      command:
        - python
        - -c
        - |
          {{- .root.Files.Get .script | nindent 10 }}
      env:
        {{- .env | nindent 8 }}
      securityContext:
        {{- include "enginery.containerSecurityContext" .root | nindent 8 }}
      resources:
        {{- include "enginery.smallResources" .root | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
  volumes:
    {{- include "enginery.tmpVolume" .root | nindent 4 }}
{{- end -}}

{{- define "enginery.test.mlflowEnv" -}}
- name: MLFLOW_TRACKING_URI
  value: http://{{ include "enginery.mlflow.name" . }}:{{ .Values.mlflow.service.port }}
{{- if .Values.mlflow.auth.enabled }}
- {name: MLFLOW_TRACKING_USERNAME, value: admin}
- name: MLFLOW_TRACKING_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .Values.mlflow.auth.existingSecret }}, key: {{ .Values.mlflow.auth.passwordKey }}}
{{- end }}
{{- end -}}

{{- define "enginery.test.serveEnv" -}}
- {name: TRITON_URL, value: "http://{{ include "enginery.serve.name" . }}:8000"}
- {name: MODEL, value: {{ .Values.serve.model.name | quote }}}
- {name: IMAGE, value: {{ .Values.serve.test.image | quote }}}
- {name: LABEL, value: {{ .Values.serve.test.label | quote }}}
{{- end -}}
