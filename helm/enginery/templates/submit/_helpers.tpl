{{- define "enginery.submit.name" -}}
{{- printf "%s-submit" (include "enginery.fullname" .) -}}
{{- end -}}

{{/* What is submitted, and nothing of the pod that does it: another image of that is no reason for another run. */}}
{{- define "enginery.submit.runName" -}}
{{- $what := pick .Values.submit "pipeline" "endpoint" "experiment" "namespace" "arguments" "settings" -}}
{{- printf "%s-%s" (include "enginery.submit.name" .) (toJson $what | sha256sum | trunc 8) -}}
{{- end -}}

{{/* The Job's spec: the same for a Job and a CronJob. */}}
{{- define "enginery.submit.jobSpec" -}}
{{- $submit := .Values.submit -}}
backoffLimit: {{ ternary 0 $submit.retries $submit.wait }}
activeDeadlineSeconds: {{ $submit.deadlineSeconds | int64 }}
template:
  metadata:
    labels:
      {{- include "enginery.podLabels" (list . "submit") | nindent 6 }}
  spec:
    restartPolicy: Never
    serviceAccountName: {{ include "enginery.submit.name" . }}
    automountServiceAccountToken: false
    enableServiceLinks: false
    {{- include "enginery.pullSecrets" . | nindent 4 }}
    securityContext:
      {{- include "enginery.podSecurityContext" . | nindent 6 }}
    {{- include "enginery.placement" $submit | nindent 4 }}
    containers:
      - name: submit
        image: {{ include "enginery.image" (list . "cli") }}
        imagePullPolicy: {{ .Values.images.pullPolicy }}
        args:
          - submit
          - {{ $submit.pipeline }}
          - --endpoint
          - {{ $submit.endpoint | quote }}
          {{- with $submit.experiment }}
          - --experiment
          - {{ . | quote }}
          {{- end }}
          {{- if not $submit.schedule }}
          - --once
          - --run-name
          - {{ include "enginery.submit.runName" . }}
          {{- end }}
          {{- with $submit.namespace }}
          - --namespace
          - {{ . }}
          {{- end }}
          {{- if $submit.settings }}
          - --settings
          - /etc/enginery/submit/settings.yaml
          {{- end }}
          {{- if $submit.wait }}
          - --wait
          {{- end }}
          {{- range $name, $value := $submit.arguments }}
          {{- if kindIs "bool" $value }}
          - --{{ ternary "" "no-" $value }}{{ $name | replace "_" "-" }}
          {{- else }}
          - --{{ $name | replace "_" "-" }}
          {{- /* 100000 and more: Helm reads numbers as floats, and would print 1e+06 */}}
          - {{ ternary (int64 $value | toString) (toString $value) (and (kindIs "float64" $value) (eq (floor $value) (float64 $value))) | quote }}
          {{- end }}
          {{- end }}
        {{- if $submit.token.enabled }}
        env:
          - name: KF_PIPELINES_SA_TOKEN_PATH # where KFP's client looks
            value: /var/run/secrets/kubeflow/pipelines/token
        {{- end }}
        securityContext:
          {{- include "enginery.containerSecurityContext" . | nindent 10 }}
        resources:
          {{- toYaml $submit.resources | nindent 10 }}
        volumeMounts:
          - name: tmp
            mountPath: /tmp
          {{- if $submit.settings }}
          - name: settings
            mountPath: /etc/enginery/submit
            readOnly: true
          {{- end }}
          {{- if $submit.token.enabled }}
          - name: token
            mountPath: /var/run/secrets/kubeflow/pipelines
            readOnly: true
          {{- end }}
    volumes:
      {{- include "enginery.tmpVolume" . | nindent 6 }}
      {{- if $submit.settings }}
      - name: settings
        configMap:
          name: {{ include "enginery.submit.name" . }}
      {{- end }}
      {{- if $submit.token.enabled }}
      - name: token
        projected:
          sources:
            - serviceAccountToken:
                path: token
                audience: {{ $submit.token.audience }}
                expirationSeconds: 7200
      {{- end }}
{{- end -}}
