{{- define "enginery.serve.name" -}}
{{- printf "%s-serve" (include "enginery.fullname" .) -}}
{{- end -}}

{{/* Values that contradict each other, each with the way out. */}}
{{- define "enginery.serve.check" -}}
{{- $serve := .Values.serve -}}
{{- if not (and $serve.model.name $serve.model.digest $serve.model.repositoryDigest) -}}
{{- fail "serve.model.name, serve.model.digest and serve.model.repositoryDigest say what is served. Let `enginery deploy --env ENV NAME@champion --repository DIR` write them, or set serve.enabled to false" -}}
{{- end -}}
{{- if and $serve.model.uri $serve.model.existingClaim -}}
{{- fail "serve.model.uri and serve.model.existingClaim are both set. The model comes from one of them: leave one out" -}}
{{- end -}}
{{- if and $serve.model.registrySecret (not (hasPrefix "oci://" $serve.model.uri)) -}}
{{- fail "serve.model.registrySecret is for an OCI registry, and serve.model.uri names none: begin it with oci://, or leave the secret out" -}}
{{- end -}}
{{- if not (or $serve.model.uri $serve.model.existingClaim) -}}
{{- fail "serve.model.uri and serve.model.existingClaim are both empty. Name the store of model repositories, such as s3://bucket/models, or a PersistentVolumeClaim" -}}
{{- end -}}
{{- if and (eq $serve.kind "InferenceService") $serve.autoscaling.enabled -}}
{{- fail "serve.autoscaling is for the kinds Deployment and Rollout. KServe scales an InferenceService itself, between serve.autoscaling.minReplicas and maxReplicas: set serve.autoscaling.enabled to false" -}}
{{- end -}}
{{- if and (eq $serve.kind "InferenceService") $serve.monitoring.enabled -}}
{{- fail "serve.monitoring is for the kinds Deployment and Rollout. An InferenceService has one port, and that is not Triton's metrics: set serve.monitoring.enabled to false" -}}
{{- end -}}
{{- if and $serve.monitoring.driftAlert.enabled (not $serve.monitoring.enabled) -}}
{{- fail "serve.monitoring.driftAlert is of metrics that nobody reads: set serve.monitoring.enabled to true" -}}
{{- end -}}
{{- if and (eq $serve.kind "InferenceService") $serve.test.image -}}
{{- fail "serve.test is for the kinds Deployment and Rollout. KServe decides at which address an InferenceService answers: leave serve.test.image out" -}}
{{- end -}}
{{- if and $serve.identity.awsRoleArn (not $serve.identity.audience) -}}
{{- fail "serve.identity.awsRoleArn is set and serve.identity.audience is empty. A role of AWS is taken with a token for sts.amazonaws.com" -}}
{{- end -}}
{{- $memory := get (default dict $serve.resources.limits) "memory" -}}
{{- if and $memory (ge (float64 (include "enginery.bytes" $serve.sharedMemory)) (float64 (include "enginery.bytes" $memory))) -}}
{{- fail (printf "serve.sharedMemory is %v, and serve.resources.limits.memory %v. Shared memory counts as the pod's: give it more" $serve.sharedMemory $memory) -}}
{{- end -}}
{{- if and $serve.test.image (not $serve.test.label) -}}
{{- fail "serve.test.image is set and serve.test.label is empty. Say which label the model must answer" -}}
{{- end -}}
{{- end -}}

{{/* Where this version's model repository lies. */}}
{{- define "enginery.serve.source" -}}
{{- $model := .Values.serve.model -}}
{{- $folder := trimPrefix "sha256:" $model.repositoryDigest -}}
{{- if $model.existingClaim -}}
{{- printf "/store/%s" $folder -}}
{{- else if hasPrefix "oci://" $model.uri -}}
{{- printf "%s:%s" $model.uri $folder -}}
{{- else -}}
{{- printf "%s/%s" (trimSuffix "/" $model.uri) $folder -}}
{{- end -}}
{{- end -}}

