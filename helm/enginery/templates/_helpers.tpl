{{/* What all parts share: names, labels, images, security contexts. */}}

{{/* Names end in up to 22 more. */}}
{{- define "enginery.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $own := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- $fullname := default $own .Values.fullnameOverride | trunc 41 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $fullname) -}}
{{- fail (printf "resources would be named %s-..., and a Service's name has letters, digits and hyphens alone, a letter first. Name the release so, or set fullnameOverride" $fullname) -}}
{{- end -}}
{{- $fullname -}}
{{- end -}}

{{/* Name of an object in another namespace, which the same release of another namespace may have there, too: list of
root, name and namespace. */}}
{{- define "enginery.nameIn" -}}
{{- $home := (index . 0).Release.Namespace -}}
{{- index . 1 }}{{ if and $home (ne (index . 2) $home) }}-{{ $home }}{{ end -}}
{{- end -}}

{{/* Labels that select pods of a part: list of root and part. They never change. */}}
{{- define "enginery.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* All labels of a resource of a part: list of root and part. */}}
{{- define "enginery.labels" -}}
{{- $root := index . 0 -}}
{{ include "enginery.selector" . }}
app.kubernetes.io/part-of: enginery
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: no versions, so that an upgrade of the chart alone restarts nothing. List of root and part. */}}
{{- define "enginery.podLabels" -}}
{{ include "enginery.selector" . }}
app.kubernetes.io/part-of: enginery
{{- with (index . 0).Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Reference of one of enginery's images: list of root and name. */}}
{{- define "enginery.image" -}}
{{- $root := index . 0 -}}
{{- $images := $root.Values.images -}}
{{- $name := index . 1 -}}
{{- $digest := index $images.digests $name -}}
{{- if $digest -}}
{{- printf "%s/%s@%s" $images.registry $name $digest -}}
{{- else -}}
{{- printf "%s/%s:%s" $images.registry $name (default $root.Chart.AppVersion $images.tag) -}}
{{- end -}}
{{- end -}}

{{- define "enginery.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* As the PodSecurity standard "restricted" wants it. */}}
{{- define "enginery.podSecurityContext" -}}
runAsNonRoot: true
{{- with .Values.security }}
{{- if not (kindIs "invalid" .runAsUser) }}
runAsUser: {{ .runAsUser | int64 }}
{{- end }}
{{- if not (kindIs "invalid" .runAsGroup) }}
runAsGroup: {{ .runAsGroup | int64 }}
{{- end }}
{{- if not (kindIs "invalid" .fsGroup) }}
fsGroup: {{ .fsGroup | int64 }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "enginery.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Where a pod may run: list of root, part and the part's values. */}}
{{- define "enginery.placement" -}}
{{- $pods := dict "matchLabels" (include "enginery.selector" . | fromYaml) -}}
{{- with index . 2 -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- mergeOverwrite (dict "labelSelector" $pods) . | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Variables with those of `extraEnv`: list of part and text. The API server takes no name twice. */}}
{{- define "enginery.env" -}}
{{- $names := list -}}
{{- range index . 1 | fromYamlArray -}}
{{- if has .name $names -}}
{{- fail (printf "%s.extraEnv: %s is there twice, or the chart sets it by another value. Leave it out" (index $ 0) .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- index . 1 -}}
{{- end -}}

{{/* Requests and limits of small helpers: init containers and tests. */}}
{{- define "enginery.smallResources" -}}
requests: {cpu: 100m, memory: 256Mi}
limits: {memory: 1Gi}
{{- end -}}

{{- define "enginery.tmpVolume" -}}
- name: tmp
  emptyDir:
    sizeLimit: 2Gi
{{- end -}}

{{/* Kubernetes' "8Gi" in bytes. */}}
{{- define "enginery.bytes" -}}
{{- $units := dict "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- $text := toString . -}}
{{- mulf (float64 (regexFind "^[0-9.]+" $text)) (get $units (regexFind "[A-Za-z]*$" $text)) -}}
{{- end -}}

{{/* The port of a URL: its own, else that of the scheme. */}}
{{- define "enginery.portOf" -}}
{{- $url := urlParse . -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
{{- default (ternary "443" "80" (eq $url.scheme "https")) $port -}}
{{- end -}}

{{/* An Ingress to the port "http" of a part's Service: dict of root, part, name and ingress. */}}
{{- define "enginery.ingress" -}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "enginery.labels" (list .root .part) | nindent 4 }}
  {{- with .ingress.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .ingress.className }}
  ingressClassName: {{ . }}
  {{- end }}
  {{- if .ingress.tlsSecret }}
  tls:
    - hosts: [{{ .ingress.host | quote }}]
      secretName: {{ .ingress.tlsSecret }}
  {{- end }}
  rules:
    - host: {{ .ingress.host | quote }}
      http:
        paths:
          - path: /
            pathType: Prefix
            backend:
              service:
                name: {{ .name }}
                port:
                  name: http
{{- end -}}

{{/* An HTTPRoute to a part's Service: dict of root, part, name, route and port. */}}
{{- define "enginery.route" -}}
{{- if not (and .route.parentRefs .route.hostnames) -}}
{{- fail (printf "%s.route.parentRefs and %s.route.hostnames say which gateway takes requests to which names. Set both, such as [{name: public, namespace: gateways}] and [models.example.com]" .part .part) -}}
{{- end -}}
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "enginery.labels" (list .root .part) | nindent 4 }}
spec:
  parentRefs:
    {{- toYaml .route.parentRefs | nindent 4 }}
  hostnames:
    {{- toYaml .route.hostnames | nindent 4 }}
  rules:
    - backendRefs:
        - {name: {{ .name }}, port: {{ .port }}}
{{- end -}}

{{/* What older values still ask for, each with what is in its place. */}}
{{- define "enginery.removed" -}}
{{- if (default dict .Values.postgresql).enabled -}}
{{- fail "postgresql.enabled: this chart runs no PostgreSQL any more. Nothing was changed. Dump the database of the old release, restore it into one of an operator or of your own, and name its Secret in mlflow.database.existingSecret: docs/cluster.md" -}}
{{- end -}}
{{- if (default dict .Values.submit).enabled -}}
{{- fail "submit.enabled: this chart submits no pipelines any more. `enginery submit` does, once or by --cron, and Kubeflow Pipelines keeps the schedule: docs/submit.md" -}}
{{- end -}}
{{- if .Values.claims -}}
{{- fail "claims: this chart makes no volumes for pipelines any more, and those that it made stay. Leave the value out, and make new ones with kubectl" -}}
{{- end -}}
{{- end -}}
