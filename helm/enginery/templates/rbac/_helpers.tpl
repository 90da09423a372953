{{- define "enginery.trainjobs.name" -}}
{{- printf "%s-trainjobs" (include "enginery.fullname" .) -}}
{{- end -}}
