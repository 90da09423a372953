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

{{/* Rules of a network policy: names, the object store and what else is outside. */}}
{{- define "enginery.storage.egress" -}}
{{- include "enginery.egress.names" . }}
{{- with .Values.objectStore.endpointUrl }}
{{ include "enginery.egress.url" (list $ .) }}
{{- end }}
{{ include "enginery.egress.outside" . }}
{{- end -}}

{{/* To the cluster's name servers. */}}
{{- define "enginery.egress.names" -}}
{{- if not (or .Values.networkPolicy.dns.namespaces .Values.networkPolicy.dns.cidrs) -}}
{{- fail "networkPolicy.dns.namespaces and networkPolicy.dns.cidrs are both empty. Name where the cluster's name servers are: kubectl get pods --all-namespaces --selector k8s-app=kube-dns" -}}
{{- end -}}
- to:
    {{- range .Values.networkPolicy.dns.namespaces }}
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ . }}
    {{- end }}
    {{- range .Values.networkPolicy.dns.cidrs }}
    - ipBlock: {cidr: {{ . | quote }}}
    {{- end }}
  ports:
    {{- range .Values.networkPolicy.dns.ports }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* To public addresses and those that are named. */}}
{{- define "enginery.egress.outside" -}}
- to:
    {{- include "enginery.egress.peers" . | nindent 4 }}
  ports:
    {{- range .Values.networkPolicy.egressPorts }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* Not the networks of nodes, pods and machines around them, nor the service that hands out a cloud's credentials. */}}
{{- define "enginery.egress.peers" -}}
{{- if .Values.networkPolicy.publicEgress -}}
- ipBlock:
    cidr: 0.0.0.0/0
    except: [10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 168.63.129.16/32, 169.254.0.0/16, 172.16.0.0/12, 192.0.0.0/24, 192.168.0.0/16]
- ipBlock:
    cidr: ::/0
    except: ["::1/128", "fc00::/7", "fe80::/10", "fec0::/10", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16"]
{{- else -}}
- ipBlock: {cidr: 0.0.0.0/32} # nowhere: an empty list would be everywhere
{{- end }}
{{- range .Values.networkPolicy.egressCidrs }}
- ipBlock: {cidr: {{ . | quote }}}
{{- end }}
{{- range .Values.networkPolicy.egressNamespaces }}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ . }}
{{- end }}
{{- end -}}

{{/* MLflow's database, whose host is in a Secret: any address but the machine's own and a cloud's, until some are named. */}}
{{- define "enginery.egress.unknown" -}}
{{- if or .Values.networkPolicy.egressCidrs .Values.networkPolicy.egressNamespaces }}
{{- include "enginery.egress.peers" . }}
{{- else -}}
- ipBlock: {cidr: 0.0.0.0/0, except: [127.0.0.0/8, 168.63.129.16/32, 169.254.0.0/16]}
- ipBlock: {cidr: "::/0", except: ["::1/128", "fe80::/10", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16"]}
{{- end -}}
{{- end -}}

{{/* To the host of a URL: list of root and URL. Of a Service the second part of its name is the namespace. Any other name
may lead anywhere: public addresses, and private ones only if egressCidrs or egressNamespaces names them. */}}
{{- define "enginery.egress.url" -}}
{{- $root := index . 0 -}}
{{- $host := regexReplaceAll ":[0-9]+$" (urlParse (index . 1)).host "" -}}
{{- $parts := splitList "." $host -}}
- to:
    {{- if regexMatch "^[0-9.]+$" $host }}
    - ipBlock: {cidr: {{ $host }}/32}
    {{- else if eq (len $parts) 1 }}
    - podSelector: {}
    {{- else if or (eq (len $parts) 2) (eq (index $parts 2) "svc") }}
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ index $parts 1 }}
    {{- else }}
    {{- include "enginery.egress.peers" $root | nindent 4 }}
    {{- end }}
  ports:
    # Behind a Service the pods' own port counts, which egressPorts names.
    {{- $ports := list (include "enginery.portOf" (index . 1)) }}
    {{- range $root.Values.networkPolicy.egressPorts }}{{ $ports = append $ports (toString .) }}{{ end }}
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