{{/* The pod: dict of root and container, the container's name. */}}
{{- define "enginery.serve.podSpec" -}}
{{- $root := .root -}}
{{- $serve := $root.Values.serve -}}
{{- $gpus := int $serve.gpu.count -}}
{{- /* KServe hands the pod on to Knative, which refuses a grace period, hooks, and ports of other names. */}}
{{- $kserve := eq $serve.kind "InferenceService" -}}
{{- $port := ternary "http1" "http" $kserve -}}
{{- $security := include "enginery.podSecurityContext" $root | fromYaml -}}
{{- $tolerations := $serve.tolerations -}}
{{- if $gpus -}}
{{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
serviceAccountName: {{ include "enginery.serve.name" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- include "enginery.pullSecrets" $root }}
{{- if and $gpus $serve.gpu.runtimeClassName }}
runtimeClassName: {{ $serve.gpu.runtimeClassName }}
{{- end }}
securityContext:
  {{- ternary (omit $security "fsGroupChangePolicy") $security $kserve | toYaml | nindent 2 }}
{{- if not $kserve }}
terminationGracePeriodSeconds: {{ add 10 (int $serve.terminationSeconds) }}
{{- end }}
{{- include "enginery.placement" (list $root "serve" (merge (dict "tolerations" $tolerations) $serve)) }}
initContainers:
  # Copies the model repository of this very digest and checks every file of it; nothing else reaches Triton.
  - name: fetch
    image: {{ include "enginery.image" (list $root "cli") }}
    imagePullPolicy: {{ $root.Values.images.pullPolicy }}
    args:
      - fetch
      - {{ include "enginery.serve.source" $root | quote }}
      - /models/repository
      - --digest
      - {{ $serve.model.repositoryDigest }}
    env:
      {{- include "enginery.storage.env" $root | nindent 6 }}
      {{- with $root.Values.trust.existingConfigMap }}
      - name: ENGINERY_TRUST_POLICY
        value: /etc/enginery/trust/{{ $root.Values.trust.key }}
      {{- end }}
      {{- with $serve.identity.awsRoleArn }}
      - name: AWS_ROLE_ARN
        value: {{ . | quote }}
      - name: AWS_WEB_IDENTITY_TOKEN_FILE
        value: /var/run/secrets/enginery/token
      {{- end }}
      {{- if $serve.model.registrySecret }}
      - name: DOCKER_CONFIG
        value: /etc/enginery/registry
      {{- end }}
    securityContext:
      {{- include "enginery.containerSecurityContext" $root | nindent 6 }}
    resources:
      {{- include "enginery.smallResources" $root | nindent 6 }}
    volumeMounts:
      - name: models
        mountPath: /models
      - name: tmp
        mountPath: /tmp
      {{- if $serve.model.existingClaim }}
      - name: store
        mountPath: /store
        {{- with $serve.model.path }}
        subPath: {{ . }}
        {{- end }}
        readOnly: true
      {{- end }}
      {{- if $root.Values.trust.existingConfigMap }}
      - name: trust
        mountPath: /etc/enginery/trust
        readOnly: true
      {{- end }}
      {{- if $serve.identity.audience }}
      - name: identity
        mountPath: /var/run/secrets/enginery
        readOnly: true
      {{- end }}
      {{- if $serve.model.registrySecret }}
      - name: registry
        mountPath: /etc/enginery/registry
        readOnly: true
      {{- end }}
      {{- include "enginery.storage.mounts" $root | nindent 6 }}
containers:
  - name: {{ .container }}
    image: {{ include "enginery.image" (list $root "serve") }}
    imagePullPolicy: {{ $root.Values.images.pullPolicy }}
    args:
      {{- if not $gpus }}
      - --model-config-name=cpu # as `enginery serve export` calls the configurations for servers without a GPU
      {{- end }}
      - --exit-timeout-secs={{ $serve.terminationSeconds }}
      {{- range $serve.extraArgs }}
      - {{ . | quote }}
      {{- end }}
    {{- with $serve.extraEnv }}
    env:
      {{- include "enginery.env" (list "serve" (toYaml .)) | nindent 6 }}
    {{- end }}
    ports:
      - {name: {{ $port }}, containerPort: 8000, protocol: TCP}
      {{- if not $kserve }}
      - {name: grpc, containerPort: 8001, protocol: TCP}
      - {name: metrics, containerPort: 8002, protocol: TCP}
      {{- end }}
    startupProbe:
      httpGet: {path: /v2/health/ready, port: {{ $port }}}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: {{ div (add (int $serve.startupSeconds) 4) 5 }}
    readinessProbe:
      httpGet: {path: /v2/health/ready, port: {{ $port }}}
      periodSeconds: 5
      timeoutSeconds: 5
    livenessProbe:
      httpGet: {path: /v2/health/live, port: {{ $port }}}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 6
    {{- if not $kserve }}
    lifecycle:
      preStop: # while endpoints still send requests here
        exec: {command: [sleep, "5"]}
    {{- end }}
    securityContext:
      {{- include "enginery.containerSecurityContext" $root | nindent 6 }}
    resources:
      requests:
        {{- toYaml $serve.resources.requests | nindent 8 }}
      limits:
        {{- with $serve.resources.limits }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if $gpus }}
        {{ $serve.gpu.resource }}: {{ $gpus | quote }}
        {{- end }}
    volumeMounts:
      - name: models # where the image's start looks
        mountPath: /models
        subPath: repository
        readOnly: true
      - name: shm
        mountPath: /dev/shm
      - name: tmp
        mountPath: /tmp
volumes:
  - name: models
    emptyDir: {sizeLimit: {{ $serve.model.sizeLimit }}}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $serve.sharedMemory }}}
  {{- include "enginery.tmpVolume" $root | nindent 2 }}
  {{- with $serve.model.existingClaim }}
  - name: store
    persistentVolumeClaim:
      claimName: {{ . }}
      readOnly: true
  {{- end }}
  {{- with $root.Values.trust.existingConfigMap }}
  - name: trust
    configMap:
      name: {{ . }}
  {{- end }}
  {{- with $serve.identity.audience }}
  - name: identity # for the container that fetches; Triton has none
    projected:
      sources:
        - serviceAccountToken: {audience: {{ . | quote }}, path: token}
  {{- end }}
  {{- with $serve.model.registrySecret }}
  - name: registry # for the container that fetches
    secret:
      secretName: {{ . }}
      defaultMode: 288 # 0440
      items: [{key: .dockerconfigjson, path: config.json}]
  {{- end }}
  {{- include "enginery.storage.volumes" $root | nindent 2 }}
{{- end -}}

{{/* Labels and annotations of the pod. */}}
{{- define "enginery.serve.podMetadata" -}}
labels:
  {{- include "enginery.podLabels" (list . "serve") | nindent 2 }}
annotations:
  enginery/model: {{ printf "%s/%s" .Values.serve.model.name .Values.serve.model.version | quote }}
  {{- with .Values.serve.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
