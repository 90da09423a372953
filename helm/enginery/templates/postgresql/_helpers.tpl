{{- define "enginery.postgresql.name" -}}
{{- printf "%s-postgresql" (include "enginery.fullname" .) -}}
{{- end -}}

{{- define "enginery.postgresql.image" -}}
{{- with .Values.postgresql.image -}}
{{- ternary (printf "%s@%s" .repository .digest) (printf "%s:%s" .repository .tag) (ne .digest "") -}}
{{- end -}}
{{- end -}}
