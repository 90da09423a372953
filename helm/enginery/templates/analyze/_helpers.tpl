{{/* Another name with every change: a Job's pods can't be changed. */}}
{{- define "enginery.analyze.name" -}}
{{- $changes := toJson (list .Values.analyze (include "enginery.image" (list . "analyze"))) -}}
{{- printf "%s-analyze-%s" (include "enginery.fullname" .) (sha256sum $changes | trunc 8) -}}
{{- end -}}

{{- define "enginery.analyze.check" -}}
{{- with .Values.analyze -}}
{{- if not .sources -}}
{{- fail "analyze.sources is empty. Name videos: live addresses such as rtsp://camera/stream, or paths below /data, where analyze.existingClaim is" -}}
{{- end -}}
{{- if regexMatch "://[^/ ]*@" (join " " .sources) -}}
{{- fail "analyze.sources: an address holds a user or a password, and a Job shows it to all who may read Jobs. Put it into a Secret, and name that in analyze.loginsSecret" -}}
{{- end -}}
{{- if not .existingClaim -}}
{{- fail "analyze.existingClaim is empty. Name a PersistentVolumeClaim that holds the bundle, and takes the results" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Variables, by the part's values. */}}
{{- define "enginery.analyze.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
{{- if .gpu.count }}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility,video"}
{{- end }}
{{- if .loginsSecret }}
- {name: NETRC, value: /etc/enginery/logins/netrc}
{{- end }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
